"""The full system: N processes against one."""

import torch
from torch import nn
from torch.nn import functional

import lockstep
from lockstep.learn.stage import Stage, run

BATCH, STEPS = 840, 60  # 1 to 8 ranks divide a batch of 840


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:  # STEPS x ([batch, 4], [batch, 1])
    torch.manual_seed(1)
    return [(x := torch.randn(BATCH, 4), x.sum(dim=1, keepdim=True).sin()) for _ in range(STEPS)]


def train(model: nn.Module, mine: slice) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    losses = []
    for x, y in samples():
        loss = functional.mse_loss(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp_training(stage: Stage) -> None:
    comm = stage.comm
    stage.screen("One process", f"{STEPS} steps of {BATCH} samples each, on every rank the same: this is what we want.")
    alone = network()
    wanted = torch.tensor(train(alone, slice(None)))  # [steps]
    stage.curve(loss=wanted)

    text = "Each takes its part of every batch; the mean of their losses is the batch's. Only the wrapper is new."
    stage.screen("All of them together", text)
    together = lockstep.DistributedDataParallel(network())
    part = BATCH // comm.world_size
    losses = torch.tensor(train(together, slice(comm.rank * part, (comm.rank + 1) * part)))
    stage.curve(own_loss=losses)
    stage.quietly.all_reduce(losses, "mean")
    stage.curve(mean_loss=losses)

    text = "The largest difference in any weight, and in any loss: rounding, as the additions have another order."
    stage.screen("They coincide", text)
    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    stage.show(difference_of_weights=max((a - b).abs().max() for a, b in pairs))
    stage.show(difference_of_losses=(wanted - losses).abs().max())


if __name__ == "__main__":
    run(ddp_training)
