"""A model that is dropped gives its shared memory back, whatever wrapped it and however its last step ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from leaks import Snapshot
from lockstep import DistributedDataParallel, FullyShardedDataParallel, ShardedOptimizer, fully_shard
from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.errors import CollectiveMismatch, PeerFailed, PeerLost
from lockstep.testing.worlds import run_processes
from shard_sides import Side
from shared_segments import mapped_segments, pool_segments
from shm_ranks import share
from tp_models import loss_of
from tp_sides import grid_of

_left: list[Any] = []  # what a job of this module leaves on purpose


class WithParameter(nn.Module):
    """A parameter is among the outputs, as the scale of some losses is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.scale


def train(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        out = model(torch.randn(4, 64))
        loss = out.square().mean() if isinstance(out, Tensor) else out[0].mean() * out[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def replicated(_: Communicator) -> None:
    model = DistributedDataParallel(WithParameter())
    train(model, torch.optim.AdamW(model.parameters()))


def replicated_with_a_sharded_optimizer(_: Communicator) -> None:
    model = DistributedDataParallel(net())
    train(model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, ddp=model, lr=0.1))


def sharded(_: Communicator) -> None:
    model = net()
    for part in (model[0], model[2], model):
        fully_shard(part)
    train(model, torch.optim.AdamW(model.parameters()))
    model.state_dict()["0.weight"].full_tensor()  # torch keeps what it has found out for the mesh


def in_the_older_wrapper(_: Communicator) -> None:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, torch.optim.AdamW(model.parameters()))
    model.state_dict()


def tensor_parallel(comm: Communicator) -> None:
    grid = grid_of(Side("ours", comm), (2, 1))
    model = grid.model()
    tokens = grid.tokens(0)
    loss_of(model(tokens), tokens).backward()
    next(model.parameters()).full_tensor()


class TwoBranches(nn.Module):
    """The second one's backward, which comes first, raises on rank 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x).tanh(), self.second(x)
        second.register_hook(self.fail)
        return first + second

    def fail(self, _: Tensor) -> None:
        if self.rank == 0:
            raise ArithmeticError


def failing_on_one_rank(comm: Communicator) -> None:
    """Autograd keeps the nodes that it has not come to, with the whole parameters, until the next backward."""
    model = TwoBranches(comm.rank)
    fully_shard(model)
    with pytest.raises((ArithmeticError, PeerFailed)):
        train(model, torch.optim.SGD(model.parameters()))


def after_an_operation_that_failed(comm: Communicator) -> None:
    """What the transport keeps of the first error must not be the frames that the error went through."""
    ours = share(comm)
    with pytest.raises((CollectiveMismatch, PeerLost)):
        ours.all_reduce(torch.ones(comm.rank + 1))
    ours.transport.abort(_raised(ours))
    comm.barrier()


def _raised(held: Communicator) -> PeerFailed:
    """An error with a traceback whose frames hold the communicator, as that of a guard's user may."""
    try:
        raise PeerFailed(f"rank 1 of {held.world_size} raised", 1)
    except PeerFailed as error:
        return error


KINDS: tuple[Callable[[Communicator], None], ...] = (
    replicated,
    replicated_with_a_sharded_optimizer,
    sharded,
    in_the_older_wrapper,
    tensor_parallel,
    failing_on_one_rank,
    after_an_operation_that_failed,
)


@pytest.mark.parametrize("make_and_drop", KINDS, ids=lambda kind: kind.__name__)
def test_no_segment_stays(make_and_drop: Callable[[Communicator], None]) -> None:
    before = pool_segments()
    run_processes(2, make_and_drop)
    assert pool_segments() == before


def closed(rank: int, file: str) -> None:
    with lockstep.init(rank=rank, world_size=2, file=file, verbose=False) as comm:
        comm.all_reduce(torch.ones(9))
        assert mapped_segments()


def test_nor_one_of_a_communicator_that_is_closed(tmp_path: Any) -> None:
    before = pool_segments()
    run_processes(2, closed, str(tmp_path / "meet"), connect=False)
    assert pool_segments() == before


def keeping(_: Communicator) -> None:
    _left.append(torch_names.communicator_over().empty(9))


def letting_go(_: Communicator) -> None:
    _left.clear()


@contextlib.contextmanager
def told(*what: str) -> Iterator[None]:
    """The check of every test would say so of this one."""
    before = Snapshot()
    yield
    found = before.leaks()
    assert len(found) == len(what), found
    assert all(part in line for part, line in zip(what, found, strict=True)), found


def test_a_job_that_keeps_one_fails_its_test_and_no_later_one() -> None:
    before = pool_segments()
    with told("in rank 0 of 2", "in rank 1 of 2"):
        run_processes(2, keeping)
    with told():
        run_processes(2, letting_go)
    assert pool_segments() == before
