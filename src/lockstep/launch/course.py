"""What a launcher does with the workers of one start, on what it sees of them and is told. Pure: no clock, no I/O."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, final

from lockstep.launch.ended import signal_name
from lockstep.launch.worker import REQUEUE

if TYPE_CHECKING:
    from lockstep.launch.job import Supervision

_CONSEQUENCE_S = 2.0  # a rank that saw another one fail may be quicker than that one's own end


class Request(NamedTuple):
    """Somebody wants the run to stop."""

    number: int  # of the signal
    words: str  # that say so


class Seen(NamedTuple):
    """What one look has shown."""

    now_s: float  # of a clock that never goes back
    signals: Sequence[int]  # that this launcher has got so far
    told: Request | None  # by another machine
    asked: Mapping[int, int]  # rank -> signal that it got and will act on
    stopped: Mapping[int, int]  # rank -> exit code, of those that have ended because somebody asked them to
    has_failed: bool  # one of the others has, and not well
    cause_is_known: bool  # one of these cannot have failed only because another did
    are_asking: bool  # some that are left ask why an operation has failed, and will say so


class Orders(NamedTuple):
    """What follows from a look."""

    heard: Request | None = None  # with this look: the other machines have to know
    act: Literal["", "kill", "pass on", "ask to end"] = ""  # on all workers that are left


@final
class Course:
    """Whether somebody wants the workers to stop, and until when those that are left may go on."""

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._are_asked_to_end = False  # those that are left, after one failed
        self.request: Request | None = None
        self.deadline_s = self._answered_s = math.inf  # by then those that ask have their answer

    def look(self, seen: Seen) -> Orders:
        """What to do now. Between two looks nothing has to be done before `deadline_s`."""
        heard = self.hear(seen)
        is_asking = seen.are_asking and self.request is None and seen.now_s < self._answered_s
        if is_asking:
            self.deadline_s = max(self.deadline_s, seen.now_s + self._limits.failure_grace_s)
        if seen.now_s >= self.deadline_s or len(seen.signals) > 1:
            return Orders(heard, "kill")
        if heard is not None:  # from now on each has its time to save, whatever becomes of the others
            self._end_after(self._limits.grace_s, seen)
            return Orders(heard, "pass on")
        if self.request is not None:
            return Orders()
        if not seen.has_failed:
            self._end_after(self._limits.grace_s if seen.stopped else math.inf, seen)
            return Orders()
        self._answered_s = min(self._answered_s, seen.now_s + _CONSEQUENCE_S)
        asks_now = self._limits.asks_first and not (self._are_asked_to_end or is_asking)
        self._are_asked_to_end |= asks_now
        is_plain = self._limits.asks_first or seen.cause_is_known
        self._end_after(max(self._limits.failure_grace_s, 0.0 if is_plain else _CONSEQUENCE_S), seen)
        return Orders(act="ask to end" if asks_now else "")

    def hear(self, seen: Seen) -> Request | None:
        """The first request to stop, where it came with this look: from a signal, a machine, or a rank that got one."""
        if self.request is not None:
            return None
        self.request = self._request(seen)
        return self.request

    def _request(self, seen: Seen) -> Request | None:
        if seen.signals:
            return Request(seen.signals[0], "stopping; once more ends all processes at once")
        if seen.told is not None or self._are_asked_to_end:
            return seen.told
        for rank, number in seen.asked.items():
            return Request(number, f"rank {rank} got {signal_name(number)}: stopping")
        for rank, code in seen.stopped.items():
            if code != REQUEUE:  # or all ranks have agreed
                how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                return Request(-code if code < 0 else signal.SIGTERM, f"rank {rank} {how}: stopping")
        return None

    def _end_after(self, seconds: float, seen: Seen) -> None:
        self.deadline_s = min(self.deadline_s, seen.now_s + seconds)
