"""Batches are seen in one place: timed for the thread whose phases they are, counted for the pass that they are of."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.observe.profile.phases import DATA, OTHER
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.torch_batches import BATCHES, PASS, samples_in

ROWS, BATCH = 10, 3


class Timed:
    """Whose time it is."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.owner = self.clock.owner


class Passed:
    """A pass that asks from its second batch on, until it has been asked twice."""

    def __init__(self) -> None:
        self.batches, self.asks_at = 0, 2.0
        self.told: list[object] = []

    def reached(self, iterator: Any, batch: Any) -> None:
        self.told.append(self.batches)
        if len(self.told) == 2:
            self.asks_at = math.inf

    def ended(self) -> None:
        self.told.append("ended")


@pytest.fixture
def timed() -> Iterator[Timed]:
    ends = [BATCHES.attach(), BATCHES.attach()]
    BATCHES.phases = made = Timed()
    yield made
    BATCHES.phases = None
    while ends:
        ends.pop()()


def batches() -> Iterator[Any]:
    return iter(DataLoader(TensorDataset(torch.ones(ROWS, 2)), batch_size=BATCH))


def test_a_pass_is_told_where_it_asks_and_when_it_ends(timed: Timed) -> None:
    one, followed = batches(), Passed()
    vars(one)[PASS] = followed
    assert len([*one]) == 4
    assert followed.told == [2, 3, "ended"]
    assert followed.batches == 4
    assert timed.clock.samples == ROWS
    phases = [phase for phase, _ in timed.clock.marks]
    assert phases == [OTHER, *[DATA, OTHER] * 5]  # the end of the pass was waited for, too


def test_another_threads_batches_are_counted_and_not_timed(timed: Timed) -> None:
    one, followed = batches(), Passed()
    vars(one)[PASS] = followed
    thread = threading.Thread(target=lambda: [*one])
    thread.start()
    thread.join()
    assert followed.batches == 4
    assert (timed.clock.samples, len(timed.clock.marks)) == (0, 1)


def test_an_error_of_the_loader_ends_its_time(timed: Timed) -> None:
    def fail(_: object) -> object:
        raise ValueError("no batch")

    one = iter(DataLoader(TensorDataset(torch.ones(ROWS, 2)), collate_fn=fail))
    with pytest.raises(ValueError, match="no batch"):
        next(one)
    assert [phase for phase, _ in timed.clock.marks] == [OTHER, DATA, OTHER]


def test_put_back_once_all_who_attached_have_let_go() -> None:
    from torch.utils.data import dataloader

    before = dataloader._BaseDataLoaderIter.__next__
    ends = [BATCHES.attach(), BATCHES.attach()]
    assert dataloader._BaseDataLoaderIter.__next__ is not before
    ends.pop()()
    assert dataloader._BaseDataLoaderIter.__next__ is not before
    ends.pop()()
    assert dataloader._BaseDataLoaderIter.__next__ is before


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(4, 2), 4),
        ([torch.ones(3), torch.ones(5)], 3),
        ({"ids": torch.ones(2, 7), "mask": None}, 2),
        (({"x": [torch.ones(6)]}, 1), 6),
        (torch.tensor(1.0), 1),
        (["a", "b"], 0),
        ([], 0),
        (None, 0),
    ],
)
def test_samples_of_batches_as_loaders_nest_them(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples
