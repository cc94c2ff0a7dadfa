"""What is seen of a program's backwards: each once, whoever looks, and nothing once nobody does."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.hooks import warn_if_has_hooks

from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.torch_backward import BACKWARDS


@pytest.fixture
def detach() -> Iterator[Callable[[], None]]:
    calls = [BACKWARDS.attach()]
    yield lambda: calls.pop()()
    for call in calls:
        call()


def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def test_a_parameter_that_is_followed_goes_to_another_process_without_a_warning(detach: Callable[[], None]) -> None:
    one = param()
    BACKWARDS.follow([one])
    BACKWARDS.follow([one])
    one.sum().backward()
    assert [gradient.tolist() for gradient in BACKWARDS.own] == [[1.0] * 3]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_has_hooks(cast(Any, one))  # as torch does where it sends a tensor on
    detach()
    assert not one._backward_hooks


def test_since_when_a_backward_waits_is_not_noted_of_steps_that_are_only_counted(detach: Callable[[], None]) -> None:
    BACKWARDS.phases = cast(Any, SimpleNamespace(clock=StepClock(), owner=-1))
    one, users = param(), []
    BACKWARDS.follow([one], is_sent_by_cpp=True)
    one.register_hook(lambda grad: users.append(grad))

    def noted() -> tuple[int, int, int]:
        BACKWARDS._tails_ns.clear()
        one.sum().backward()
        return len(BACKWARDS._tails_ns), len(BACKWARDS.own), len(users)

    assert noted() == (1, 1, 1)
    BACKWARDS.turned(is_brief=True, is_marked=False)
    BACKWARDS.turned(is_brief=True, is_marked=False)
    assert noted() == (0, 2, 2)  # gradients are: the next step that is looked at asks for them
    BACKWARDS.turned(is_brief=False, is_marked=False)
    assert noted() == (1, 3, 3)
    BACKWARDS.turned(is_brief=True, is_marked=False)
    detach()
    BACKWARDS.turned(is_brief=False, is_marked=False)
    assert len(cast(Any, one._backward_hooks)) == 1  # the user's


def test_steps_that_our_own_loop_only_counts_call_torchs_backward_unless_something_is_to_be_done_first(
    detach: Callable[[], None],
) -> None:
    ours = torch.autograd.backward
    stock = inspect.unwrap(ours)
    BACKWARDS.once.append(lambda: None)
    BACKWARDS.turned(is_brief=True, is_marked=True)
    assert torch.autograd.backward is ours
    param().sum().backward()
    assert BACKWARDS.once == []
    for _ in range(2):
        BACKWARDS.turned(is_brief=True, is_marked=True)
        assert torch.autograd.backward is stock
    for _ in range(2):
        BACKWARDS.turned(is_brief=False, is_marked=True)
        assert torch.autograd.backward is ours
    BACKWARDS.turned(is_brief=True, is_marked=True)
    detach()
    assert torch.autograd.backward is stock
    BACKWARDS.turned(is_brief=False, is_marked=True)
    assert torch.autograd.backward is stock


def test_the_last_who_leaves_puts_torch_back() -> None:
    before = torch.autograd.backward
    calls = [BACKWARDS.attach() for _ in range(3)]
    for call in calls:
        assert torch.autograd.backward is not before
        (param() * 2).sum().backward()
        assert [loss for loss, _ in BACKWARDS.losses][-1:] == [6.0]
        call()
    assert torch.autograd.backward is before
    assert BACKWARDS.losses == BACKWARDS.recent == []


def test_what_somebody_has_wrapped_meanwhile_sees_nothing_when_others_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    end = BACKWARDS.attach()
    ours = torch.autograd.backward
    with monkeypatch.context() as wrapped:
        wrapped.setattr(torch.autograd, "backward", lambda *args, **kwargs: ours(*args, **kwargs))
        end()  # it is not there to be put back
        again = BACKWARDS.attach()
        param().sum().backward()
        assert len(BACKWARDS.losses) == 1
        again()


def test_losses_are_single_numbers_from_their_lines_and_as_they_were(detach: Callable[[], None]) -> None:
    one = param()
    loss = one.sum()
    loss.backward()
    loss.detach().zero_()
    (one * 2).backward(torch.ones(3))
    torch.autograd.backward([one.sum(), one.sum()])
    made, BACKWARDS.scaled = one.sum() * 8, None
    BACKWARDS.scaled = made, one.sum()
    made.backward()
    [first, second] = BACKWARDS.losses
    assert (first[0], second[0]) == (3.0, 3.0)
    assert first[1].endswith("test_losses_are_single_numbers_from_their_lines_and_as_they_were")
    assert first[1] != second[1]


def test_a_call_that_waits_for_the_next_backward_is_made_once_and_may_ask_for_another(
    detach: Callable[[], None],
) -> None:
    made: list[int] = []

    def ask() -> None:
        made.append(len(BACKWARDS.losses))
        BACKWARDS.once.append(lambda: made.append(-1))

    BACKWARDS.once.append(ask)
    for _ in range(3):
        param().sum().backward()
    assert made == [0, -1]


def test_of_a_backward_on_a_gpu_its_stream_is_stamped_where_the_last_gradient_is_queued(
    detach: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stamps = StepClock(), []
    clock.gpu = cast(Any, SimpleNamespace(stamp=stamps.append))
    BACKWARDS.phases = cast(Any, SimpleNamespace(clock=clock, owner=-1))
    one = param()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    BACKWARDS.follow([one], is_sent_by_cpp=True)
    monkeypatch.undo()
    one.sum().backward()
    assert stamps == [*BACKWARDS._tails_ns]
    assert len(stamps) == 1
