"""What a future of the backend "lockstep" is told when its operation does not end well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.comm.background import Background
from lockstep.comm.op import DONE, ThenWork, Work
from lockstep.comm.process_group_work import GroupWork, future_teller
from lockstep.errors import CommError

Teller = Background[Any, GroupWork]


@pytest.fixture
def teller() -> Iterator[Teller]:
    made = future_teller("futures")
    yield made
    made.close(10.0)


def group_work(work: Work, teller: Teller, limit_s: float = 10.0) -> GroupWork:
    return GroupWork(work, [torch.zeros(1)], limit_s, teller)


def fail() -> None:
    raise RuntimeError("it was resized meanwhile")


def test_a_failure_of_the_last_local_step_reaches_the_future(teller: Teller) -> None:
    work = group_work(ThenWork(DONE, fail), teller)
    with pytest.raises(RuntimeError, match="could not be filled: it was resized meanwhile"):
        work.get_future().wait()
    with pytest.raises(CommError, match="resized meanwhile"):
        work.wait()
    assert group_work(DONE, teller).get_future().wait()[0] == 0, "the thread goes on"


def test_a_future_is_not_fulfilled_while_another_thread_still_waits(teller: Teller) -> None:
    work = group_work(DONE, teller, limit_s=0.01)
    expected = pytest.raises(RuntimeError, match="another thread of this rank waits for it too")
    with work._waiting, expected:  # as in a wait without an end
        work.get_future().wait()
    assert work.wait()


def test_what_could_not_be_finished_is_not_there_at_the_second_wait_either() -> None:
    with torch.inference_mode():
        target = torch.zeros(2)
    work = ThenWork(DONE, lambda: target.copy_(torch.ones(2)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inference"):
            work.wait()
    with torch.inference_mode():
        work.wait()
        assert target.tolist() == [1, 1]


def test_futures_of_a_closed_group_are_told_at_once() -> None:
    teller = future_teller("futures")
    teller.close(10.0)
    assert group_work(DONE, teller).get_future().wait()[0] == 0
