"""Who owns which piece, and what that saves."""

import torch
from torch import nn

import lockstep
from lockstep.learn.stage import Stage, run

WIDTH = 256


def held_kib(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    def local(tensor: torch.Tensor) -> int:
        return getattr(tensor, "_local_tensor", tensor).nbytes

    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    params = list(model.parameters())
    return {
        "parameters_kib": sum(map(local, params)) / 1024,
        "gradients_kib": sum(local(param.grad) for param in params if param.grad is not None) / 1024,
        "optimizer_kib": sum(map(local, states)) / 1024,
    }


def sharding(stage: Stage) -> None:
    comm = stage.comm
    stage.screen(
        "A parameter in pieces",
        "Each rank keeps one piece. Before a layer computes, all-gather puts the whole together for a moment; after "
        "its backward, reduce-scatter gives each rank the sum of just the piece that it owns.",
    )
    piece = torch.tensor([10.0**comm.rank])  # [1], of [W] in all
    whole = torch.empty(comm.world_size)
    comm.all_gather_into_tensor(whole, piece, label="before the layer")
    grad = torch.full((comm.world_size,), 1.0 + comm.rank)
    mine = torch.empty(1)
    comm.reduce_scatter_tensor(mine, grad, label="after its backward")

    x = torch.randn(8, WIDTH)  # [batch, features]
    for title, cut, text in (
        ("Copied", None, "DistributedDataParallel: every rank holds everything; AdamW keeps two more of each weight."),
        ("Cut", "full", "fully_shard: everything is cut by the number of ranks. The whole exists one layer at a time."),
    ):
        stage.screen(title, text + " What this rank holds between steps, in KiB:")
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])
        if cut is None:
            model = lockstep.DistributedDataParallel(model)
        else:
            lockstep.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).sum().backward()
        optimizer.step()
        stage.show(**held_kib(model, optimizer))


if __name__ == "__main__":
    run(sharding)
