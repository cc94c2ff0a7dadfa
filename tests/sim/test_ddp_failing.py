"""Ranks that raise anywhere in a step: the others are told, nobody has gradients, the next step is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.errors import PeerFailed, ReplicaError
from lockstep.testing.worlds import run_threads

IN_FORWARD = -1
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # explaining a failure takes minutes


class Boom(Exception):
    pass


class Step(NamedTuple):
    raising: Mapping[int, int]  # rank -> parameter at whose gradient it raises, or IN_FORWARD
    accumulate: bool  # a micro-step without synchronisation before
    skipped: int | None  # a parameter that no rank uses


class Plan(NamedTuple):
    world_size: int
    length: int
    cap_bytes: int
    steps: Sequence[Step]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size, count = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    raising = st.dictionaries(st.integers(0, world_size - 1), st.integers(IN_FORWARD, count - 1), max_size=world_size)
    step = st.builds(Step, raising, st.booleans(), st.none() | st.integers(0, count - 1))
    return Plan(
        world_size, count, draw(st.sampled_from([1, 16, 1 << 20])), draw(st.lists(step, min_size=1, max_size=5))
    )


class Chain(nn.Module):
    """Parameters one after the other, so that their gradients come one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(2) for _ in range(count))
        self.broken = False

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for index, param in enumerate(self.params):
            if index != skipped:
                x = x * 1 + param * (index + 1)
        if self.broken:
            raise Boom
        return x.sum()


def explode(grad: Tensor) -> None:
    raise Boom


def train(comm: Communicator, plan: Plan) -> list[str]:
    model = Chain(plan.length)
    ddp: Any = lockstep.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=plan.cap_bytes / 2**20)
    outcomes = []
    for step in plan.steps:
        model.zero_grad()
        x = torch.zeros(2, requires_grad=True)
        if step.accumulate:
            with ddp.no_sync():
                ddp(x, None).backward()
        where = step.raising.get(comm.rank)
        model.broken = where == IN_FORWARD
        handle = None if where is None or model.broken else model.params[where].register_hook(explode)
        try:
            ddp(x, step.skipped).backward()
        except (Boom, PeerFailed) as error:
            outcomes.append(type(error).__name__)
            assert all(param.grad is None for param in model.params), "a failed step leaves no gradients"
        else:
            outcomes.append("fine")
            check(model, step)
        finally:
            model.broken = False
            if handle is not None:
                handle.remove()
    return outcomes


def check(model: Chain, step: Step) -> None:
    for index, param in enumerate(model.params):
        times = int(step.accumulate) + int(index != step.skipped)
        if times == 0:
            assert param.grad is None
        else:
            assert param.grad is not None
            assert torch.allclose(param.grad, torch.full((2,), float(times * (index + 1)))), f"parameter {index}"


@settings(max_examples=60, phases=PHASES, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(plans())
def test_all_ranks_learn_of_it(plan: Plan) -> None:
    outcomes = run_threads(plan.world_size, train, plan, timeout_s=5)
    for number, step in enumerate(plan.steps):
        raising = {rank for rank, where in step.raising.items() if where != step.skipped}
        for rank, told in enumerate(outcomes):
            wanted = "Boom" if rank in raising else "PeerFailed" if raising else "fine"
            assert told[number] == wanted, f"step {number}, rank {rank}: {told[number]}, not {wanted}"


class Lookup(nn.Module):
    """A table that is looked up, or multiplied with as a whole, which makes its gradient a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, as_a_whole: bool) -> Tensor:
        rows = self.table.weight if as_a_whole else self.table(torch.tensor([1, 2]))
        return (rows.sum(0) + self.bias).sum()


def train_after_a_raising_end(comm: Communicator, odd: int) -> list[str]:
    """The first backward waits with everything until its end; there it raises on one rank, which goes on."""
    model = Lookup()
    ddp = lockstep.DistributedDataParallel(model, process_group=comm)
    outcomes = []
    for step in range(3):
        model.zero_grad()
        try:
            (ddp(as_a_whole=step == 0 and comm.rank == odd) * (step + 1)).backward()
        except (ReplicaError, PeerFailed) as error:
            outcomes.append(type(error).__name__)
            assert model.bias.grad is None
            assert model.table.weight.grad is None
        else:
            outcomes.append(str(model.bias.grad))
    return outcomes


@pytest.mark.parametrize("odd", [0, 1])
def test_a_backward_that_raises_at_its_end_is_told_too(odd: int) -> None:
    told = run_threads(2, train_after_a_raising_end, odd, timeout_s=5)
    assert told[odd] == ["ReplicaError", "tensor([2., 2.])", "tensor([3., 3.])"]
    assert told[1 - odd] == ["PeerFailed", "tensor([2., 2.])", "tensor([3., 3.])"]
