"""What a stock torch program does, as its clock is told by hooks: which phase follows which."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.observe.profile.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PHASES, forwards_found
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.torch_phases import attach_phases

_STEPS = 3


@pytest.fixture
def clock() -> Iterator[StepClock]:
    made = StepClock()
    made.close_reader = lambda: None
    before = torch.autograd.backward
    detach = attach_phases(made)
    yield made
    detach()
    assert torch.autograd.backward is before


def train(clock: StepClock, forward: Callable[[nn.Module], torch.Tensor]) -> None:
    """Some steps, each of which ends while its optimizer's hooks are called, as the guard does it."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, _STEPS + 1):
        forward(model).backward()
        with_step = optimizer.register_step_post_hook(lambda *_, step=step: clock.step_done(step, 0))
        optimizer.step()
        with_step.remove()


def phases(clock: StepClock) -> list[list[str]]:
    """Of each step but the first, which begins with the first hook."""
    steps = [[phase for phase, _ in step.marks] for step in clock.steps]
    return [[PHASES[p] for p, before in zip(s, [None, *s[:-1]], strict=True) if p != before] for s in steps[1:]]


def test_all_before_backward_is_forward_where_nobody_says_when_that_runs(clock: StepClock) -> None:
    train(clock, lambda model: model(torch.ones(2, 3)).sum())
    expected = [PHASES[p] for p in (FORWARD, BACKWARD, OTHER, OPTIMIZER)]
    assert phases(clock) == [expected] * (_STEPS - 1)


def test_microbatches_without_a_loader_have_a_forward_each(clock: StepClock) -> None:
    def twice(model: nn.Module) -> torch.Tensor:
        model(torch.ones(2, 3)).sum().backward()
        return model(torch.ones(2, 3)).sum()

    train(clock, twice)
    expected = [PHASES[p] for p in (FORWARD, BACKWARD, FORWARD, BACKWARD, OTHER, OPTIMIZER)]
    assert phases(clock) == [expected] * (_STEPS - 1)
    took_ns = [sum(step.summed_ns) for step in clock.steps]
    assert took_ns == [step.ended_ns - step.began_ns for step in clock.steps]


def test_microbatches_of_ddp_have_what_it_says(clock: StepClock) -> None:
    clock.rest = OTHER  # as its forward leaves it
    train(clock, lambda model: model(torch.ones(2, 3)).sum())
    assert list(map(forwards_found, clock.steps)) == list(clock.steps)


def test_batches_of_a_loader_are_data_and_counted(clock: StepClock) -> None:
    batches = iter(DataLoader(TensorDataset(torch.ones(4 * _STEPS, 3)), batch_size=4))
    train(clock, lambda model: model(*next(batches)).sum())
    expected = [PHASES[p] for p in (FORWARD, DATA, FORWARD, BACKWARD, OTHER, OPTIMIZER)]
    assert phases(clock) == [expected] * (_STEPS - 1)
    assert [step.samples for step in clock.steps] == [4] * _STEPS


def test_hook_that_somebody_else_has_wrapped_does_nothing_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()
    clock.close_reader = lambda: None
    detach = attach_phases(clock)
    ours = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **kwargs: ours(*args, **kwargs))
    detach()
    monkeypatch.setattr(clock, "switch", lambda phase: pytest.fail("still told") if phase >= 0 else -1)
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()
    assert weight.grad is not None
