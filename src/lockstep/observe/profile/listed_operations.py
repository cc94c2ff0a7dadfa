"""Which operations of a step are listed in a record, and when each was waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from lockstep.observe.flight import Record
from lockstep.observe.profile.phases import EXPOSED, TAIL, Step
from lockstep.observe.profile.run_record import OPERATIONS_MAX, TAIL_GROUP, WHOLE_MAX
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.scene import FROM_CPP, read_message

_TAILS_MAX, _BRIEF_NS = 64, 50_000  # backward passes of one step that are told apart; of one that waits for nobody
_MESSAGES_MAX = 64  # from one rank to another in one step that are listed: if they are more, none is

Records = Callable[[int, int], Sequence[Record]]  # of the flight record, from a number to a number
Word = tuple[str, str, str, str]  # group, text, site, label
# an operation: its number, entered, left, began to wait, waited; nanoseconds
Row = tuple[Word, int, int, int, int, int]


class Listing(NamedTuple):
    """Of one step of one rank."""

    rows: list[Row]
    every: int  # one of how many collectives is listed
    unlisted: int  # operations
    hidden_ns: int  # operations were under way and the rank's thread did not wait


def listing_of(step: Step, clock: StepClock, read: Records, rank: int, *, is_whole: bool = False) -> Listing:
    """What is listed of `step`, which is the same on all ranks. is_whole: it is all of a program without steps."""
    records = [record for record in read(*step.operations) if record.text != FROM_CPP]  # of these a note has the sum
    collectives = [record for record in records if not record.is_message]
    most = WHOLE_MAX if is_whole else OPERATIONS_MAX
    every = 1 << max(0, -(-len(collectives) // most) - 1).bit_length()
    listed = [record for record in collectives if record.seq % every == 0]
    first, _ = step.operations
    earlier = sorted({number for number, *_ in step.waits if 0 <= number < first})[-OPERATIONS_MAX:]
    carried = [one for number in earlier for one in read(number, number + 1) if not one.is_message]
    listed += [one for one in carried if one.seq % every == 0]  # again, as they were waited for
    listed += messages_in(records, rank, None if is_whole else step.step)
    open_ns = [(one.entered_ns, one.left_ns or step.ended_ns) for one in (*records, *carried)]
    open_ns += [(began_ns, ended_ns) for _, began_ns, ended_ns in step.waits]
    hidden_ns = covered_ns(open_ns, step.began_ns, step.ended_ns) - step.summed_ns[EXPOSED]
    rows = [*_rows(listed, step), *_tails(step, clock)]
    return Listing(rows, every, len(records) + len(carried) - len(listed), max(0, hidden_ns))


def messages_in(records: Iterable[Record], rank: int, step: int | None) -> Iterator[Record]:
    """Those that are known by both ranks: as of a group of these two, with numbers that are equal on both.

    step: None of a program without steps, in which each end counts all that it has begun.
    """
    ways: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        message = read_message(record.text) if record.is_message else None
        if message is not None and message.peer is not None:
            ends = (rank, message.peer) if message.is_send else (message.peer, rank)
            way = "{} {} > {}".format(record.group, *ends)
            ways[way if step is not None else f"{way} tag {message.tag}"].append(record)
    for way, ones in ways.items():
        if step is None:
            yield from (one._replace(group=way) for one in ones)
        elif len(ones) <= _MESSAGES_MAX:
            yield from (one._replace(group=way, seq=step * _MESSAGES_MAX + at) for at, one in enumerate(ones))


def _rows(records: Iterable[Record], step: Step) -> Iterator[Row]:
    waits: dict[int, tuple[int, int]] = {}  # of each operation: when the first began, and how long they took in all
    for number, began_ns, ended_ns in step.waits:
        first_ns, waited_ns = waits.get(number, (began_ns, 0))
        waits[number] = first_ns, waited_ns + ended_ns - began_ns
    for one in records:
        word = one.group, one.text, one.site, one.label
        yield word, one.seq, one.entered_ns, one.left_ns or step.ended_ns, *waits.get(one.number, (-1, 0))


def _tails(step: Step, clock: StepClock) -> Iterator[Row]:
    word = TAIL_GROUP + clock.tail_team, "all that DistributedDataParallel waits for", clock.tail_site, ""
    kept = [wait[1:] for wait in step.waits if wait[0] == TAIL][-_TAILS_MAX:]
    for number, (began_ns, ended_ns) in enumerate(kept, (step.step + 1) * _TAILS_MAX - len(kept)):
        if ended_ns - began_ns >= _BRIEF_NS or (began_ns, ended_ns) == kept[-1]:  # else gradients are accumulated
            yield word, number, began_ns, ended_ns, began_ns, ended_ns - began_ns


def covered_ns(spans: Iterable[tuple[int, int]], began: int, ended: int) -> int:
    """How much of the time from `began` to `ended` lies in at least one of `spans`."""
    covered, behind = 0, began
    for first, last in sorted(spans):
        covered += max(0, min(last, ended) - max(first, behind))
        behind = max(behind, last)
    return covered
