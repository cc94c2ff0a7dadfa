"""The ranks of this machine as somebody outside the job sees them: by their flight records, also when they are dead."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import final

from lockstep.comm.shm.peers import Peers
from lockstep.errors import ConfigError
from lockstep.observe.board import FLIGHTS, sight_of
from lockstep.observe.flight import FlightRecord, Record
from lockstep.observe.status import Sight
from lockstep.observe.wording import Finding


@final
class Onlooker:
    """Keeps the records it has found open: they can be read when their files are gone."""

    def __init__(self) -> None:
        self._folders: tuple[Path, ...] = ()
        self._records: dict[Path, tuple[FlightRecord, Peers]] = {}
        self._sights: dict[Path, Sight] = {}

    def follow(self, folders: Sequence[Path]) -> None:
        """From now on the ranks are those in `folders`."""
        if tuple(folders) != self._folders:
            self.close()
            self._folders = tuple(folders)

    def sights(self) -> dict[int, Sight]:
        """The ranks that have said something, as they are now."""
        for path in (path for folder in self._folders for path in folder.glob(FLIGHTS)):
            if path not in self._records:
                with contextlib.suppress(OSError, ConfigError):  # it is being made
                    record = FlightRecord(path)
                    self._records[path] = record, Peers([record.header().pid])
        for path, (record, peers) in self._records.items():
            before = self._sights.get(path)
            if before is None or not before.is_gone:  # the dead do not change
                sight = sight_of(record, how="" if peers.has_ended(0) else None)
                if sight is not None:
                    self._sights[path] = sight
        return {sight.status.rank: sight for sight in sorted(self._sights.values(), key=lambda one: one.status.rank)}

    def records_of(self, rank: int) -> list[Record]:
        """What `rank` did last, oldest first."""
        return next((record.records() for record, _ in self._records.values() if record.header().rank == rank), [])

    def finding(self) -> Finding | None:
        """What the ranks have found to be wrong."""
        notices = filter(None, (record.notice() for record, _ in self._records.values()))
        return next((Finding.from_json(notice.decode()) for notice in notices), None)

    def close(self) -> None:
        """Give back the memory."""
        for record, _ in self._records.values():
            record.close()
        self._records.clear()
        self._sights.clear()
