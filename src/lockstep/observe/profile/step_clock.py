"""What a rank's own thread does with its time: one phase at a time, so that the phases of a step add up to the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from threading import get_ident
from time import monotonic_ns
from typing import NamedTuple, final

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")
DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, OTHER = range(len(PHASES))
_NONE = -1  # asked for by another thread
_STEPS = 4096  # that nobody has taken yet
_WAITS = _MARKS = 4096  # of one step


class Wait(NamedTuple):
    """The thread stood still for an operation."""

    number: int  # of the operation in the flight record; -1 for `TAIL`: all that backward had not finished
    began_ns: int
    ended_ns: int


class Step(NamedTuple):
    """One step of one rank; times by time.monotonic_ns."""

    step: int
    began_ns: int
    ended_ns: int
    spent_ns: tuple[int, ...]  # in each of PHASES; together the step
    tokens: int
    samples: int
    operations: tuple[int, int]  # numbers in the flight record: from, to
    waits: tuple[Wait, ...]
    marks: tuple[tuple[int, int], ...] = ()  # (phase, when it began), by time; waits of `waits` lie in between


_wait_of = partial(tuple.__new__, Wait)  # as Wait._make, without a call of Python
TAIL = -1


@final
class StepClock:
    """Stamps of one thread, the one that makes it; calls of others do nothing. A stamp costs half a microsecond."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=_STEPS)  # ended, to be taken by any one thread
        self.is_marked = False  # by the program itself: hooks into torch keep quiet
        self.close_reader: Callable[[], None] | None = None  # who takes `steps`; nothing is kept for nobody
        self.after_step: Callable[[int], object] | None = None
        self.rest = OTHER  # what the thread does where nothing else is known
        self.tail_site = ""  # the line whose backward waited last for all that it had started
        self._owner = get_ident()
        self._phase = OTHER
        self._spent = [0] * len(PHASES)
        self._began = self._since = monotonic_ns()
        self._samples = 0
        self._first = 0
        self._waits: list[tuple[int, int, int]] = []  # fields of Wait
        self._marks = [(OTHER, self._began)]

    def switch(self, phase: int) -> int:
        """From now on the thread is in `phase`; the one before, to be given back by the next call."""
        if phase < 0 or get_ident() != self._owner:
            return _NONE
        now_ns = monotonic_ns()
        before, since_ns = self._phase, self._since
        self._spent[before] += now_ns - since_ns
        self._phase, self._since = phase, now_ns
        if len(self._marks) < _MARKS:
            if before == EXPOSED:  # a wait that ends by this
                self._marks.append((EXPOSED, since_ns))
            self._marks.append((phase, now_ns))
        return before

    def wait_begins(self) -> int:
        """The thread stands still for other ranks, maybe within such a wait; what `wait_ends` takes."""
        if self.close_reader is None or get_ident() != self._owner:
            return _NONE
        before = self._phase
        if before != EXPOSED:
            now_ns = monotonic_ns()
            self._spent[before] += now_ns - self._since
            self._phase, self._since = EXPOSED, now_ns
        return before

    def wait_ends(self, before: int, number: int | None = None) -> None:
        """It goes on. number: of the operation in the flight record, where it has one."""
        if before in (_NONE, EXPOSED) or self._phase != EXPOSED:
            return
        now_ns, began_ns = monotonic_ns(), self._since
        self._spent[EXPOSED] += now_ns - began_ns
        self._phase, self._since = before, now_ns
        if number is None and len(self._marks) < _MARKS:
            self._marks += (EXPOSED, began_ns), (before, now_ns)
        elif number is not None and self.close_reader is not None and len(self._waits) < _WAITS:
            self._waits.append((number, began_ns, now_ns))

    def count(self, samples: int) -> None:
        """The step has `samples` more."""
        if get_ident() == self._owner:
            self._samples += samples

    def step_done(self, step: int, operations: int, tokens: int = 0) -> None:
        """A step ends and the next one begins. operations: started by this rank so far."""
        if self.switch(self.rest) == _NONE:
            return
        if self.close_reader is not None:
            span, spent, waits = (self._first, operations), tuple(self._spent), tuple(map(_wait_of, self._waits))
            marks = tuple(self._marks) if len(self._marks) < _MARKS else ()
            self.steps.append(Step(step, self._began, self._since, spent, tokens, self._samples, span, waits, marks))
        self._begin(operations)
        if self.after_step is not None:
            self.after_step(step)

    def restart(self) -> None:
        """What was before now belongs to no step."""
        if self.switch(self.rest) != _NONE:
            self._begin(self._first)

    def _begin(self, operations: int) -> None:
        self._began, self._first, self._samples = self._since, operations, 0
        self._spent[:] = [0] * len(PHASES)
        self._waits.clear()
        self._marks[:] = [(self._phase, self._since)]


def spans_in(step: Step, most: int) -> list[tuple[int, int]]:
    """(phase, when it began) of all that the thread did in a step; nothing where that is not known.

    most: at least 1; where there are more, the shortest are taken for what was before them.
    """
    spans = list(_spans(step)) if step.marks and len(step.waits) < _WAITS else []
    shortest_ns = (step.ended_ns - step.began_ns) >> 12
    while len(spans) > most:
        kept = spans[:1]
        for (phase, at), (_, until) in pairwise([*spans[1:], (OTHER, step.ended_ns)]):
            if until - at > shortest_ns and phase != kept[-1][0]:
                kept.append((phase, at))
        spans, shortest_ns = kept, 2 * shortest_ns + 1
    return spans


def _time(event: tuple[int, int, int]) -> tuple[int, int]:
    return event[:2]  # of the same moment: the end of a wait, then marks as they came, then the next wait


def _spans(step: Step) -> Iterator[tuple[int, int]]:
    """The marks with the waits laid over them, without what took no time."""
    waits = [wait for wait in step.waits if wait.ended_ns > wait.began_ns]
    events = [(at, 1, phase) for phase, at in step.marks]
    events += [(wait.ended_ns, 0, OTHER) for wait in waits] + [(wait.began_ns, 2, OTHER) for wait in waits]
    below, is_waiting, shown = OTHER, False, _NONE
    for (at, kind, phase), (until, *_) in pairwise([*sorted(events, key=_time), (step.ended_ns, 0, OTHER)]):
        below = phase if kind == 1 else below
        is_waiting = is_waiting if kind == 1 else kind == 2
        now = EXPOSED if is_waiting else below
        if until > at and now != shown:
            yield now, at
            shown = now
