"""Of what a step consists: phases that add up to it, and waits within them. Pure: `StepClock` measures them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, final

from lockstep.observe.native import in_c

if TYPE_CHECKING:
    from lockstep.observe.profile.stream_times import Times

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")
DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, OTHER = range(len(PHASES))
_TYPICAL_OF = 5  # steps that were timed last

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
    is_brief: bool = False  # only its batches were timed: `summed_ns` has the rest as in a `Typical` step
    times: Times | None = None  # all times are those of a GPU's stream, by these
    together: int = 1  # so many brief ones in a row, of which this is the last, are told as one
    longest_ns: int = 0  # of these


# step, began_ns, ended_ns, samples, waits, marks, summed_ns, values, is_brief: as in Step
Ended = tuple[int, int, int, int, Sequence[Wait], Sequence[Mark], Sequence[int], Values | None, bool]
Left = tuple[Ended, tuple[int, int], int]  # with operations and tokens: a step as its thread leaves it


def step_of(left: Left) -> Step:
    """What a thread has left."""
    ended, operations, tokens = left
    return tuple.__new__(Step, (*ended[:3], tokens, ended[3], operations, *ended[4:], None, 1, 0))


@in_c
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
    waits = outermost(step.waits, step.began_ns)
    return step._replace(waits=waits, summed_ns=step.summed_ns or sums_of(step.marks, waits, step.ended_ns))


def forwards_found(step: Step) -> Step:
    """What lies between two backwards is the second one's forward, where nobody says when that runs."""
    if not step.marks or step.marks[0][0] != FORWARD:  # a step begins with what the thread does where nothing is known
        return step
    marks = list(step.marks)
    for at in range(1, len(marks) - 1):
        if (marks[at - 1][0], marks[at][0], marks[at + 1][0]) == (BACKWARD, OTHER, BACKWARD):
            marks[at] = FORWARD, marks[at][1]
    return step._replace(marks=marks)


@final
class Typical:
    """What steps are taken to be like that were only counted: the one of middle length among the last that were timed.

    Not the last one: if that happens to have stood still, as for a rank that came late, all after it would seem to.
    """

    def __init__(self) -> None:
        self._timed: deque[Step] = deque(maxlen=_TYPICAL_OF)
        self._like: tuple[Sequence[int], int, Times | None] | None = None  # of the typical one: parts, of how much

    def timed(self, step: Step) -> None:
        """`step` was, and is worked out."""
        if self._timed and (self._timed[-1].times is None) != (step.times is None):  # of another clock
            self._timed.clear()
        self._timed.append(step)
        self._like = None

    @property
    def is_known(self) -> bool:
        """Whether one was timed."""
        return bool(self._timed)

    def shared_out(self, run: Sequence[Left]) -> Step:
        """Steps in a row that were only counted, as one; there is one that was timed before.

        Each has spent on data what it has, of the rest such parts as the typical one. What it has beyond twice as much
        as that is nobody's part: nothing is known of it, so it is in OTHER. Whether a GPU waited for data its thread's
        wait does not tell: then that is such a part too.
        """
        like, whole, times = self._like = self._like or self._middle()
        all_ns = all_data_ns = usual_ns = longest_ns = tokens = samples = 0
        for (_, began_ns, ended_ns, its_samples, waits, marks, summed_ns, _, _), _, its_tokens in run:
            by_phase = summed_ns or sums_of(marks, outermost(waits, began_ns), ended_ns)
            spent_ns, data_ns = sum(by_phase), by_phase[DATA] if times is None else 0
            all_ns, all_data_ns = all_ns + spent_ns, all_data_ns + data_ns
            usual_ns += min(spent_ns - data_ns, 2 * whole)
            longest_ns = max(longest_ns, ended_ns - began_ns)
            tokens, samples = tokens + its_tokens, samples + its_samples
        parts = [usual_ns * part // whole for part in like]
        parts[DATA] += all_data_ns
        parts[OTHER] += all_ns - sum(parts)
        (_, first_ns, *_), (first, _), _ = run[0]
        (number, _, last_ns, *_), (_, end), _ = run[-1]
        told = number, first_ns, last_ns, tokens, samples, (first, end), (), (), parts, None, True, times
        return Step(*told, len(run), longest_ns)

    def _middle(self) -> tuple[Sequence[int], int, Times | None]:
        by_length = sorted(self._timed, key=lambda one: one.ended_ns - one.began_ns)
        middle = by_length[(len(by_length) - 1) // 2]
        like = [*middle.summed_ns]
        if middle.times is None:
            like[DATA] = 0
        return like, max(1, sum(like)), middle.times


@in_c
def sums_of(marks: Sequence[Mark], waits: Iterable[Wait], ended_ns: int) -> tuple[int, ...]:
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
