"""What one rank does differently from the others, to its model or its gradients, is named: rank and parameter.

The numbers are rows of the table in the research on failures of stock torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.observe.gradients import NonFiniteWarning
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

WORLDS = [(2, 1), (3, 0), (3, 2)]  # ranks, and the odd one


class Net(nn.Module):
    """Two branches of equal shapes, and a head."""

    def __init__(self, names: str = "ab", width: int = 5) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, width))
        self.head = nn.Linear(width, 3)
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor, branches: str = "ab") -> Tensor:
        hidden = [torch.tanh(self.get_submodule(name)(x)) for name in branches]
        return self.head(torch.stack(hidden).sum(0))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def messages(world_size: int, kind: str, fn: Callable[..., Any], *args: Any) -> list[str]:
    """What every rank raised, which has to be of one kind."""
    with pytest.raises(RankFailed) as caught:
        run_threads(world_size, fn, *args)
    errors = caught.value.errors
    assert {rank: error.kind for rank, error in errors.items()} == dict.fromkeys(range(world_size), kind), caught.value
    return [error.message for error in errors.values()]


# ------------------------------------------------------------------ models that differ when they are wrapped


def frozen(net: Net) -> None:
    net.a.weight.requires_grad_(False)


def frozen_other(net: Net) -> None:
    net.b.weight.requires_grad_(False)


def other_dtype(net: Net) -> None:
    net.head.bias = nn.Parameter(net.head.bias.double())


def more(net: Net) -> None:
    net.extra = nn.Linear(1, 1)


def other_buffer(net: Net) -> None:
    net.table = torch.zeros(3)


BUILDS: dict[str, tuple[Callable[[], Net], Callable[[], Net], tuple[str, ...]]] = {
    "14 frozen": (Net, lambda: edited(frozen), ("'a.weight'", "requires_grad")),
    "16 another one frozen": (lambda: edited(frozen), lambda: edited(frozen_other), ("'a.weight'", "requires_grad")),
    "17 width": (Net, lambda: Net(width=6), ("'a.weight'", "[5, 4]", "[6, 4]")),
    "17 number": (Net, lambda: edited(more), ("'extra.weight'",)),
    "18 order": (Net, lambda: Net("ba"), ("'a.weight'", "'b.weight'", "another order")),
    "dtype": (Net, lambda: edited(other_dtype), ("'head.bias'", "float32", "float64")),
    "buffer": (Net, lambda: edited(other_buffer), ("'table'", "[2]", "[3]")),
}


def edited(change: Callable[[Net], None]) -> Net:
    net = Net()
    change(net)
    return net


@pytest.mark.parametrize(("world_size", "odd"), WORLDS)
@pytest.mark.parametrize("name", BUILDS)
def test_other_models_are_named_at_wrap_time(name: str, world_size: int, odd: int) -> None:
    usual, other, words = BUILDS[name]

    def wrap(comm: Communicator) -> None:
        lockstep.DistributedDataParallel(other() if comm.rank == odd else usual(), process_group=comm)

    differing = [rank for rank in range(world_size) if (rank == odd) != (odd == 0)]
    for text in messages(world_size, "ModelMismatch", wrap):
        assert all(word in text for word in words), text
        assert all(f"rank {rank} " in text for rank in differing), text


def test_row_19_other_first_values_are_rank_0s_after_wrapping() -> None:
    def wrap(comm: Communicator) -> Tensor:
        with torch.random.fork_rng():
            net = Net()
        net.head.bias.data.fill_(comm.rank)
        lockstep.DistributedDataParallel(net, process_group=comm)
        return net.head.bias.detach()

    for bias in run_threads(3, wrap):
        assert torch.equal(bias, torch.zeros(3))


# ------------------------------------------------------------------ models that differ later


def train(comm: Communicator, odd: int, do: Callable[[Any, int], Any], steps: int = 4) -> list[Tensor]:
    """`do(ddp, step)` on rank `odd` is a context or None: for its backward in this step."""
    ddp: Any = lockstep.DistributedDataParallel(Net(), process_group=comm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        context = do(ddp, step) if comm.rank == odd or odd < 0 else None
        if context is None:
            ddp(batch(step, comm.rank)).pow(2).mean().backward()
        else:
            with context:
                ddp(batch(step, comm.rank)).pow(2).mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in ddp.parameters()]


def freeze_later(ddp: Any, step: int) -> None:
    if step == 2:
        ddp.module.b.weight.requires_grad_(False)


@pytest.mark.parametrize(("world_size", "odd"), WORLDS)
def test_row_15_frozen_on_one_rank_after_wrapping(world_size: int, odd: int) -> None:
    for text in messages(world_size, "ModelMismatch", train, odd, freeze_later):
        assert f"rank {odd}: 'b.weight'" in text
        assert "'a.weight'" not in text


def same(results: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_frozen_on_all_ranks_and_thawed_again() -> None:
    def freeze(ddp: Any, step: int) -> None:
        ddp.module.b.weight.requires_grad_(step not in (1, 2))

    assert same(run_threads(3, train, -1, freeze))


@pytest.mark.parametrize(("world_size", "odd"), WORLDS)
def test_row_21_no_sync_on_one_rank(world_size: int, odd: int) -> None:
    for text in messages(
        world_size, "ReplicaDrift", train, odd, lambda ddp, step: ddp.no_sync() if step == 1 else None
    ):
        assert f"rank {odd} changed the parameters with gradients that were not averaged" in text


def test_steps_without_synchronisation_on_all_ranks() -> None:
    """Local SGD: each rank goes its own way for a while; that it is not one model is then intended."""
    run_threads(3, train, -1, lambda ddp, step: ddp.no_sync() if step in (0, 2) else None)


def test_other_numbers_of_microbatches_are_no_fault() -> None:
    def accumulate(comm: Communicator) -> list[Tensor]:
        ddp: Any = lockstep.DistributedDataParallel(Net(), process_group=comm)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            with ddp.no_sync():
                for number in range(comm.rank + step):
                    ddp(batch(10 * step + number, comm.rank)).sum().backward()
            ddp(batch(step, comm.rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in ddp.parameters()]

    assert same(run_threads(3, accumulate))


def test_rows_22_and_23_unused_branches_are_zeros_and_no_fault() -> None:
    def branches(comm: Communicator, where: int) -> list[Tensor]:
        ddp: Any = lockstep.DistributedDataParallel(Net(), process_group=comm)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            ddp(batch(step, comm.rank), "a" if step % 2 and comm.rank in (where, 3 + where) else "ab").sum().backward()
            optimizer.step()
        return [param.detach().clone() for param in ddp.parameters()]

    assert same(run_threads(2, branches, 1))
    assert same(run_threads(3, branches, 0))


# ------------------------------------------------------------------ gradients that are not finite


def spoil(ddp: Any, name: str, value: float) -> Any:
    """A hook that puts one bad number into a gradient."""

    def hook(grad: Tensor) -> Tensor:
        bad = grad.clone()
        bad.view(-1)[-1] = value
        return bad

    return ddp.module.get_parameter(name).register_hook(hook)


def train_with(
    comm: Communicator, odd: int, value: float, microsteps: int = 0, scaler: bool = False, cap_mb: float | None = None
) -> int:
    ddp: Any = lockstep.DistributedDataParallel(Net(), process_group=comm, bucket_cap_mb=cap_mb)
    held = torch.amp.GradScaler("cpu") if scaler else None
    for step in range(1, 5):
        ddp.zero_grad()
        for number in range(microsteps):
            handle = spoil(ddp, "a.weight", value) if comm.rank == odd and step == 3 and number == 0 else None
            with ddp.no_sync():
                ddp(batch(-step, comm.rank)).sum().backward()
            if handle:
                handle.remove()
        handle = spoil(ddp, "a.weight", value) if comm.rank == odd and step == 3 and not microsteps else None
        loss = ddp(batch(step, comm.rank)).sum()
        (loss if held is None else held.scale(loss)).backward()
        if handle:
            handle.remove()
    return ddp.reducer.exchange.watch.step


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_GUARD", "strict")


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("world_size", "odd"), WORLDS)
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "1 NaN"), (float("-inf"), "1 infinite")])
@pytest.mark.parametrize(("microsteps", "cap_mb"), [(0, None), (2, None), (0, 0.00001)])
def test_row_28_a_bad_number_on_one_rank(
    world_size: int, odd: int, value: float, word: str, microsteps: int, cap_mb: float | None
) -> None:
    for text in messages(world_size, "NonFiniteGradient", train_with, odd, value, microsteps, False, cap_mb):
        assert f"in backward pass 3: on rank {odd}, of 'a.weight' ({word} of 20 elements)." in text


def test_by_default_it_is_a_warning_said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(3, train_with, 1, float("nan"))
    assert [warning.category for warning in caught] == [NonFiniteWarning] * 3  # one on each rank
    assert "on rank 1, of 'a.weight'" in str(caught[0].message)


@pytest.mark.usefixtures("strict")
def test_no_alarm_for_a_grad_scaler_and_for_finite_numbers() -> None:
    assert run_threads(2, train_with, 1, float("inf"), 0, True) == [4, 4]
    assert run_threads(2, train_with, 1, 3e38) == [4, 4]


def test_off_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_GUARD", "off")
    assert run_threads(2, train_with, 1, float("nan")) == [4, 4]
