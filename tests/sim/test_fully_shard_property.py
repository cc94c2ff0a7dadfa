"""Any units, used by any rank in any order, any accumulation: gradients are the mean that whole copies compute.

The gradient of a parameter is a whole number chosen by the test, so that every sum is exact and must be equal. The
value of a forward says that the parameters which it was computed with were the right ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_threads
from shard_sides import Side, to_local

Key = tuple[int, int]  # a unit, and a parameter of it
Call = tuple[int, tuple[int, ...]]  # a unit, and the factor of each of its parameters; 0 is no use
TREATMENTS = ("none", "zeros", "accumulate", "hold", "double", "replace")  # of an old gradient, before a step
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # explaining a failure takes minutes
LENGTHS = (1, 2, 3, 5, 8)  # of parameters: shorter and longer than the ranks


class Micro(NamedTuple):
    """One forward and backward: what each rank calls, and whether gradients are synchronised."""

    calls: Sequence[Sequence[Call]]  # per rank
    sync: bool
    look: bool  # a forward without gradients before it


class Step(NamedTuple):
    treatments: Sequence[str]  # of the parameters, one after the other, and from the first again
    micros: Sequence[Micro]


class Plan(NamedTuple):
    world_size: int
    units: Sequence[Sequence[int]]  # lengths of the parameters
    nested: bool  # the first unit holds the second
    reshard_after_forward: bool | None
    steps: Sequence[Step]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size = draw(st.sampled_from([1, 2, 4]))
    unit = st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3)
    units = draw(st.lists(unit, min_size=1, max_size=4))

    def call(number: int) -> st.SearchStrategy[Call]:
        factors = st.tuples(*(st.integers(-3, 3) for _ in units[number]))
        return st.tuples(st.just(number), factors)

    calls = st.lists(st.integers(0, len(units) - 1).flatmap(call), max_size=5)
    alike = calls.map(lambda made: [made] * world_size)
    apart = st.lists(calls, min_size=world_size, max_size=world_size)
    micro = st.builds(Micro, st.one_of(alike, apart), st.booleans(), st.booleans())
    treatments = st.lists(st.sampled_from(TREATMENTS), min_size=1, max_size=4)
    step = st.builds(Step, treatments, st.lists(micro, min_size=1, max_size=3))
    steps = draw(st.lists(step, min_size=1, max_size=4))
    nested = draw(st.booleans()) and len(units) > 1
    return Plan(world_size, units, nested, draw(st.sampled_from([None, True, False])), steps)


class Unit(nn.Module):
    def __init__(self, lengths: Sequence[int], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(torch.ones(length)) for length in lengths])
        if inner is not None:
            self.inner = inner

    def forward(self, x: Tensor, factors: Sequence[int]) -> Tensor:
        for factor, param in zip(factors, self.params, strict=True):
            x = x + factor * param.sum() if factor else x
        return x


class Model(nn.Module):
    """Calls its units as told; its own parameter is always used, so that there always is something to go back from."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        made: list[Unit] = []
        for number, lengths in enumerate(plan.units):
            made.append(Unit(lengths, made[0] if plan.nested and number == 1 else None))
        self.units = nn.ModuleList(made)
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, calls: Sequence[Call]) -> Tensor:
        x = self.own.sum()
        for number, factors in calls:
            x = self.units[number](x, factors)
        return x


def run(comm: Communicator, plan: Plan) -> None:
    """The plan on one rank, with the expected gradients beside it."""
    side = Side("ours", comm, mesh=comm)
    model: Any = Model(plan)
    for unit in model.units:
        lockstep.fully_shard(unit, mesh=comm, reshard_after_forward=plan.reshard_after_forward)
    lockstep.fully_shard(model, mesh=comm)
    params = {(number, index): p for number, unit in enumerate(model.units) for index, p in enumerate(unit.params)}
    expected = Expected(plan)
    held: list[tuple[Tensor, Tensor]] = []
    for step in plan.steps:
        for (key, param), treatment in zip(params.items(), itertools.cycle(step.treatments), strict=False):
            expected.grads[key] = treat(param, treatment, expected.grads[key], held)
        for micro in step.micros:
            calls = micro.calls[comm.rank]
            if micro.look:
                with torch.no_grad():
                    assert model(calls).item() == expected.output(calls)
            model.set_requires_gradient_sync(micro.sync)
            loss = model(calls)
            assert loss.item() == expected.output(calls)
            loss.backward()
            expected.backward(micro)
            check(side, params, expected.grads)
        model.own.grad = None
        with torch.no_grad():
            for param in params.values():
                param.add_(1)
        expected.value += 1
    assert all(torch.equal(to_local(grad), values) for grad, values in held), "a gradient that is held has changed"


class Expected:
    """What whole copies have, in plain numbers: a parameter has one value in all places, and so has its gradient."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.value = 1
        keys = [(number, index) for number, lengths in enumerate(plan.units) for index in range(len(lengths))]
        self.grads: dict[Key, float | None] = dict.fromkeys(keys)
        self._pending: dict[Key, int] = {}  # the ranks' sum since the last synchronisation

    def output(self, calls: Sequence[Call]) -> float:
        sums = (
            factor * self.value * length
            for number, factors in calls
            for factor, length in zip(factors, self.plan.units[number], strict=True)
        )
        return 3 + sum(sums)

    def backward(self, micro: Micro) -> None:
        for number, factors in itertools.chain(*micro.calls):
            for index, factor in enumerate(factors):
                if factor:
                    self._pending[number, index] = self._pending.get((number, index), 0) + factor
        if micro.sync:
            for key, total in self._pending.items():
                self.grads[key] = (self.grads[key] or 0) + total / self.plan.world_size
            self._pending.clear()


def treat(
    param: nn.Parameter, treatment: str, expected: float | None, held: list[tuple[Tensor, Tensor]]
) -> float | None:
    """Do to an old gradient what training scripts do; what it is afterwards."""
    if treatment in ("none", "hold") or param.grad is None:
        if treatment == "hold" and param.grad is not None:
            held.append((param.grad, to_local(param.grad).clone()))
        param.grad = None
        return None
    assert expected is not None
    if treatment == "zeros":
        param.grad.zero_()
        return 0
    if treatment == "double":
        param.grad.mul_(2)
        return expected * 2
    if treatment == "replace":
        param.grad = param.grad * 3
        return expected * 3
    return expected


def check(side: Side, params: dict[Key, nn.Parameter], expected: dict[Key, float | None]) -> None:
    found = side.whole({str(key): param.grad for key, param in params.items()})
    for key, param in params.items():
        grad, wanted = found[str(key)], expected[key]
        assert (grad is None) == (wanted is None), f"{key}: {grad} instead of {wanted}"
        assert grad is None or torch.equal(grad, torch.full(param.shape, float(wanted))), f"{key}: {grad}, not {wanted}"


@settings(max_examples=60, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_gradients_are_the_mean_of_whole_copies(plan: Plan) -> None:
    run_threads(plan.world_size, run, plan, timeout_s=20)
