"""What is seen of the steps of optimizers, in one place for all who want to know."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lockstep.observe.flight import FlightRecorder
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_gradients import GradientFacts
from lockstep.observe.torch_optimizers import OPTIMIZERS, Seen
from lockstep.observe.torch_steps import StepCounter


class Looks:
    """Notes when it is called."""

    def __init__(self, folder: Path) -> None:
        self.recorder = FlightRecorder(folder / "flight", 0, 1)
        self.seen: deque[Seen] = deque(maxlen=2)
        self.due_ns = inf
        self.looked: list[list[float]] = []

    def look(self, optimizer: Any) -> None:
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.looked.append([value for value, _ in self.seen[-1][1]])


class Steps:
    """Is asked whether a step of the rank has ended, and says no."""

    def __init__(self) -> None:
        self.guard: Any = None
        self.clock = StepClock()
        self.planned = 0
        self.groups: Any = SimpleNamespace(listed={}, followed={}, all=list)
        self.counter = StepCounter(lambda optimizer: False)
        self.asked: list[Any] = []

    def stepped(self, optimizer: Any, started: Sequence[Any]) -> bool:
        self.asked.append(optimizer)
        return bool(started)

    def plan(self) -> None:
        self.planned += 1


@pytest.fixture
def looks(tmp_path: Path) -> Iterator[Looks]:
    made = Looks(tmp_path)
    detach = [OPTIMIZERS.attach(), BACKWARDS.attach()]
    OPTIMIZERS.looks = cast("Any", made)
    yield made
    for call in detach:
        call()
    made.recorder.close()
    assert OPTIMIZERS.looks is None


class Twice(torch.optim.SGD):
    """Its step calls that of its parent class, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def train(optimizer: torch.optim.Optimizer, param: nn.Parameter, factor: float = 1.0) -> None:
    (param.sum() * factor).backward()
    param.grad = None  # nothing is changed by the step
    optimizer.step()


def test_an_optimizer_whose_step_calls_its_parents_step_steps_once(looks: Looks) -> None:
    param = weight()
    optimizer, steps, told = Twice([param], lr=0.1), Steps(), list[Any]()
    OPTIMIZERS.steps, OPTIMIZERS.counted = cast("Any", steps), lambda one, _: told.append(one)
    for _ in range(3):
        train(optimizer, param)
    assert steps.asked == told == [optimizer] * 3


def test_a_loop_that_ends_its_steps_itself_is_not_asked_whether_one_has_ended(looks: Looks) -> None:
    param, steps, told = weight(), Steps(), list[Any]()
    optimizer = torch.optim.SGD([param], lr=0.1)
    OPTIMIZERS.steps, OPTIMIZERS.counted = cast("Any", steps), lambda *how: told.append(how)
    steps.clock.is_marked = True
    for step in range(1, 4):
        train(optimizer, param)
        train(optimizer, param)
        assert (len(told), steps.planned) == (step - 1, step - 1)
        OPTIMIZERS.step_done()
    assert told == [(optimizer, True)] * 3
    OPTIMIZERS.step_done()  # in which none has stepped
    assert (len(told), steps.planned, steps.asked) == (3, 4, [])


def test_a_step_that_raises_is_not_counted_and_the_next_one_is(looks: Looks) -> None:
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.1)
    steps = Steps()
    OPTIMIZERS.steps = cast("Any", steps)

    def fail() -> float:
        raise ValueError("the closure's own")

    with pytest.raises(ValueError, match="the closure's own"):
        optimizer.step(fail)
    assert steps.asked == []
    train(optimizer, param)
    assert steps.asked == [optimizer]


def test_who_looks_is_called_where_a_loss_is_not_finite_or_none_is_known_or_it_is_due(looks: Looks) -> None:
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.0)
    train(optimizer, param)
    assert looks.looked == []
    train(optimizer, param, inf)
    assert looks.looked == [[inf]]
    train(optimizer, param)
    (param.sum() * torch.nan).backward()
    train(optimizer, param)  # of two losses the first
    assert str(looks.looked) == "[[inf], [nan, 3.0]]"
    optimizer.step()  # without a backward
    assert looks.looked[2:] == [[]]
    train(optimizer, param)
    looks.due_ns = 0
    train(optimizer, param)
    assert looks.looked[3:] == [[3.0]]


def test_losses_of_a_step_are_kept_until_the_next_with_the_step_they_were_in(looks: Looks) -> None:
    param = weight()
    optimizer = torch.optim.SGD([param], lr=0.0)
    for step in range(4):
        looks.recorder.set_step(step)
        train(optimizer, param, step + 1)
    assert [(step, [value for value, _ in losses]) for step, losses, *_ in looks.seen] == [(2, [9.0]), (3, [12.0])]
    assert BACKWARDS.recent == []


@pytest.mark.parametrize("is_looking", [True, False])
def test_what_a_finite_loss_hid_is_told_of_its_step_whether_the_guard_looks_or_is_held_up(
    is_looking: bool, looks: Looks
) -> None:
    param, told = nn.Parameter(torch.ones(3)), list[Any]()
    optimizer = torch.optim.SGD([param], lr=0.1)
    facts = SimpleNamespace(tell=lambda *fact: told.append(fact), sights={})
    guard = SimpleNamespace(recorder=looks.recorder, settings=SimpleNamespace(mode="on"), facts=facts)
    OPTIMIZERS.looks = gradients = GradientFacts(cast("Any", guard), lambda _: [("weight", param)])
    for step in range(7):
        looks.recorder.set_step(step)
        gradients.due_ns = gradients._due_ns = inf if step else 0.0  # the first is looked at, as always
        optimizer.zero_grad()
        param.square().sum().backward()
        if step == 5 and param.grad is not None:
            param.grad.fill_(torch.nan)
        optimizer.step()
        if is_looking:
            gradients.forget()
    [(topic, step, (_, [fault], _))] = told
    assert (topic, step) == ("gradient", 5)
    assert fault == "'weight' (3 NaN of 3 elements)"
    assert [step for step, *_ in gradients.seen] == ([5, 6] if is_looking else [*range(7)])
