"""Whether a look of the guard can be left out: all goes on as it did, and to see that takes a tenth of a look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from lockstep.observe.account import Account
from lockstep.observe.board import Board
from lockstep.observe.flight import RECORDS, FlightRecorder
from lockstep.observe.sights import FlightRecord
from lockstep.observe.status import RUNNING

_MOST = RECORDS - 128  # operations that are not read yet: of more, some would be overwritten before they are
_MOST_STEPS = 1024


class _Seen(NamedTuple):
    """At one glance."""

    steps: int  # that this rank has ended
    begun: int  # operations of its
    news: int  # that ranks have told
    facts: int  # the same, and what could wait
    # of the newest operation that all have begun: its group, and how many of this rank's were not of that; None where
    # ranks have begun others, or where nobody can know
    line: tuple[str, int] | None


@final
class Glance:
    """Of one rank's guard, whose thread calls.

    Where all operations since the last look were collectives of one group, each has its number and that of its group
    apart from each other by the same, and the digest of the last one is that of all. So one operation of each rank
    shows whether they have all done the same. The first rank of the machine, which looks for all, compares it with all
    others, and each of them with the first.
    """

    def __init__(self, recorder: FlightRecorder, account: Account, board: Board) -> None:
        self._recorder, self._account, self._board = recorder, account, board
        self._last = self._base = _Seen(-1, 0, -1, -1, None)  # at the last glance; when the record was read last
        self._known = -1  # facts, at the last look
        self.has_found = False  # at the last glance, and not before: some have begun another collective than others
        self._differs = False
        self._soon = 0  # operations begun by the next glance

    def is_enough(self, *, is_due: bool = False, has_time: bool = False) -> bool:
        """Whether no look is needed; else who calls looks now. is_due: anyway. has_time: also for what could wait."""
        self.has_found = False
        self._recorder.take_up()
        records = self._board.records_here()
        if records is None:  # of other machines nothing is seen at a glance
            return False
        last, base = self._last, self._base
        seen = self._last = self._seen(records)
        self._soon = seen.begun + seen.begun - last.begun  # as many until the next glance as since the last
        has_moved = seen[:2] != last[:2]
        is_same = seen.line is not None and (seen.news, seen.line) == (base.news, base.line)
        has_facts = has_time and (seen.facts != self._known or self._account.facts.said() is not self._board.told)
        if has_moved and is_same and not (is_due or has_facts or self._is_beside(records)):
            self._recorder.live()
            return True
        self._base, self._known = seen, seen.facts
        return False

    @property
    def steps_unread(self) -> int:
        """Steps that this rank has ended since its record was read."""
        return self._recorder.step - self._base.steps

    @property
    def is_full(self) -> bool:
        """Whether the record has to be read now, lest some of it is overwritten before the next glance."""
        return self._soon - self._base.begun > _MOST or self.steps_unread > _MOST_STEPS

    def kept_up(self) -> None:
        """The record has been read up to the last glance, which was enough."""
        self._base = self._last

    def _seen(self, records: Sequence[FlightRecord]) -> _Seen:
        mine, *others = records
        recorder = self._recorder
        news, facts = sum([other.news for other in others]), sum([other.facts for other in others])
        line = self._line(mine, others if recorder.rank == recorder.machine else others[:1])
        return _Seen(recorder.step, recorder.started, news, facts, line)

    def _line(self, mine: FlightRecord, others: Sequence[FlightRecord]) -> tuple[str, int] | None:
        number = min([record.started for record in (mine, *others)]) - 1
        if number < 0:
            return "", 0
        found = [one for record in (mine, *others) for one in record.in_brief(number, number + 1)]
        told = {(seq, is_message, mine.said[words][0]) for _, seq, _, _, _, is_message, words in found}
        (seq, is_message, group), *more = told
        if more or is_message or len(found) <= len(others):
            return None
        differed, self._differs = self._differs, len({digest for _, _, _, _, digest, _, _ in found}) > 1
        self.has_found = self._differs and not differed
        return None if self._differs else (group, number - seq)

    def _is_beside(self, records: Sequence[FlightRecord]) -> bool:
        """Whether there is something that a glance does not see."""
        account = self._account
        has_gpu = self._recorder.clock.gpu is not None or account.motion.is_queued()  # a look settles what has ended
        has_news = account.facts.news != self._board.told.news or any(record.notice() for record in records)
        return has_gpu or has_news or account.state != RUNNING or bool(account.activities)
