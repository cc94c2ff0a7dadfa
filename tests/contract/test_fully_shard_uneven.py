"""Ranks that do different things, and steps that fail: torch hangs or needs a flag, ours equals the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp2_sides import Cases
from torch import Tensor, nn

from lockstep.errors import PeerFailed
from shard_models import MLP_UNITS, NESTED_UNITS, Branches, Checkpointed, Holder, Nested, mlp
from shard_sides import ADAMW, SGD, Side, scalar, seeded

CASES = Cases(__name__)
# What one rank has later than the others is reduced later, by itself: another order of the same sum.
TWO_PARTS = {"plain": 1e-6}
BRANCHES = ("enter", "left", "right", "leave")


# ------------------------------------------------------------------ units that some ranks use


@CASES.add(2, 3, 4, against="plain", tolerance=TWO_PARTS)
def units_of_some_ranks(side: Side) -> Any:
    model = seeded(Branches)
    side.shard_units(model, BRANCHES)
    optimizer = ADAMW(model.parameters())
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        use = ("left", "right", "none", "left", "right")[(side.rank + step) % 5]
        side.backward(scalar(model(side.batch(step, 6, 8), use)), model)
        optimizer.step()
        seen.append([param.grad is None for param in model.parameters()])
    return [seen, side.snapshot(model)]


@CASES.add(2, against="plain")
def parameters_of_some_ranks_in_one_unit(side: Side) -> Any:
    model = seeded(Branches)
    side.shard(model)
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8), ("left", "right")[(side.rank + step) % 2])), model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2, 4, against="plain", tolerance=TWO_PARTS)
def a_unit_that_one_rank_uses_for_a_while(side: Side) -> Any:
    """With accumulation, and without a reduction in between."""
    model = seeded(Branches)
    side.shard_units(model, BRANCHES)
    for step in range(2):
        with side.no_sync(model):
            side.backward(scalar(model(side.batch(step, 6, 8), "left" if side.rank == 0 else "none")), model)
        side.backward(scalar(model(side.batch(10 + step, 6, 8), "right" if side.rank else "none")), model)
    return side.snapshot(model)


@CASES.add(2, against="plain", tolerance=TWO_PARTS)
def outputs_that_some_ranks_use(side: Side) -> Any:
    model = seeded(lambda: Holder("tuple"))
    side.shard_units(model, ("inner.left", "inner.right", "inner"))
    for step in range(3):
        left, (right, *_) = model(side.batch(step, 6, 8))
        side.backward(scalar(left if (side.rank + step) % 2 else right), model)
    return side.snapshot(model)


@CASES.add(2, against="plain", tolerance=TWO_PARTS)
def more_calls_on_one_rank(side: Side) -> Any:
    """A unit that runs once here and twice there."""

    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(8, 8)
            self.leave = nn.Linear(8, 3)

        def forward(self, x: Tensor, times: int) -> Tensor:
            for _ in range(times):
                x = self.again(x).tanh()
            return self.leave(x)

    model = seeded(Loops)
    side.shard_units(model, ("again", "leave"))
    for step in range(3):
        side.backward(scalar(model(side.batch(step, 6, 8), 1 + (side.rank + step) % 3)), model)
    return side.snapshot(model)


@CASES.add(2, against="plain", tolerance=TWO_PARTS)
def another_order_on_one_rank(side: Side) -> Any:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x: Tensor, first: str) -> Tensor:
            return self.b(self.a(x).tanh()) if first == "a" else self.a(self.b(x).tanh())

    model = seeded(Swapped)
    side.shard_units(model, ("a", "b"))
    for step in range(3):
        side.backward(scalar(model(side.batch(step, 6, 8), "ab"[(side.rank + step) % 2])), model)
    return side.snapshot(model)


@CASES.add(2, against="plain")
def branches_with_checkpoints(side: Side) -> Any:
    model = seeded(lambda: Checkpointed(False))
    side.shard_units(model, ("blocks.0.up", "blocks.0", "blocks.1"))
    for step in range(2):
        model.blocks[1].requires_grad_(step == 0)
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
    return side.snapshot(model)


# ------------------------------------------------------------------ steps that fail on all ranks


class Failing(nn.Module):
    """Raises in forward or in backward, when told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fail = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fail == "forward":
            raise ArithmeticError("forward was told to fail")
        y = self.linear(x)
        if self.fail == "backward" and y.requires_grad:
            y.register_hook(self._raise)
        return y.tanh()

    @staticmethod
    def _raise(grad: Tensor) -> None:
        raise ArithmeticError("backward was told to fail")


def failing() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Failing(), nn.Linear(8, 3))


@CASES.add(1, 2, 4, against="plain")
def after_an_exception(side: Side) -> Any:
    """In forward or backward, on every rank: the next step is right, and nothing of the failed one is in it."""
    found = []
    for place in ("forward", "backward"):
        for units in (("0", "1", "2"), ("1",), ()):
            model: Any = seeded(failing)
            side.shard_units(model, units)
            optimizer = SGD(model.parameters())
            for step in range(4):
                optimizer.zero_grad()
                if side.shards and step in (0, 2):
                    model[1].fail = place
                    with pytest.raises(ArithmeticError, match=f"{place} was told"):
                        scalar(model(side.batch(90 + step, 6, 8))).backward()
                    model[1].fail = ""
                    optimizer.zero_grad()
                side.backward(scalar(model(side.batch(step, 6, 8))), model)
                optimizer.step()
            found.append(side.snapshot(model))
    return found


@CASES.add(2, against="plain")
def after_an_exception_outside(side: Side) -> Any:
    """The caller gives up between forward and backward, and in a forward without gradients."""
    model: Any = seeded(failing)
    side.shard_units(model, ("0", "1", "2"))
    optimizer = SGD(model.parameters())
    for step in range(3):
        if side.shards:
            model(side.batch(70 + step, 6, 8))  # dropped
            model[1].fail = "forward"
            with torch.no_grad(), pytest.raises(ArithmeticError):
                model(side.batch(80, 6, 8))
            model[1].fail = ""
            kept = model(side.batch(60 + step, 6, 8))
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
        if side.shards:
            del kept
    return side.snapshot(model)


@CASES.add(2, against="plain")
def reset_after_an_exception(side: Side) -> Any:
    """torch's own way to go on, which ours does not need."""
    model: Any = seeded(failing)
    side.shard_units(model, ("0", "1", "2"))
    if side.shards:
        model[1].fail = "backward"
        with pytest.raises(ArithmeticError):
            scalar(model(side.batch(9, 6, 8))).backward()
        model[1].fail = ""
        model.reset_iter_state()
        model.zero_grad()
    side.backward(scalar(model(side.batch(0, 6, 8))), model)
    return side.snapshot(model)


@CASES.add(2, against="plain")
def what_an_exception_takes_with_it(side: Side) -> Any:
    """In training all gradients of the step, on every rank; in an evaluation none."""
    model: Any = seeded(failing)
    side.shard_units(model, ("0", "1", "2"))
    side.backward(scalar(model(side.batch(0, 6, 8))), model)
    if side.shards:
        model[1].fail = "forward"
        with torch.no_grad(), pytest.raises(ArithmeticError):
            model(side.batch(9, 6, 8))
        model[1].fail = ""
    side.backward(scalar(model(side.batch(1, 6, 8))), model)
    kept = side.snapshot(model)
    if side.shards:
        model[1].fail = "forward"
        with pytest.raises(ArithmeticError):
            model(side.batch(9, 6, 8))
        model[1].fail = ""
    else:
        model.zero_grad()
    dropped = [param.grad is None for param in model.parameters()]
    side.backward(scalar(model(side.batch(2, 6, 8))), model)
    return [kept, dropped, side.snapshot(model)]


# ------------------------------------------------------------------ steps that fail on one rank


@CASES.add(2, 4, against="plain")
def after_an_exception_on_one_rank(side: Side) -> Any:
    """Every rank learns of it, in the same step: the others as PeerFailed."""
    found = []
    for place in ("forward", "backward"):
        for units in (("0", "1", "2"), ()):
            model: Any = seeded(failing)
            side.shard_units(model, units)
            optimizer = SGD(model.parameters())
            for step in range(4):
                optimizer.zero_grad()
                if side.shards and step in (0, 2):
                    culprit = step // 2
                    model[1].fail = place if side.rank == culprit else ""
                    expected = ArithmeticError if side.rank == culprit else PeerFailed
                    with pytest.raises(expected, match="was told" if side.rank == culprit else f"rank {culprit}"):
                        scalar(model(side.batch(90 + step, 6, 8))).backward()
                    model[1].fail = ""
                    optimizer.zero_grad()
                side.backward(scalar(model(side.batch(step, 6, 8))), model)
                optimizer.step()
            found.append(side.snapshot(model))
    return found


@CASES.add(2, against="plain")
def two_models_by_turns(side: Side) -> Any:
    """Forward of one inside the step of the other; both trained by one optimizer."""
    first, second = seeded(mlp), seeded(Nested, 1)
    side.shard_units(first, MLP_UNITS)
    side.shard_units(second, NESTED_UNITS)
    optimizer = SGD([*first.parameters(), *second.parameters()])
    both = nn.ModuleList([first, second])
    for step in range(3):
        optimizer.zero_grad()
        x = side.batch(step, 6, 8)
        left = first(x)
        with torch.no_grad():
            second(x)
        side.backward(scalar(left) + scalar(second(x)), both)
        optimizer.step()
    return [side.snapshot(first), side.snapshot(second)]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
