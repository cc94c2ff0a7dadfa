"""The ranks of this machine as somebody outside the job sees them: by their flight records, also when they are dead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from lockstep.comm.shm.peers import Peers
from lockstep.errors import CollectiveMismatch, ConfigError
from lockstep.observe.divergence import find_mismatch
from lockstep.observe.flight import Record
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.sights import FLIGHTS, FlightRecord, from_record, sight_of, status_of
from lockstep.observe.status import Sight, Status
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


def told_in(folder: Path) -> dict[int, Status]:
    """What ranks have said last: how they left, too, also of an exception that `sys.exit(1)` followed."""
    with _records_in(folder) as records:
        told = ((rank, status_of(record.status())) for rank, record in records.items())
        return {rank: status for rank, status in told if status is not None}


def noticed(folder: Path) -> str:
    """What a guard of any machine has found, as those of this one know; their records are in `folder`."""
    with _records_in(folder) as records:
        return next((found.decode() for record in records.values() if (found := record.notice())), "")


def post_mortem(folder: Path) -> str:
    """Which operations of the ranks in `folder` did not match; "" where all did, or a rank has said so itself.

    A rank may be ended by what another one sends (Gloo aborts the process where sizes differ), before its guard looks.
    """
    with _records_in(folder) as records:
        told = {rank: from_record(record, status_of(record.status())) for rank, record in records.items()}
        raised = {one.words.kind for one in told.values() if one.words is not None}
        if CollectiveMismatch.__name__ in raised or any(record.notice() for record in records.values()):
            return ""
        sights = {rank: Sight(status, 0.0, is_gone=False) for rank, status in told.items()}
        done = {rank: record.records() for rank, record in records.items()}
        scenes = (Scene(me, sights, lambda rank: done.get(rank, []), Limits(grace_s=0.0)) for me in sorted(records))
        return next((found.text for found in map(find_mismatch, scenes) if found and found.is_certain), "")


@contextlib.contextmanager
def _records_in(folder: Path) -> Iterator[dict[int, FlightRecord]]:
    """Of all ranks that have made one, by rank."""
    with contextlib.ExitStack() as stack:
        records: dict[int, FlightRecord] = {}
        for path in folder.glob(FLIGHTS):
            with contextlib.suppress(ConfigError):  # killed while making it
                record = stack.enter_context(contextlib.closing(FlightRecord(path)))
                records[record.header().rank] = record
        yield records
