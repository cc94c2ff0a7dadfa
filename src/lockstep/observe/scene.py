"""What one guard sees of all ranks at one moment, and which of them stand still for whom.

The sights were not taken at one instant: each is of its rank a moment ago. What follows from them is therefore only
used where it cannot be undone, or has been so for longer than the sights are apart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, final

from lockstep.observe.flight import Record
from lockstep.observe.status import RUNNING, Progress, Sight, Status, Waiting

SILENT_S = 3.0  # a guard speaks more than twice a second: one that is silent for so long is not being run
GRACE_S = 1.0  # what was under way when a rank ended has come through, or never will
LATE_S = 0.05  # by which looks, a quarter of a second apart, may be closer to each other: else one more is needed
STILL_S = 2.0 - LATE_S  # whoever has stood still for so long has done so while all others were looked at
INIT, NEW_GROUP = "init_process_group", "new_group"  # groups of these calls, which are of all ranks of the job
FROM_CPP = "collective started by torch's C++"  # the same on all ranks; what it is stands in the label where known
_HANG_STEPS = 5
_LOOP_SHARE = 0.7  # of the limit must have been seen to go into one loop
_MESSAGE = re.compile(r"(send|recv)\b.* (?:to|from) rank (\d+|any) tag (-?\d+)$")

Records = Callable[[int], Sequence[Record]]


@final
@dataclass(frozen=True)
class Limits:
    """How long is too long, and where the evidence is kept."""

    hang_s: float = 10.0
    notice_s: float = 20.0  # after which a rank that works while others wait is mentioned
    grace_s: float = GRACE_S  # 0 where it is known that what is waited for has failed
    evidence: str = ""  # a path, for the reader


class Message(NamedTuple):
    """What the text of a message says."""

    is_send: bool
    peer: int | None  # rank of the job; None: from any
    tag: int


def message_text(kind: str, what: str, peer: int | None, tag: int) -> str:
    """The text of the record of a message, such as "send float32 [4] to rank 1 tag 0". `peer` is a rank of the job."""
    return f"{kind} {what} {'to' if kind == 'send' else 'from'} rank {'any' if peer is None else peer} tag {tag}"


def channel(group: str, is_send: bool, peer: int, tag: int) -> str:
    """A name for the messages that one rank sends to `peer`, or gets from it: they pair with its own by their order."""
    return f"{group} {'send' if is_send else 'recv'} {peer} {tag}"


def read_message(text: str) -> Message | None:
    """What `message_text` put into it."""
    found = _MESSAGE.fullmatch(text)
    if found is None:
        return None
    kind, peer, tag = found.groups()
    return Message(kind == "send", None if peer == "any" else int(peer), int(tag))


class Wait(NamedTuple):
    """An operation that a running rank has open."""

    rank: int
    record: Record
    age_s: float
    ranks: tuple[int, ...]  # without whom it cannot end; this rank is not among them
    absent: tuple[int, ...]  # those of them that have not begun their part
    is_any: bool  # one of them is enough

    def is_part_of(self, other: Wait) -> bool:
        """True where both are the same collective."""
        mine, its = self.record, other.record
        return not mine.is_message and not its.is_message and (mine.group, mine.seq) == (its.group, its.seq)


@final
class Scene:
    """All that a diagnosis may use."""

    def __init__(self, me: int, sights: Mapping[int, Sight], records_of: Records, limits: Limits) -> None:
        self.me = me
        self.sights = sights
        self.records_of = cache(records_of)  # of this moment; from another machine they take a while
        self.limits = limits
        self.step = max((sight.status.step for sight in sights.values()), default=0)

    @cached_property
    def hang_s(self) -> float:
        """How long an operation may be open."""
        slowest = max((sight.status.step_s for sight in self.sights.values()), default=0.0)
        return max(self.limits.hang_s, _HANG_STEPS * slowest)

    @property
    def notice_s(self) -> float:
        """After how long it is mentioned that a rank works while others wait."""
        return max(self.limits.notice_s, self.hang_s)

    def status(self, rank: int) -> Status:
        """What `rank`, which has been heard of, said last."""
        return self.sights[rank].status

    def done_by(self, ranks: Iterable[int]) -> int:
        """The steps that all of `ranks` have ended: what is said of them is of the one after it."""
        return min((self.status(rank).step for rank in ranks if rank in self.sights), default=self.step)

    def is_running(self, rank: int) -> bool:
        """True where `rank` was at work when it was last seen, and its process is there."""
        sight = self.sights.get(rank)
        return sight is not None and sight.status.state == RUNNING and not sight.is_gone

    @cached_property
    def ended(self) -> frozenset[int]:
        """The ranks that have been heard of and are not running any more."""
        return frozenset(rank for rank in self.sights if not self.is_running(rank))

    def is_silent(self, rank: int) -> bool:
        """True where the guard of a process that exists does not speak."""
        if not self.is_running(rank) or rank == self.me:
            return False
        return self.sights[rank].is_stopped or self.sights[rank].age_s > SILENT_S

    def loops(self, rank: int) -> bool:
        """True where `rank`, which is running, goes round one loop that waits for something, and has for long."""
        return self.status(rank).looping_s >= _LOOP_SHARE * self.hang_s

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """What the ranks that can be heard have open, oldest first."""
        heard = [rank for rank in sorted(self.sights) if self.is_running(rank) and not self.is_silent(rank)]
        found = [self.wait_of(rank, waiting) for rank in heard for waiting in self.status(rank).waiting]
        return tuple(sorted(found, key=lambda wait: (-wait.age_s, wait.rank)))

    @cached_property
    def blocked(self) -> dict[int, Wait]:
        """By rank: the operation that its main thread stands in, or goes round a loop for until others come.

        Of one that was only started this is a guess: not kept where others are known to stand still for its rank, and
        for nothing that it would explain.
        """
        found = {rank: wait for rank in sorted(self.sights) if (wait := self._blocking(rank)) is not None}
        sure = [wait for wait in found.values() if self.stands_in(wait)]
        return {rank: wait for rank, wait in found.items() if wait in sure or not self._is_elsewhere(wait, sure)}

    def _is_elsewhere(self, wait: Wait, sure: Sequence[Wait]) -> bool:
        """True where `wait` is a message of another line to ranks that stand still for its own, or all have come."""
        mine = wait.record
        waiters = {other.rank: other.record for other in sure if wait.rank in other.absent}
        if wait.absent:
            is_here = not mine.is_message or mine.site in self.status(wait.rank).stack
            # who stands in the other half of such a message is not one of them: then the two do not match
            others = {rank for rank, its in waiters.items() if not its.is_message or its.text[:4] == mine.text[:4]}
            return not is_here and others.issuperset(wait.absent)
        return bool(waiters) and not any(other.is_part_of(wait) for other in sure)

    def stands_in(self, wait: Wait) -> bool:
        """True where the main thread does not move, and is still at the line that issued this, its newest operation."""
        status, record = self.status(wait.rank), wait.record
        is_newest = status.last is not None and status.last.number == record.number
        return is_newest and status.unmoved_s >= STILL_S and record.site in status.stack

    def _blocking(self, rank: int) -> Wait | None:
        mine = [wait for wait in self.waits if wait.rank == rank]
        if not mine:
            return None
        if self.status(rank).unmoved_s < STILL_S:
            return next((wait for wait in mine if wait.absent and self.loops(rank)), None)
        here = next((wait for wait in mine if self.stands_in(wait)), None)
        if here is not None and (here.absent or not here.record.is_message):
            return here
        mine = [wait for wait in mine if here is None or wait.record.site == here.record.site]  # one line may send many
        return next((wait for wait in mine if wait.absent), here or mine[0])

    def wait_of(self, rank: int, waiting: Waiting) -> Wait:
        """Whom `rank` needs for an operation, and who of them has not begun it."""
        record, age_s = waiting
        progress = self.status(rank).groups.get(record.group)
        ranks = () if progress is None else tuple([r for r in progress.ranks if r != rank])
        if not record.is_message:
            told = {} if progress is None else self.groups[record.group, progress.ranks]
            absent = tuple([r for r in ranks if r not in told or told[r].count <= record.seq])
            return Wait(rank, record, age_s, ranks, absent, is_any=False)
        message = read_message(record.text)
        if message is None:
            return Wait(rank, record, age_s, (), (), is_any=False)
        ranks = ranks if message.peer is None else (message.peer,)
        is_any = message.peer is None  # then what is open at the others may be long received
        absent = tuple([r for r in ranks if is_any or not self._answers(r, rank, message, record)])
        return Wait(rank, record, age_s, ranks, absent, is_any)

    @cached_property
    def groups(self) -> dict[tuple[str, tuple[int, ...]], dict[int, Progress]]:
        """By name and ranks, for a name alone may be that of another group elsewhere: how far each of them is."""
        found: dict[tuple[str, tuple[int, ...]], dict[int, Progress]] = defaultdict(dict)
        for rank, sight in self.sights.items():
            for name, progress in sight.status.groups.items():
                found[name, progress.ranks][rank] = progress
        return found

    def _answers(self, rank: int, to: int, message: Message, record: Record) -> bool:
        """True where `rank` has begun the other half of `message` of rank `to`, which may be long over on its side."""
        if rank not in self.sights:
            return False
        begun = self.status(rank).messages.get(channel(record.group, not message.is_send, to, message.tag))
        if begun is not None and self.status(to).messages:
            return begun > record.seq
        texts = [waiting.record.text for waiting in self.status(rank).waiting if waiting.record.is_message]
        halves = [half for half in map(read_message, texts) if half is not None and half.is_send != message.is_send]
        return any(half.peer in (to, None) and half.tag == message.tag for half in halves)
