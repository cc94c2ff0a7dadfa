"""What a step costs in Python grows with the number of parameters, and not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn import Module

from lockstep import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer, clip_grad_norm_, fully_shard
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_threads

Wrap = Callable[[Module, Communicator], Module]

WRAPS: dict[str, Wrap] = {
    "ddp": lambda module, comm: DistributedDataParallel(module, process_group=comm),
    "fully_shard, one unit": lambda module, comm: fully_shard(module, mesh=comm),
    "fsdp": lambda module, comm: FullyShardedDataParallel(module, process_group=comm),
}


def calls_of_a_step(layers: int, wrap: Wrap) -> int:
    """How many Python functions rank 0 of two enters in its fourth step."""

    def body(comm: Communicator) -> int:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)]), comm)
        cut = {"ddp": model} if isinstance(model, DistributedDataParallel) else {}
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **cut)

        def step() -> None:
            model(torch.ones(2, 3)).sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):  # buckets have found their plan, the ranks theirs
            step()
        count = 0

        def entered(frame: FrameType, event: str, _: object) -> None:
            nonlocal count
            count += event == "call" and "/lockstep/" in frame.f_code.co_filename

        sys.setprofile(entered)
        try:
            step()
        finally:
            sys.setprofile(None)
        return count

    return run_threads(2, body, timeout_s=60)[0]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_four_times_as_many_parameters_are_four_times_the_work(wrap: Wrap) -> None:
    few, many = calls_of_a_step(30, wrap), calls_of_a_step(120, wrap)
    assert 60 < few < many < 5 * few
