"""Replicas that drift are named, with rank and interval; training as it should be raises no alarm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import local_of
from lockstep.errors import ConfigError, ReplicaDrift
from lockstep.observe.replica import ReplicaCheck, ReplicaWarning
from lockstep.parallel.strategy import microbatch, optimizer_for, parallelize
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

STEPS = 7


class Net(nn.Module):
    """Odd sizes, running statistics, and a buffer that never changes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.register_buffer("table", torch.randn(7, generator=generator))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)) * self.table))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


Fault = Callable[[int, Any, torch.optim.Optimizer], object]  # what goes wrong on one rank after a step


def train(
    comm: Communicator,
    fault: Fault | None,
    odd: int,
    every: int = 3,
    broadcast_buffers: bool = True,
    steps: int = STEPS,
) -> int | None:
    ddp: Any = lockstep.DistributedDataParallel(Net(), process_group=comm, forward_sync_buffers=broadcast_buffers)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    check = ReplicaCheck(comm, ddp, optimizer, every=every)
    for step in range(1, steps + 1):
        with ddp.no_sync():
            ddp(batch(-step, comm.rank)).pow(2).mean().backward()
        ddp(batch(step, comm.rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault is not None and comm.rank == odd:
            fault(step, ddp.module, optimizer)
        check.after_step(step)
    return check.last_good


def flip(tensor: Tensor, bit: int = 0) -> None:
    tensor.detach().view(-1).view(torch.int32)[-1] ^= 1 << bit


def at(when: int, do: Callable[[Any, torch.optim.Optimizer], object]) -> Fault:
    return lambda step, module, optimizer: do(module, optimizer) if step == when else None


FAULTS: dict[str, tuple[Fault, str]] = {
    "weight": (at(4, lambda m, o: flip(m.first.weight)), "parameter 'first.weight'"),
    "sign": (at(4, lambda m, o: flip(m.last.bias, 31)), "parameter 'last.bias'"),
    "state": (at(4, lambda m, o: flip(o.state[m.first.weight]["exp_avg_sq"], 22)), "exp_avg_sq of 'first.weight'"),
    "step": (at(6, lambda m, o: o.state[m.last.bias]["step"].add_(1)), "step of 'last.bias'"),
    "rate": (at(4, lambda m, o: o.param_groups[0].update(lr=0.02)), "lr of parameter group 0"),
    "table": (at(6, lambda m, o: flip(m.table)), "buffer 'table'"),
    "swap": (
        at(4, lambda m, o: m.first.weight.data[:2].copy_(m.first.weight.data[[1, 0]])),
        "parameter 'first.weight'",
    ),
}


@pytest.mark.parametrize(("world_size", "odd"), [(2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("name", FAULTS)
def test_a_drift_is_named_on_every_rank(name: str, world_size: int, odd: int) -> None:
    fault, what = FAULTS[name]
    with pytest.raises(RankFailed) as caught:
        run_threads(world_size, train, fault, odd)
    assert set(caught.value.errors) == set(range(world_size))
    for error in caught.value.errors.values():
        assert error.kind == "ReplicaDrift"
        assert what in error.message
        assert "equal after step 3" in error.message
        assert "at step 6" in error.message
        who = f"rank {odd} no longer holds" if world_size == 3 else "ranks 0, 1 no longer hold"
        assert who in error.message


def test_an_optimizer_that_steps_on_one_rank_only() -> None:
    def one(comm: Communicator) -> ReplicaDrift:
        ddp: Any = lockstep.DistributedDataParallel(Net(), process_group=comm)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        check = ReplicaCheck(comm, ddp, optimizer)
        ddp(batch(0, comm.rank)).sum().backward()
        if comm.rank != 1:
            optimizer.step()
        with pytest.raises(ReplicaDrift) as caught:
            check.check(1)
        return caught.value

    for error in run_threads(3, one):
        assert error.ranks == (1,)
        assert {"parameter 'first.weight'", "momentum_buffer of 'last.bias'"} <= set(error.what)
        assert "optimizer.step() on every rank" in str(error)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sound_training_is_not_disturbed(world_size: int) -> None:
    """With microbatches, and running statistics that are another's until the next forward."""
    assert run_threads(world_size, train, None, 0) == [None if world_size == 1 else 6] * world_size


def test_statistics_that_nobody_synchronises_are_said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, train, None, 0, every=2, broadcast_buffers=False)
    found = [warning for warning in caught if warning.category is ReplicaWarning]
    assert len(found) == 2  # one on each rank
    assert "SyncBatchNorm" in str(found[0].message)


def test_a_bit_in_a_weight_is_found_in_spite_of_moving_statistics() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RankFailed, match=r"rank 1 no longer holds.*'first.weight'"):
            run_threads(3, train, FAULTS["weight"][0], 1, broadcast_buffers=False)


def test_never_and_twice_and_wrong() -> None:
    def one(comm: Communicator) -> None:
        before = comm._collectives
        check = ReplicaCheck(comm, Net(), every=0)
        check.after_step(0)
        check.after_step(100)
        assert comm._collectives == before
        check.check(5)
        check.check(5)
        assert comm._collectives == before + 1
        with pytest.raises(ConfigError, match="every=-1"):
            ReplicaCheck(comm, Net(), every=-1)

    run_threads(2, one)
    assert run_threads(3, train, FAULTS["weight"][0], 1, every=0) == [None] * 3


# ------------------------------------------------------------------ cut models


def cut_training(comm: Communicator, sharding: Any, odd: int | None) -> int | None:
    mesh = comm.mesh(replica=2, shard=-1) if sharding == "hybrid" else comm
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
    replica = parallelize(model, sharding, mesh=mesh, units=[model[0]] if sharding == "hybrid" else None)
    optimizer = optimizer_for(replica, torch.optim.AdamW, lr=0.01)
    check = ReplicaCheck(comm, replica, optimizer, every=2)
    for step in range(1, 5):
        with microbatch(replica, is_last=True):
            replica(batch(step, comm.rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and comm.rank == odd:
            flip(local_of(next(replica.parameters())))
        check.after_step(step)
    return check.last_good


@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_pieces_are_no_drift(sharding: str) -> None:
    assert run_threads(3, cut_training, sharding, None) == [4] * 3


def test_copies_of_pieces_are_compared() -> None:
    assert run_threads(4, cut_training, "hybrid", None) == [4] * 4
    with pytest.raises(RankFailed, match=r"ranks 1, 3 no longer hold the same model.*'0.weight'"):
        run_threads(4, cut_training, "hybrid", 3)
