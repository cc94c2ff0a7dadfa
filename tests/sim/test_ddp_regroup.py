"""A wrapper that goes on over another group learns again, so that it stays in step with ranks that are new there."""

from __future__ import annotations

import torch
from torch import nn

from lockstep import DistributedDataParallel
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_threads


def step(ddp: DistributedDataParallel, rank: int) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(torch.full((2, 3), float(rank + 1))).sum().backward()
    return [param.grad.clone() for param in ddp.parameters() if param.grad is not None]


def regroup(comm: Communicator) -> list[list[torch.Tensor]]:
    """Ranks 0 and 1 train together, then rank 2, which has not trained yet, joins them."""
    pair = comm.split(0 if comm.rank < 2 else 1)
    assert pair is not None
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    ddp = DistributedDataParallel(model, process_group=pair, bucket_cap_mb=1e-5)
    for _ in range(2 if comm.rank < 2 else 0):
        step(ddp, comm.rank)
    ddp.reducer.reset_plan(comm)
    return [step(ddp, comm.rank) for _ in range(3)]


def test_old_and_new_ranks_stay_in_step() -> None:
    for steps in run_threads(3, regroup):
        for grads in steps:  # inputs are 1, 2 and 3 on the ranks: 2 on average; two rows each
            torch.testing.assert_close(grads, [torch.full((4, 3), 8.0), torch.full((2, 4), 12.0)])
