"""Sleeping on a word, and being woken."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

import pytest

from lockstep.comm.shm import waiting
from lockstep.comm.shm.waiting import FutexParking, Parking, PollingParking, best_parking, fence

PARKINGS: list[Callable[[], Parking]] = [best_parking, PollingParking]


class Word:
    """Eight bytes of shared memory."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self.value = ctypes.c_uint64.from_buffer(self._map)
        self.address = ctypes.addressof(self.value)


@pytest.mark.parametrize("make", PARKINGS)
def test_a_word_that_differs_already(make: Callable[[], Parking]) -> None:
    word = Word()
    word.value.value = 2**40 + 7
    make().sleep(word.address, 6, 60.0)
    make().sleep(word.address, 2**40 + 6, 60.0)


@pytest.mark.parametrize("make", PARKINGS)
def test_time_passes(make: Callable[[], Parking]) -> None:
    word = Word()
    word.value.value = 2**40 + 7
    make().sleep(word.address, 2**40 + 7, 0.01)
    make().sleep(word.address, 2**40 + 7, 0.0)


@pytest.mark.parametrize("make", PARKINGS)
def test_all_sleepers_are_woken(make: Callable[[], Parking]) -> None:
    """Also those that had not yet slept when the word changed."""
    for _ in range(20):
        word, parking, woken = Word(), make(), []

        def sleep(number: int, word: Word = word, parking: Parking = parking, woken: list[int] = woken) -> None:
            while word.value.value == 7:
                parking.sleep(word.address, 7, 60.0)
            woken.append(number)

        word.value.value = 7
        threads = [threading.Thread(target=sleep, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        word.value.value = 8
        parking.wake(word.address)
        for thread in threads:
            thread.join()
        assert sorted(woken) == [0, 1, 2]


def test_without_a_futex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match="no futex on darwin"):
        FutexParking()
    assert isinstance(best_parking(), PollingParking)


def test_a_fence_after_an_interrupt() -> None:
    """Whatever state an interrupted fence has left, the next ones are right."""
    for _ in range(3):
        fence()
    assert waiting._gate.lock.locked()
    waiting._gate.lock.release()  # as an interrupt between its two steps leaves it
    for _ in range(3):
        fence()
    assert waiting._gate.lock.locked()
    other = threading.Thread(target=fence)
    other.start()
    other.join()
