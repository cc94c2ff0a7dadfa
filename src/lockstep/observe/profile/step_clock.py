"""What a rank's own thread does with its time: one phase at a time, so that the phases of a step add up to the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import add
from threading import get_ident
from time import monotonic_ns
from typing import Any, NamedTuple, final

from lockstep.observe.profile import stream_times
from lockstep.observe.profile.stream_times import Stamped, StreamClock, Times, on_stream

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")
DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, OTHER = range(len(PHASES))
_RECENT = 256  # marks of a step that has not ended
_NONE = -1  # asked for by another thread
_STEPS = 4096  # that nobody has taken yet
_AHEAD = 256  # steps that a GPU has not come to, as far as is known: of more no events are kept
WAITS = MARKS = 4096  # of one step


Wait = tuple[int, int, int]  # the thread stood still for (an operation's number in the flight record), from, to
TAIL = -1  # all that backward had not finished
UNKNOWN = -2  # an operation that is not in the record
Mark = tuple[int, int]  # (a phase, when it began)
Values = Callable[[], tuple[Mapping[str, Any], Any]]  # of a step: fields of a note, and a `notes.Later` or None


class Step(NamedTuple):
    """One step of one rank, as the rank's thread leaves it; times by time.monotonic_ns. Who takes it works it out."""

    step: int
    began_ns: int
    ended_ns: int
    tokens: int
    samples: int
    operations: tuple[int, int]  # numbers in the flight record: from, to
    waits: Sequence[Wait]  # by their ends; also such as lie in others: see `worked_out`
    marks: Sequence[Mark]  # by time, the first where the step began; none where there were too many to keep
    summed_ns: Sequence[int] = ()  # of each of PHASES, together the step; else where there are no marks
    values: Values | None = None
    is_brief: bool = False  # only its batches were timed: `summed_ns` has the rest as in the last step that was
    times: Times | None = None  # all times are those of a GPU's stream, by these


# step, began_ns, ended_ns, samples, waits, marks, summed_ns, values, is_brief: as in Step
Ended = tuple[int, int, int, int, Sequence[Wait], Sequence[Mark], Sequence[int], Values | None, bool]


def _made(ended: Ended, operations: tuple[int, int], tokens: int) -> Step:
    number, began_ns, ended_ns, samples, *others = ended
    return tuple.__new__(Step, (number, began_ns, ended_ns, tokens, samples, operations, *others, None))


@final
class StepClock:
    """Stamps of one thread, the one that makes it; calls of others do nothing.

    A stamp costs a quarter of a microsecond: what they add up to is worked out by who takes the steps. Among caches
    that a step has left cold a call of Python's costs ten times that. So what is called in every step of a program that
    is not ours does not call `switch`: it appends to `marks` itself, if the thread is `owner`, and calls `sum_up` where
    there are MARKS of them.
    """

    def __init__(self) -> None:
        self._left: deque[tuple[Ended, tuple[int, int], int]] = deque(maxlen=_STEPS)  # steps that have ended
        self._steps: deque[Step] = deque(maxlen=_STEPS)  # those that a reader has asked for
        self.is_brief = False  # of the step under way only batches are timed, see `pace`
        self.is_marked = False  # by the program itself: hooks into torch keep quiet
        self.begins_with_mark = False  # the first step: what was before its first mark belongs to none
        self.close_reader: Callable[[], None] | None = None  # who takes `steps`; nothing is kept for nobody
        self.values: Callable[[int], Values] | None = None  # called at the end of a step: what it is to keep
        self.after_step: Callable[[int], object] | None = None
        self.after_from = 0  # the first step after which that is called
        self.rest = OTHER  # what the thread does where nothing else is known
        self.tail_site = ""  # the line whose backward waited last for all that it had started
        self.tail_team = ""  # a name of the ranks that it is averaged over, where these are not all
        self.owner = get_ident()
        self.step = 0  # the last that has ended
        self.samples = 0  # of this step so far
        self.waits: list[Wait] = []  # the recorder adds to them, up to WAITS
        self.marks: list[Mark] = [(OTHER, monotonic_ns())]  # of this step, which is in the phase of the last one
        self.began_ns = self.marks[0][1]  # the step under way
        self._first = 0
        self.time: Callable[[], int] = monotonic_ns  # when a wait begins; on a GPU with a stamp of its stream
        self.gpu: StreamClock | None = None  # once the process computes on CUDA
        self.device: int | None = None  # which of its GPUs, where that is not the current one
        self.until_ns = 0  # how long who takes the steps waits for a GPU: not at all
        self.summed_ns: Sequence[int] = ()  # of the step's beginning, where it has too many marks
        self._last_waits = self.waits  # of that: as many as are kept
        self._next: Step | None = None  # the first that a GPU has not come to the end of
        self._timed: Step | None = None  # the last that was not brief

    def switch(self, phase: int) -> int:
        """From now on the thread is in `phase`; the one before, to be given back by the next call."""
        if phase < 0 or get_ident() != self.owner:
            return _NONE
        marks = self.marks
        before = marks[-1][0]
        marks.append((phase, monotonic_ns()))
        if len(marks) >= MARKS:
            self.sum_up(marks[-1][1])
        return before

    def waited(self, number: int, began_ns: int, ended_ns: int) -> None:
        """The thread stood still for other ranks, for operation `number` of the flight record. See `Wait`."""
        if self.close_reader is not None and get_ident() == self.owner:
            self.waits.append((number, began_ns, ended_ns))
            if len(self.waits) >= WAITS:
                self.sum_up(ended_ns)

    def stream_waited(self, number: int, began_ns: int) -> None:
        """As `waited`, until now, of what only the thread's stream waits for: nothing is known where its times are not.

        began_ns: by `time`.
        """
        is_known = self.gpu is not None and self.gpu.expects(number)
        self.waited(number if is_known else UNKNOWN, began_ns, monotonic_ns())

    def step_done(self, step: int, operations: int, tokens: int = 0) -> None:
        """A step ends and the next one begins. operations: started by this rank so far."""
        if get_ident() == self.owner:
            self.keep(self.cut(step, monotonic_ns()), operations, tokens)
            if self.after_step is not None and step >= self.after_from:
                self.after_step(step)

    def cut(self, step: int, now_ns: int) -> Ended:
        """A step ends and the next one begins, now; the thread itself says so. For `keep`."""
        if self.begins_with_mark:
            self._begin_with_mark()
        waits, marks = self.waits, self.marks
        if self.summed_ns:
            self.sum_up(now_ns)
            waits, marks = self._last_waits, []
        values = None if self.values is None or self.is_brief else self.values(step)
        ended = step, self.began_ns, now_ns, self.samples, waits, marks, self.summed_ns, values, self.is_brief
        self.step, self.began_ns, self.samples = step, now_ns, 0
        self.waits, self.marks, self.summed_ns, self.is_brief = [], [(self.rest, now_ns)], (), False
        if self.gpu is not None or stream_times.is_in_use():
            self.follow_gpu()
        return ended

    def follow_gpu(self) -> None:
        """The step that begins is to be told by the times of the stream that its thread queues to."""
        gpu, began_ns = self.gpu, self.marks[-1][1]
        if gpu is not None:
            gpu.end(began_ns)
        if gpu is None or self.device not in (None, gpu.device):
            gpu = self.gpu = StreamClock(self.owner, self.device)
            self.time = gpu.time
        if self.close_reader is not None and len(self._left) < _AHEAD:
            self.marks, self.waits = gpu.begin(self.marks)

    def leave_gpu(self) -> None:
        """The times of the step under way are its thread's."""
        if self.gpu is not None:
            self.gpu.leave()
            self.marks, self.waits = [*self.marks], [*self.waits]

    def keep(self, ended: Ended, operations: int, tokens: int = 0) -> None:
        """What `cut` has returned, step after step. operations: started until it ended. Any one thread at a time."""
        if self.close_reader is not None:
            self._left.append((ended, (self._first, operations), tokens))
        self._first = operations

    @property
    def steps(self) -> deque[Step]:
        """Those that have ended, to be taken by any one thread: it makes them of what their own thread has left."""
        left, steps = self._left, self._steps
        while left or self._next is not None:
            step, self._next = self._next or _made(*left.popleft()), None
            if type(step.marks) is Stamped:
                gpu, events = step.marks.gpu, step.marks.events
                if not gpu.have_fired(events, self.until_ns):
                    self._next = step
                    break
                times = gpu.times_of(events, [*(at_ns for _, at_ns in step.marks), step.ended_ns])
                step = without_queued(step, events.queued) if times is None else on_stream(step, times)
            if not step.is_brief:
                self._timed = step
            elif self._timed is not None:
                if not self._timed.summed_ns:  # the first brief one after it
                    self._timed = self._timed._replace(summed_ns=spent_in(self._timed))
                step = step._replace(summed_ns=_as_in(self._timed, step), marks=(), waits=(), times=self._timed.times)
            steps.append(step)
        return steps

    def so_far(self, most: int) -> list[Mark]:
        """`spans_in` the step that has not ended, of what is newest in it. To be called from any thread."""
        marks = self.marks[-_RECENT:]
        if self.is_brief:  # else what is not timed would be taken for what was before it
            marks = [(phase if phase == DATA else OTHER, at_ns) for phase, at_ns in marks]
        waits = outermost(self.waits[-_RECENT:], marks[0][1])
        return spans_in(Step(0, marks[0][1], monotonic_ns(), 0, 0, (0, 0), waits, marks), most)

    def restart(self) -> None:
        """What was before now belongs to no step."""
        if get_ident() == self.owner:
            self.leave_gpu()
            self.began_ns, self.samples = monotonic_ns(), 0
            self.waits, self.marks, self.summed_ns = [], [(self.rest, self.began_ns)], ()
            if self.gpu is not None:
                self.follow_gpu()

    def begin_at(self, began_ns: int, operations: int) -> None:
        """What was before then belongs to no step; the thread itself says so. operations: started before.

        Without a backward there is no forward, unless somebody has said when that runs.
        """
        if self.summed_ns:
            self.waits, self.summed_ns = [*self._last_waits, *self.waits], ()
        before = [phase for phase, at_ns in self.marks if at_ns <= began_ns]
        marks = [(before[-1] if before else self.rest, began_ns), *self.marks[len(before) :]]
        is_guess = self.rest == FORWARD and all(phase != BACKWARD for phase, _ in marks)
        self.marks = [(OTHER if is_guess and phase == FORWARD else phase, at_ns) for phase, at_ns in marks]
        self.began_ns, self._first, self.begins_with_mark = began_ns, operations, False

    def _begin_with_mark(self) -> None:
        self.begins_with_mark = False
        if len(self.marks) > 1:
            del self.marks[0]
        self.began_ns = self.marks[0][1]

    def sum_up(self, now_ns: int) -> None:
        """The step has more than is kept of one: of what was before now only the sums are, and the last waits."""
        if self.begins_with_mark:
            self._begin_with_mark()
        self._last_waits = [*self._last_waits, *self.waits][-WAITS:] if self.summed_ns else self.waits
        self.leave_gpu()
        part = _spent_ns(self.marks, outermost(self.waits, self.marks[0][1]), now_ns)
        self.summed_ns = tuple(map(add, self.summed_ns, part)) if self.summed_ns else part
        self.waits, self.marks = [], [(self.marks[-1][0], now_ns)]


def outermost(waits: Iterable[Wait], since_ns: int) -> list[Wait]:
    """Those that lie in no other one, by time; without what was before `since_ns`."""
    found: list[Wait] = []
    for wait in waits:
        number, began_ns, ended_ns = wait
        while found and found[-1][1] >= began_ns:
            found.pop()
        if ended_ns > since_ns:
            found.append(wait if began_ns >= since_ns else (number, since_ns, ended_ns))
    return found


def worked_out(step: Step) -> Step:
    """The step with waits that are `outermost`, and with `summed_ns`."""
    return step._replace(waits=outermost(step.waits, step.began_ns), summed_ns=spent_in(step))


def spent_in(step: Step) -> Sequence[int]:
    """Nanoseconds in each of PHASES."""
    return step.summed_ns or _spent_ns(step.marks, outermost(step.waits, step.began_ns), step.ended_ns)


def _as_in(timed: Step, step: Step) -> Sequence[int]:
    """What a brief step has spent: on data what it has, of the rest such parts as the `timed` one.

    What it has beyond twice as much as that one is nobody's part: nothing is known of it, so it is in OTHER. Whether a
    GPU waited for data its thread's wait does not tell: then that is such a part too.
    """
    spent, like = list(spent_in(step)), list(spent_in(timed))
    data = 0
    if timed.times is None:
        data, like[DATA] = spent[DATA], 0
    whole = max(1, sum(like))
    usual = min(sum(spent) - data, 2 * whole)
    parts = [usual * part // whole for part in like]
    parts[DATA] += data
    parts[OTHER] += sum(spent) - sum(parts)
    return parts


def _spent_ns(marks: Sequence[Mark], waits: Iterable[Wait], ended_ns: int) -> tuple[int, ...]:
    """In each of PHASES, from the first mark on."""
    spent = [0] * len(PHASES)
    for (phase, at), (_, until) in pairwise([*marks, (OTHER, ended_ns)]):
        spent[phase] += until - at
    at, last = 0, len(marks) - 1  # of the marks
    for _, began, ended in waits:
        spent[EXPOSED] += ended - began
        while at < last and marks[at + 1][1] <= began:
            at += 1
        while at < last and marks[at + 1][1] < ended:  # the thread has changed its phase meanwhile
            spent[marks[at][0]] -= marks[at + 1][1] - began
            at += 1
            began = marks[at][1]
        spent[marks[at][0]] -= ended - began
    return tuple(spent)


def without_queued(step: Step, queued: Container[int]) -> Step:
    """Of operations that a GPU carries out, the thread's times say nothing."""
    return step._replace(waits=[(UNKNOWN if one[0] in queued else one[0], *one[1:]) for one in step.waits])


def spans_in(step: Step, most: int) -> list[Mark]:
    """(phase, when it began) of all that the thread did in a step; nothing where that is not known.

    step: with waits that are `outermost`. most: at least 1; where there are more, the shortest are taken for what was
    before them.
    """
    spans, shortest_ns = _laid(step.marks, step.waits) if step.marks else [], 0
    while True:
        kept: list[Mark] = []
        for (phase, at), (_, until) in pairwise([*spans, (OTHER, step.ended_ns)]):
            if until - at > (shortest_ns if kept else 0) and (not kept or phase != kept[-1][0]):
                kept.append((phase, at))
        if len(kept) <= most:
            return kept
        spans, shortest_ns = kept, 2 * shortest_ns + ((step.ended_ns - step.began_ns) >> 12) + 1


def _laid(marks: Sequence[Mark], waits: Iterable[Wait]) -> list[Mark]:
    """The marks with the waits laid over them, also what took no time."""
    laid: list[Mark] = []
    at = 0  # of the marks that are behind
    for _, began, ended in waits:
        while at < len(marks) and marks[at][1] <= began:
            laid.append(marks[at])
            at += 1
        laid.append((EXPOSED, began))
        while at < len(marks) and marks[at][1] < ended:  # the thread has changed its phase meanwhile
            at += 1
        laid.append((marks[at - 1][0], ended))
    return [*laid, *marks[at:]]
