"""A tensor between the start of a collective of stock torch and its wait()."""

from __future__ import annotations

import gc

import pytest
import torch

from lockstep.observe import in_flight
from lockstep.observe.in_flight import InFlight


class FakeWork:
    """A Work that ends after it was asked `turns` times."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def is_completed(self) -> bool:
        self.turns -= 1
        return self.turns < 0


def test_a_write_before_the_wait_is_named() -> None:
    flights, work, tensor = InFlight(), FakeWork(), torch.ones(7)
    flights.started(work, tensor, "all_reduce float32 [7] sum at train.py:9, step 0, rank 1")
    tensor[6] = 5.0
    error = flights.waited(work)
    assert "at train.py:9, step 0, rank 1: its float32 [7], was changed" in str(error)
    assert flights.waited(work) is None, "said once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_is_left_alone_is_not(dtype: torch.dtype) -> None:
    flights, work, tensor = InFlight(), FakeWork(), torch.ones(2, 3, dtype=dtype).t()
    flights.started(work, tensor, "")
    tensor.clone().zero_()
    assert flights.waited(work) is None


def test_a_second_collective_on_the_same_values_may_change_them() -> None:
    """Of views too: what works on the storage later is what has changed it."""
    flights, first, second, tensor = InFlight(), FakeWork(), FakeWork(), torch.ones(8)
    flights.started(first, tensor[:4], "first")
    flights.started(second, tensor, "second")
    assert flights.waited(first) is None
    tensor += 1
    assert flights.waited(second) is not None


def test_what_does_not_end_soon_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_PATIENCE_S", 0.01)
    flights, work, tensor = InFlight(), FakeWork(turns=10**9), torch.ones(3)
    flights.started(work, tensor, "")
    tensor += 1
    assert flights.waited(work) is None


def test_a_dropped_work_does_not_accuse_the_next_one_of_the_same_address() -> None:
    flights, tensor = InFlight(), torch.ones(3)
    flights.started(FakeWork(), tensor, "")
    gc.collect()
    tensor += 1
    assert all(flights.waited(FakeWork()) is None for _ in range(100))
