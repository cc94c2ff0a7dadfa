"""Which steps of a program are looked at closely, and which are only counted.

What a step does in C++ is counted in every step, and so are its batches, its operations and a loss that is not finite.
All else costs a tenth of a millisecond a step, among caches that the step has left cold, and half a one on a GPU, where
each phase has an event and each loss a kernel. So once a run has had its first hundred, of short steps one in sixteen
is looked at closely, at no regular distance from the last: something that comes back every few steps, as a stall of a
loader does, is neither always met nor never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from lockstep.observe.native import read_in_c

FIRST = 128  # steps of this process, all looked at
EVERY = 16  # of later ones, on average
SHORT_NS = 50_000_000  # longer steps are all looked at


@final
@read_in_c
class Pace:
    """Of one process; the thread whose steps these are calls it."""

    __slots__ = ("_planned", "_seen", "dues", "is_brief", "turned", "until")

    def __init__(self) -> None:
        # called with a step: which one after it is to be looked at for sure
        self.dues: list[Callable[[int], float]] = []
        self.turned: Callable[[bool], object] = lambda is_brief: None  # called when `is_brief` has changed
        self.is_brief = False
        self.reset()

    def reset(self) -> None:
        """All is looked at."""
        self.turn(is_brief=False)
        self.until = 0  # all before this one are only counted
        self._seen, self._planned = 0, (0, 0)  # steps looked at; the last and when it ended

    def turn(self, *, is_brief: bool) -> None:
        """From here on the step under way is only counted, or looked at."""
        if self.is_brief != is_brief:
            self.is_brief = is_brief
            self.turned(is_brief)

    def leave(self) -> None:
        """The step under way is not as the others: it is looked at from here on, and so are as many as at first."""
        if self.is_brief:
            self.look_at_many()
            self.turn(is_brief=False)

    def look_at_many(self) -> None:
        """As many as at first are looked at before any is only counted."""
        self._seen = 0

    def plan(self, step: int, now_ns: int) -> None:
        """`step`, which was looked at, has ended now: which one is the next?"""
        (before, ended_ns), self._planned = self._planned, (step, now_ns)
        self._seen += 1
        if self._seen < FIRST or now_ns - ended_ns > SHORT_NS * (step - before):
            return
        self.until = int(min([one_of_each(step), *(due(step) for due in self.dues)]))
        self.turn(is_brief=self.until > step + 1)


def one_of_each(step: int, apart: int = 1) -> int:
    """The first step after `step` that stands for the EVERY around it, or `apart` times as many: alike on all ranks."""
    window = step // EVERY // apart * apart
    found = window * EVERY + _mixed(window) % EVERY
    return found if found > step else (window + apart) * EVERY + _mixed(window + apart) % EVERY


def _mixed(number: int) -> int:
    """Source: Appleby 2011 (the finaliser of MurmurHash3)."""
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


PACE = Pace()
