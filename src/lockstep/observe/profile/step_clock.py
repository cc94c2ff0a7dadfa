"""What a rank's own thread does with its time: one phase at a time, so that the phases of a step add up to the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import add
from threading import get_ident
from time import monotonic_ns
from typing import final

from lockstep.observe.native import in_c, read_in_c
from lockstep.observe.profile import stream_times
from lockstep.observe.profile.phases import (
    BACKWARD,
    DATA,
    FORWARD,
    OTHER,
    UNKNOWN,
    Ended,
    Left,
    Mark,
    Step,
    Typical,
    Values,
    Wait,
    forwards_found,
    outermost,
    spans_in,
    step_of,
    sums_of,
    without_queued,
    worked_out,
)
from lockstep.observe.profile.run_record import is_listed, last_in_line
from lockstep.observe.profile.stream_times import Stamped, StreamClock, on_stream

_RECENT = 256  # marks of a step that has not ended
_NONE = -1  # asked for by another thread
_STEPS = 4096  # that nobody has taken yet
_AHEAD = 256  # steps that a GPU has not come to, as far as is known: of more no events are kept
_WEIGH_NS = 1_000_000_000  # between two looks at the memory
WAITS = MARKS = 4096  # of one step


@final
@read_in_c
class StepClock:
    """Stamps of one thread, the one that makes it; calls of others do nothing.

    A stamp costs a quarter of a microsecond: what they add up to is worked out by who takes the steps.
    """

    __slots__ = (
        *("__dict__", "__weakref__", "_first", "_left", "began_ns", "begins_with_mark", "close_reader", "gpu"),
        *("is_brief", "is_marked", "marks", "owner", "rest", "samples", "step", "summed_ns", "time", "values", "waits"),
    )

    def __init__(self) -> None:
        self._left: list[Left] = []  # steps that have ended, at most _STEPS
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
        self.peak_mib, self._weighed_ns = 0, -_WEIGH_NS  # most memory that torch has had of its GPU; when it was asked
        self.until_ns = 0  # how long who takes the steps waits for a GPU: not at all
        self.summed_ns: Sequence[int] = ()  # of the step's beginning, where it has too many marks
        self._last_waits = self.waits  # of that: as many as are kept
        self._next: Step | None = None  # the first that a GPU has not come to the end of
        self._typical = Typical()

    @in_c
    def switch(self, phase: int) -> int:
        """From now on the thread is in `phase`; the one before, to be given back by the next call."""
        marks = self.marks
        before = marks[-1][0]
        if phase < 0 or (self.is_brief and phase != DATA and before != DATA) or get_ident() != self.owner:
            return _NONE
        marks.append((phase, monotonic_ns()))
        if len(marks) >= MARKS:
            self.sum_up(marks[-1][1])
        return before

    def waited(self, number: int, began_ns: int, ended_ns: int) -> None:
        """The thread stood still for other ranks, for operation `number` of the flight record. See `Wait`."""
        if not self.is_brief and self.close_reader is not None and get_ident() == self.owner:
            self.waits.append((number, began_ns, ended_ns))
            if len(self.waits) >= WAITS:
                self.sum_up(ended_ns)

    def stream_waited(self, number: int, began_ns: int) -> None:
        """As `waited`, until now, of what only the thread's stream waits for: nothing is known where its times are not.

        began_ns: by `time`.
        """
        is_known = self.gpu is not None and self.gpu.expects(number)
        self.waited(number if is_known else UNKNOWN, began_ns, monotonic_ns())

    def step_done(self, step: int, operations: int, tokens: int = 0, *, is_brief: bool = False) -> None:
        """A step ends and the next one begins.

        operations: started by this rank so far. is_brief: of the step that begins only batches are timed.
        """
        if get_ident() != self.owner:
            return
        ended = self.cut(step, monotonic_ns())
        if is_brief:
            self.time_batches_only()
        self.keep(ended, operations, tokens)
        if self.after_step is not None and step >= self.after_from:
            self.after_step(step)

    def time_batches_only(self) -> None:
        """Of the step that has just begun."""
        self.is_brief = True
        self.leave_gpu()

    def time_all(self) -> None:
        """Of the step that has just begun."""
        self.is_brief = False
        if self.gpu is not None:
            self.follow_gpu()

    def is_plain(self) -> bool:
        """Whether nothing but its end is to be told of a step that is looked at closely: its program has marked it."""
        return self.values is None and self.gpu is None and not (self.begins_with_mark or stream_times.is_in_use())

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
        if now_ns - self._weighed_ns >= _WEIGH_NS:
            self.peak_mib, self._weighed_ns = stream_times.peak_mib(self.device), now_ns
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
        if self.close_reader is not None and len(self._left) < _STEPS:
            self._left.append((ended, (self._first, operations), tokens))
        self._first = operations

    @property
    def steps(self) -> deque[Step]:
        """Those that have ended, worked out, to be taken by any one thread: of what their own thread has left."""
        left, steps = self._left, self._steps
        while left or self._next is not None:
            step, self._next = self._next or self._taken(), None
            if type(step.marks) is Stamped:
                gpu, events = step.marks.gpu, step.marks.events
                if not gpu.have_fired(events, self.until_ns):
                    self._next = step
                    break
                times = gpu.times_of(events, [*(at_ns for _, at_ns in step.marks), step.ended_ns])
                step = without_queued(step, events.queued) if times is None else on_stream(step, times)
            if not step.is_brief:
                step = worked_out(forwards_found(step))
                self._typical.timed(step)
            elif not step.summed_ns:
                step = worked_out(step)
            steps.append(step)
        return steps

    def _taken(self) -> Step:
        """The next that has ended; of those that were only counted all in a row that the record has in one line."""
        first = self._left[0]
        (number, *_, is_brief), *_ = first
        if not is_brief or not self._typical.is_known:
            return step_of(self._left.pop(0))
        run, last = [first], number if is_listed(number) else last_in_line(number)
        for one in self._left[1 : 1 + last - number]:
            ended = one[0]
            if ended[0] != number + len(run) or not ended[-1]:  # its number, and whether it was only counted
                break
            run.append(one)
        del self._left[: len(run)]
        return self._typical.shared_out(run)

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
        part = sums_of(self.marks, outermost(self.waits, self.marks[0][1]), now_ns)
        self.summed_ns = (*map(add, self.summed_ns, part),) if self.summed_ns else part
        self.waits, self.marks = [], [(self.marks[-1][0], now_ns)]
