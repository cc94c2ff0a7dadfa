"""Any model, any use of its parameters, any pattern of accumulation: gradients are the mean that one process computes.

The gradient of a parameter is a whole number chosen by the test, so that every sum is exact and must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_threads

Use = Sequence[tuple[int, int]]  # (parameter, coefficient), several times the same parameter too
TREATMENTS = ("none", "zeros", "accumulate", "hold", "replace", "move")  # of an old gradient, before a step
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # explaining a failure takes minutes


class Micro(NamedTuple):
    """One forward and backward: what each rank uses, and whether gradients are synchronised."""

    uses: Sequence[Use]  # per rank
    sync: bool


class Step(NamedTuple):
    treatments: Sequence[str]  # per parameter
    micros: Sequence[Micro]


class Plan(NamedTuple):
    world_size: int
    shapes: Sequence[tuple[int, ...]]
    doubles: Sequence[bool]
    cap_bytes: int
    steps: Sequence[Step]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size = draw(st.sampled_from([1, 2, 4]))
    count = draw(st.integers(1, 6))
    shapes = draw(st.lists(st.sampled_from([(), (1,), (3,), (2, 2), (0,), (4, 3)]), min_size=count, max_size=count))
    doubles = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    use = st.lists(st.tuples(st.integers(0, count - 1), st.integers(-8, 8)), max_size=count + 2)
    micro = st.builds(Micro, st.lists(use, min_size=world_size, max_size=world_size), st.booleans())
    treatment = st.one_of(
        st.sampled_from(TREATMENTS).map(lambda one: [one] * count),
        st.lists(st.sampled_from(TREATMENTS), min_size=count, max_size=count),
    )
    steps = st.lists(st.builds(Step, treatment, st.lists(micro, min_size=1, max_size=3)), min_size=1, max_size=5)
    return Plan(world_size, shapes, doubles, draw(st.sampled_from([1, 16, 64, 1 << 20])), draw(steps))


class Weighted(nn.Module):
    """The output's derivative by a parameter is the sum of the coefficients that it is used with."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        dtypes = [torch.float64 if double else torch.float32 for double in plan.doubles]
        self.params = nn.ParameterList(torch.ones(s, dtype=d) for s, d in zip(plan.shapes, dtypes, strict=True))

    def forward(self, x: Tensor, use: Use) -> Tensor:
        for index, coefficient in use:
            x = x + (self.params[index] * coefficient).sum()
        return x


def treat(param: nn.Parameter, treatment: str, held: list[tuple[Tensor, Tensor]]) -> None:
    """What a training script may do with a gradient between two steps."""
    if param.grad is None or treatment == "accumulate":
        return
    if treatment == "zeros":
        param.grad.zero_()
    elif treatment == "replace":
        param.grad = torch.ones_like(param)
    elif treatment == "move":
        param.grad.data = torch.full_like(param.grad, 2.0)
    else:
        if treatment == "hold":
            held.append((param.grad, param.grad.clone()))
        param.grad = None


def copies(model: Weighted) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.params]


def train(comm: Communicator, plan: Plan) -> list[list[Tensor | None]]:
    """Gradients after every micro-step; what was held must not have changed."""
    model = Weighted(plan)
    ddp: Any = lockstep.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=plan.cap_bytes / 2**20)
    seen: list[list[Tensor | None]] = []
    held: list[tuple[Tensor, Tensor]] = []
    for step in plan.steps:
        for param, treatment in zip(model.params, step.treatments, strict=True):
            treat(param, treatment, held)
        for micro in step.micros:
            ddp.require_backward_grad_sync = micro.sync
            ddp(torch.zeros((), requires_grad=True) * 1, micro.uses[comm.rank]).backward()
            seen.append(copies(model))
    assert all(torch.equal(grad, values) for grad, values in held), "a gradient that the caller holds has changed"
    return seen


def expected(plan: Plan) -> list[list[list[Tensor | None]]]:
    """The same by the rules: local gradients add up; a synchronisation makes what anyone used the mean."""
    models = [Weighted(plan) for _ in range(plan.world_size)]
    used: set[int] = set()
    seen: list[list[list[Tensor | None]]] = [[] for _ in models]
    for step in plan.steps:
        for model in models:
            for param, treatment in zip(model.params, step.treatments, strict=True):
                treat(param, treatment, [])
        for micro in step.micros:
            for model, use in zip(models, micro.uses, strict=True):
                model(torch.zeros((), requires_grad=True) * 1, use).backward()
                used.update(index for index, _ in use)
            if micro.sync:
                for index in used:
                    average([model.params[index] for model in models])
                used.clear()
            for rank, model in enumerate(models):
                seen[rank].append(copies(model))
    return seen


def average(replicas: Sequence[nn.Parameter]) -> None:
    grads = [param.grad for param in replicas]
    whole = sum((grad for grad in grads if grad is not None), torch.zeros_like(replicas[0]))
    for param in replicas:
        param.grad = (whole / len(replicas)).detach().clone()


@settings(max_examples=150, phases=PHASES, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(plans())
def test_gradients_are_the_mean(plan: Plan) -> None:
    for rank, (mine, wanted) in enumerate(zip(run_threads(plan.world_size, train, plan), expected(plan), strict=True)):
        for micro, (grads, right) in enumerate(zip(mine, wanted, strict=True)):
            for index, (grad, value) in enumerate(zip(grads, right, strict=True)):
                place = f"rank {rank}, micro-step {micro}, parameter {index}"
                assert (grad is None) == (value is None), place
                assert grad is None or value is None or torch.equal(grad, value), f"{place}: {grad} and not {value}"
