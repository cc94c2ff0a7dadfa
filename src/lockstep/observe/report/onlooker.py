"""The ranks of this machine as somebody outside the job sees them: by their flight records, also when they are dead."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import final

from lockstep.comm.shm.peers import Peers
from lockstep.errors import ConfigError
from lockstep.observe.board import FLIGHTS, sight_of
from lockstep.observe.flight import FlightRecord, Record
from lockstep.observe.status import Sight
from lockstep.observe.wording import Finding


def flights_of(folder: Path) -> tuple[Path, ...]:
    """Where the newest start of the run in `folder` has its flight records, as its launchers of this machine say."""
    newest, places = "", []
    for line in _lines(folder / "launch.jsonl"):
        if "attempt" in line:
            if line["attempt"] != newest:
                newest, places = line["attempt"], []
            places.append(Path(line.get("flights", "")))
    return tuple(place for place in places if place.is_absolute())


def _lines(path: Path) -> list[dict[str, str]]:
    try:
        texts = path.read_text(errors="replace").split("\n")[:-1]  # the last one is empty, or being written
    except OSError:
        return []
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):  # cut off by a launcher that was killed
            found.append(json.loads(text))
    return found


@final
class Onlooker:
    """Keeps the records it has found open: they can be read when their files are gone."""

    def __init__(self) -> None:
        self._folders: tuple[Path, ...] = ()
        self._records: dict[Path, FlightRecord] = {}
        self._peers: dict[Path, Peers] = {}
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
                    record = self._records[path] = FlightRecord(path)
                    self._peers[path] = Peers([record.header().pid])
        for path, record in self._records.items():
            before = self._sights.get(path)
            if before is None or not before.is_gone:  # the dead do not change
                sight = sight_of(record, is_gone=self._peers[path].has_ended(0))
                if sight is not None:
                    self._sights[path] = sight
        return {sight.status.rank: sight for sight in sorted(self._sights.values(), key=lambda one: one.status.rank)}

    def records_of(self, rank: int) -> list[Record]:
        """What `rank` did last, oldest first."""
        return next((record.records() for record in self._records.values() if record.header().rank == rank), [])

    def finding(self) -> Finding | None:
        """What the ranks have found to be wrong."""
        notices = filter(None, (record.notice() for record in self._records.values()))
        return next((Finding.from_json(notice.decode()) for notice in notices), None)

    def close(self) -> None:
        """Give back the memory."""
        for record in self._records.values():
            record.close()
        self._records.clear()
        self._peers.clear()
        self._sights.clear()
