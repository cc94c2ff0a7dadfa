"""The first number that is not finite, where losses are on a device: which step is told, and that nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from far_tensors import Far, HostNumber, Spoilt
from lockstep.observe import finite_later, torch_gradients
from lockstep.observe.facts import FINITE
from lockstep.observe.finite_later import FiniteLater, numbers_of
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.pace import PACE
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_gradients import GradientFacts
from lockstep.observe.torch_optimizers import OPTIMIZERS


class Program:
    """Trains one model of two parameters step by step; `told` is what its rank has told of its gradients."""

    def __init__(self, folder: Path) -> None:
        self.recorder = FlightRecorder(folder / "flight", 0, 1)
        self.facts: list[tuple[Any, ...]] = []
        self.sights: dict[int, Any] = {}
        facts = SimpleNamespace(tell=lambda *fact: self.facts.append(fact), sights=self.sights)
        guard = SimpleNamespace(recorder=self.recorder, settings=SimpleNamespace(mode="on"), facts=facts)
        self.param = nn.Parameter(torch.ones(3))
        self.host = HostNumber()
        self.optimizer = torch.optim.SGD([self.param], lr=0.1)
        self.gradients = GradientFacts(cast("Any", guard), lambda _: [("weight", self.param)])
        self.gradients.due_ns = self.gradients._due_ns = inf  # only a sign makes it look
        self.gradients._went_well = True

    @property
    def grad(self) -> torch.Tensor | None:
        """Of the probe."""
        return None if self.param.grad is None else self.param.grad.as_subclass(Far)

    @property
    def told(self) -> list[tuple[int, str]]:
        """Steps and origins."""
        return [(step, value[0]) for topic, step, value in self.facts if topic == "gradient"]

    def backward(self, loss: float = 1.0, own: float = 1.0) -> None:
        far = (self.param * loss).sum().as_subclass(Far)
        far = Spoilt.apply(far, own)  # type: ignore[no-untyped-call]
        torch.autograd.backward(far)

    def step(self, step: int, *, mean: float = 1.0, backwards: int = 1, **made: float) -> None:
        """made: factors of the loss, and of this rank's own gradient; mean: of that of all ranks."""
        self.recorder.set_step(step)
        self.optimizer.zero_grad()
        for _ in range(backwards):
            self.backward(**made)
        assert self.param.grad is not None
        self.param.grad *= mean
        self.optimizer.step()

    def steps(self, first: int, end: int, **made: Any) -> None:
        for step in range(first, end):
            self.step(step, **made)

    def looks(self, step: int) -> None:
        """The device has come so far: what it has said is known in the next step."""
        self.host.arrives()
        Far.may_wait = True
        self.step(step)
        Far.may_wait = False


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    made = Program(tmp_path)
    detach = [OPTIMIZERS.attach(), BACKWARDS.attach()]
    BACKWARDS.follow([made.param])
    monkeypatch.setattr(BACKWARDS, "probes", [lambda: made])
    OPTIMIZERS.looks = made.gradients
    monkeypatch.setattr(BACKWARDS, "_plain", Far)
    monkeypatch.setattr(finite_later, "host_number", lambda: made.host)
    monkeypatch.setattr(torch_gradients, "_ASKED_NS", 0)
    Far.may_wait = False
    yield made
    Far.may_wait, Far.has_failed = True, False
    for call in detach:
        call()
    made.recorder.close()


def test_a_loss_is_told_with_its_step_and_line_however_late_the_device_says_it(program: Program) -> None:
    program.steps(0, 5)
    program.step(5, loss=nan)
    program.gradients.forget()
    program.steps(6, 9)
    assert program.told == []
    program.looks(9)  # what was asked in the first step: all was well
    assert program.told == []
    program.steps(10, 12)
    program.gradients.forget()
    program.looks(12)
    assert program.told == [(5, "the loss is not finite")]
    assert program.facts[-1][2][2].endswith(" backward")
    program.steps(13, 15, loss=nan)
    assert len(program.told) == 1


@pytest.mark.parametrize(
    ("made", "origin"),
    [
        ({"mean": nan}, ""),  # that of another rank: this one's loss is finite, and not in the step after
        ({"own": nan}, "gradients are not finite before averaging"),
        ({"own": inf}, "gradients are not finite before averaging"),
    ],
)
def test_what_a_finite_loss_hides_is_told_of_its_own_step(made: dict[str, Any], origin: str, program: Program) -> None:
    program.step(0)
    program.host.arrives()
    program.step(1, **made)
    program.steps(2, 4)
    program.looks(4)
    assert program.told == [(1, origin)]


def test_what_the_program_has_left_out_is_no_fault_and_the_next_one_is_told(program: Program) -> None:
    program.recorder.set_step(0)
    program.backward(loss=nan)  # and then no step of the optimizer
    program.steps(1, 3)
    program.looks(3)
    assert program.told == []
    program.gradients._heeds_ns = 0  # it is not looked at again and again
    program.step(4, loss=inf)
    program.looks(5)
    program.looks(6)
    assert program.told == [(4, "the loss is not finite")]


def test_infinite_gradients_under_a_scaler_are_no_fault(program: Program) -> None:
    scaler = torch.amp.GradScaler("cpu")
    program.step(0, mean=inf)
    program.looks(1)
    assert program.told == []
    assert scaler.is_enabled()


def test_steps_are_kept_until_the_device_has_said_that_they_went_well(program: Program) -> None:
    def kept() -> list[int]:
        program.gradients.forget()
        return [step for step, *_ in program.gradients.seen]

    program.steps(0, 4)
    assert kept() == [0, 1, 2, 3]
    program.host.arrives()
    program.step(4)  # what was asked in step 0 is answered, and the others are asked for
    assert kept() == [0, 1, 2, 3, 4]
    program.host.arrives()
    program.step(5)
    assert kept() == [3, 4, 5]
    assert program.told == []


def test_another_rank_that_waits_is_told_how_far_this_one_is_known_to_be_well(program: Program) -> None:
    program.steps(0, 2)
    program.host.arrives()
    program.step(2)
    program.host.arrives()
    program.step(3)
    program.gradients.forget()
    assert [fact for fact in program.facts if fact[0] == FINITE] == [(FINITE, "until", -1)]
    program.sights[1] = SimpleNamespace(status=SimpleNamespace(facts={"gradient": {"2": ["", [], ""]}}))
    for _ in range(2):
        program.gradients.forget()
    assert program.facts[1:] == [(FINITE, "until", 1)]


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_loss_of_a_step_that_was_only_counted_is_told_with_that_step(
    backwards: int, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.step(0, backwards=backwards)
    program.host.arrives()
    monkeypatch.setattr(PACE, "is_brief", True)
    for step in range(1, 5):
        for _ in range(backwards):
            program.backward(loss=nan if step == 3 else 1.0)
        program.param.data += cast("Any", program.param.grad)
    monkeypatch.setattr(PACE, "is_brief", False)
    program.step(5, backwards=backwards)
    program.looks(6)
    assert program.told == [(3, "the loss is not finite")]


def test_steps_are_looked_at_again_once_one_is_known_to_be_bad(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.step(0, loss=nan)
    monkeypatch.setattr(PACE, "is_brief", True)
    program.gradients.forget()
    assert BACKWARDS.once == []
    program.host.arrives()
    program.gradients.forget()
    program.backward()
    assert not PACE.is_brief


def test_at_the_end_what_is_not_known_yet_is_waited_for(program: Program) -> None:
    program.steps(0, 3)
    program.step(3, loss=nan)
    program.step(4)
    Far.may_wait = True
    program.gradients.finish(program.optimizer)
    assert program.told == [(3, "the loss is not finite")]


def test_while_a_graph_is_captured_nothing_is_computed_or_looked_at(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.steps(0, 2)
    monkeypatch.setattr(finite_later, "is_capturing", lambda: True)
    monkeypatch.setattr(finite_later, "numbers_of", None)
    program.gradients._due_ns = program.gradients.due_ns = 0.0
    program.step(2, loss=nan)
    assert [step for step, *_ in program.gradients.seen] == [0, 1]
    assert program.told == []


def test_a_device_that_has_failed_is_left_to_the_program(program: Program) -> None:
    program.steps(0, 2)
    Far.has_failed = True
    program.steps(2, 4)
    assert [losses for _, losses, *_ in program.gradients.seen][2:] == [[], []]
    Far.has_failed = False
    program.step(4, loss=nan)
    program.looks(5)
    assert program.told == [(4, "the loss is not finite")]


def test_a_loss_that_is_a_part_of_something_large_does_not_keep_it(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_in_a_part() -> None:
        large = (program.param.sum() * torch.ones(5000)).as_subclass(Far)
        torch.autograd.backward(large[7])

    ends_in_a_part()
    program.optimizer.step()
    [(_, [(loss, _)], _, _)] = program.gradients.seen
    assert loss.untyped_storage().nbytes() < 100
    monkeypatch.setattr(PACE, "is_brief", True)
    ends_in_a_part()
    assert BACKWARDS.recent == []


def test_without_a_probe_a_small_parameter_tells_which_gradients_were_applied(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKWARDS, "probes", [])
    large = nn.Parameter(torch.zeros(5000))
    program.optimizer = torch.optim.SGD([large, program.param], lr=0.1)
    program.steps(0, 2)
    program.step(2, mean=nan)
    program.host.arrives()
    program.step(3)
    program.looks(4)
    assert program.told == [(2, "")]


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_number_stands_for_each_gradient(bad: float, dtype: torch.dtype) -> None:
    large = torch.full((4096,), torch.finfo(dtype).max, dtype=dtype)
    spoilt = torch.ones(4096, dtype=dtype)
    spoilt[1000] = bad
    step, [(loss, site)], [own], [mean] = numbers_of((7, [(torch.tensor(3.0), "line")], [large], []), [spoilt])
    assert (step, loss.item(), site) == (7, 3.0, "line")
    assert (bool(own.isfinite()), bool(mean.isfinite())) == (True, False)


def test_an_answer_is_there_once_the_device_has_written_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostNumber()
    monkeypatch.setattr(finite_later, "host_number", lambda: host)
    later = FiniteLater()
    answers: list[Callable[[], object]] = [later.answer, host.arrives, later.answer]
    later.ask([torch.tensor(1.0), torch.tensor(2.0)])
    assert [call() for call in answers] == [None, None, True]
    later.ask([torch.tensor(1.0), torch.tensor(nan)])
    assert [call() for call in answers] == [None, None, False]
