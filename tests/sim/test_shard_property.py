"""Whatever units ranks use, in whatever order, whoever raises or accumulates: one model, as on one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.errors import PeerFailed
from lockstep.parallel.fsdp_module import FSDPModule
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.shard_context import context_of, unit_of
from lockstep.testing.worlds import run_threads

PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]  # explaining a failure takes minutes
EXPERTS = 3


class Boom(Exception):
    pass


class Step(NamedTuple):
    route: Sequence[Sequence[int]]  # per rank, the experts it runs, in order; one may come several times
    raising: dict[int, str]  # rank -> "forward" or "backward"
    accumulate: bool  # a step whose gradients stay on their ranks, before
    checkpoint: bool  # forward runs again in backward


class Plan(NamedTuple):
    world_size: int
    shared: bool
    reshard_after_forward: bool | int | None
    nested: bool
    steps: Sequence[Step]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size = draw(st.integers(1, 4))
    route = st.lists(st.lists(st.integers(0, EXPERTS - 1), max_size=3), min_size=world_size, max_size=world_size)
    raising = st.dictionaries(st.integers(0, world_size - 1), st.sampled_from(["forward", "backward"]), max_size=2)
    step = st.builds(Step, route, st.one_of(st.just({}), raising), st.booleans(), st.booleans())
    return Plan(
        world_size,
        draw(st.booleans()),
        draw(st.sampled_from([True, False, None, *([2] if world_size == 4 else [])])),
        draw(st.booleans()),
        draw(st.lists(step, min_size=1, max_size=5)),
    )


class Routed(nn.Module):
    """Units of odd sizes, of which a rank runs those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 5)) for _ in range(EXPERTS))
        self.last = nn.Linear(5, 1, bias=False)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, route: Sequence[int], raising: str | None, checkpoint: bool) -> Tensor:
        x = self.first(x)
        for place, expert in enumerate(route):
            if raising == "forward" and place == len(route) - 1:
                raise Boom
            run = self.experts[expert]
            x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if checkpoint else run(x)
        if raising == "forward":
            raise Boom
        if raising == "backward":
            x.register_hook(_explode)
        return self.last(x).pow(2).mean()


def _explode(grad: Tensor) -> Tensor:
    raise Boom


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def whole_parameters(model: nn.Module) -> list[Tensor]:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    values = [param.detach().clone() for param in model.parameters()]
    for unit in units:
        unit.reshard()
    return values


def train(comm: Communicator, base: nn.Module, plan: Plan) -> tuple[list[Tensor], list[str]]:
    model = copy.deepcopy(base)
    for number, expert in enumerate(model.experts):
        if plan.nested and number == 0:
            fully_shard(expert[0], mesh=comm, reshard_after_forward=plan.reshard_after_forward)
        fully_shard(expert, mesh=comm, reshard_after_forward=plan.reshard_after_forward)
    fully_shard(model, mesh=comm, reshard_after_forward=plan.reshard_after_forward)
    unit = unit_of(model)
    assert unit is not None
    context_of(unit).wholes.sharing = plan.shared
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    log: list[str] = []
    for number, step in enumerate(plan.steps):
        optimizer.zero_grad()
        route, raising = step.route[comm.rank], step.raising.get(comm.rank)
        try:
            if step.accumulate:
                with model.no_sync():
                    model(batch(number + 50, comm.rank), route, None, step.checkpoint).backward()
            model(batch(number, comm.rank), route, raising, step.checkpoint).backward()
        except (Boom, PeerFailed) as error:
            log.append(type(error).__name__)
            assert all(param.grad is None for param in model.parameters())
            continue
        log.append("")
        assert model.never.grad is None
        optimizer.step()
    return whole_parameters(model), log


def train_alone(base: nn.Module, plan: Plan) -> list[Tensor]:
    model = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, step in enumerate(plan.steps):
        if step.raising:
            continue
        optimizer.zero_grad()
        for rank in range(plan.world_size):
            for data in [batch(number + 50, rank)] * step.accumulate + [batch(number, rank)]:
                (model(data, step.route[rank], None, False) / plan.world_size).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def expected_log(step: Step, rank: int) -> str:
    if not step.raising:
        return ""
    first = "forward" if "forward" in step.raising.values() else "backward"
    return "Boom" if step.raising.get(rank) == first else "PeerFailed"


@settings(max_examples=30, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_use_of_units_trains_as_one_process_does(plan: Plan) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = Routed()
    expected = train_alone(base, plan)
    for rank, (values, log) in enumerate(run_threads(plan.world_size, train, base, plan)):
        for step, happened in zip(plan.steps, log, strict=True):
            assert happened == expected_log(step, rank)
        for value, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=2e-5, atol=2e-6)
