"""A rank's own flight record, read as it grows: how far the rank is in each group, and what it has under way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, final

from lockstep.observe.board import waits_of
from lockstep.observe.flight import FlightRecord, Mark, Record
from lockstep.observe.status import Folding

_OPEN_MAX = 64  # operations under way that are followed


@final
class OwnRecord:
    """One thread at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._record = FlightRecord(path)
        self._folds: dict[str, Folding] = {}
        self._under_way: dict[int, Record] = {}  # at the last look, by number
        self._read = 0  # records before this number have been read

    def group(self, name: str, ranks: Sequence[int]) -> bool:
        """There is a group of this name and these ranks. Whether that is news."""
        is_new = name not in self._folds
        if is_new:
            self._folds[name] = Folding(ranks)
        return is_new

    def catch_up(self) -> None:
        """Read what was recorded since the last time, and what has ended."""
        for record in self._record.records(min(self._under_way, default=self._read)):
            if record.number >= self._read:
                self._read = record.number + 1
                fold = self._folds.get(record.group)
                if fold is not None and not record.is_message:
                    fold.add(Mark(record.seq, record.step, record.digest))
            if record.left_ns:
                self._under_way.pop(record.number, None)
            else:
                self._under_way[record.number] = record
        for number in sorted(self._under_way)[:-_OPEN_MAX]:
            del self._under_way[number]

    @property
    def newest(self) -> tuple[Record, ...]:
        """The newest operation of each group that has been used of late."""
        return tuple({record.group: record for record in self._record.records(self._read - _OPEN_MAX)}.values())

    @property
    def oldest_ns(self) -> int:
        """When the oldest of what is under way began; 0 where nothing is."""
        return min((record.entered_ns for record in self._under_way.values()), default=0)

    def shown(self) -> dict[str, Any]:
        """What a status shows of it: `groups`, `waiting` and `last`."""
        groups = {name: fold.progress() for name, fold in self._folds.items()}
        newest = self._record.records(self._read - 1)
        waiting = waits_of(list(self._under_way.values()))
        return {"groups": groups, "waiting": waiting, "last": newest[-1] if newest else None}

    def records(self, since: int, until: int) -> list[Record]:
        """Numbers `since` to `until`, without that one, which are still there."""
        return self._record.records(since, until)

    def close(self) -> None:
        """Give back the memory."""
        self._record.close()
