"""A training loop of one's own that may be stopped or killed at any moment, and goes on where it was.

On as many ranks as before it then ends with the same bits, on others with every sample all the same.

lockstep run --nproc-per-node 2 --max-restarts 3 examples/resume.py out      starts ranks that die again, by itself
torchrun --nproc-per-node 2 examples/resume.py out                           start it again, with any number of ranks
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

EPOCHS = 10


def waves() -> TensorDataset:
    """1003 points of a curve: no number of ranks divides them."""
    x = torch.linspace(-3, 3, 1003)[:, None]
    return TensorDataset(x, torch.sin(3 * x) + 0.3 * x)


def main(out: str) -> int:
    """Train on all ranks; the exit code."""
    with lockstep.init(verbose=False) as comm:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        replica = lockstep.DistributedDataParallel(model.to(comm.device), process_group=comm)
        optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        data = waves()
        sampler = lockstep.DistributedSampler(data, comm.world_size, comm.rank, shuffle=True)
        loader = lockstep.DataLoader(data, batch_size=16 // comm.world_size, sampler=sampler)

        # everything that the rest of the run depends on, in one checkpoint
        state = {"train": lockstep.TrainState(replica, optimizer), "scheduler": scheduler, "loader": loader}
        stop = lockstep.StopRequest(comm)
        with lockstep.Checkpointer(out, comm, keep=2) as checkpointer:
            found = checkpointer.load(state)
            step = found.step if found else 0
            print(f"rank {comm.rank} is up: pid {os.getpid()}, after step {step}\n", end="")
            for epoch in range(loader.epoch, EPOCHS):
                loader.set_epoch(epoch)
                for x, y in loader:
                    loss = nn.functional.mse_loss(replica(x.to(comm.device)), y.to(comm.device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    step += 1
                    if stop.agreed():
                        loader.coverage.combine(comm)
                        checkpointer.save(step, state)
                        return lockstep.REQUEUE
                    if step % 50 == 0:
                        loader.coverage.combine(comm)
                        checkpointer.save_async(step, state)  # copied now, written while training goes on
                scheduler.step()
        report(comm, loader, model)
    return 0


def report(comm: lockstep.Communicator, loader: lockstep.DataLoader[tuple[Tensor, ...]], model: nn.Module) -> None:
    """Rank 0 says what came out, and that every sample was used as often as it should be."""
    loader.coverage.combine(comm)
    if comm.rank == 0:
        exact = sum(verdict.is_exact for verdict in loader.coverage.verdicts())
        digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
        print(f"{exact} of {EPOCHS} epochs had every sample; weights {digest[:16]}\n", end="")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
