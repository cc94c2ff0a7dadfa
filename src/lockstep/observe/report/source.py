"""What a run has left in its folder: the records of its ranks, and the lines of its launchers; read as they grow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from lockstep.errors import ConfigError
from lockstep.observe.profile.run_record import Note, RankReader, Run

RECORD = "profile"  # the record of `lockstep train` in its folder
_LAUNCH = "launch.jsonl"


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, as their launcher saw it."""

    name: str
    world_size: int
    began_ns: int  # since the epoch
    ended_ns: int = 0  # 0: not yet
    code: int | None = None
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """What the launchers of a run have written; the last one counts where there can be one only."""

    began_ns: int
    pid: int
    host: str
    command: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    found: tuple[str, ...] = ()  # after the death of ranks, in what they left
    code: int | None = None  # of the run; None: it is not over
    over_ns: int = 0


class Source(NamedTuple):
    """All there is of a run."""

    folder: Path
    run: Run  # may have no ranks yet
    launch: Launch | None
    problems: tuple[str, ...]  # what cannot be read

    def notes(self, kind: str) -> Iterator[tuple[int, Note]]:
        """(rank, note) of one kind, by rank, as they were written."""
        for rank, record in self.run.ranks.items():
            yield from ((rank, note) for note in record.notes if note.kind == kind)


def find_run(folder: Path | None, below: Path) -> Path:
    """The folder of a run: `folder`, or the newest one in `below`.  Raises: ConfigError where there is none."""
    if folder is None:
        found = {place: _files(record_in(place)) for place in below.glob("*") if place.is_dir()}
        times = {max(path.stat().st_mtime for path in files): place for place, files in found.items() if files}
        if not times:
            raise ConfigError(f"there is no run in {below}/: `lockstep run` makes one, or give the folder of a run")
        return times[max(times)].resolve()
    folder = folder.resolve()
    if not _files(record_in(folder)):
        raise ConfigError(
            f"{folder} holds no record of a run: give the folder that `lockstep run` or `train` has named, or none "
            "for the newest one in runs/"
        )
    return folder.parent if folder.name == RECORD and not _files(folder.parent) else folder


def record_in(folder: Path) -> Path:
    """Where the record of the run in `folder` lies."""
    return next((place for place in (folder, folder / RECORD) if _files(place)), folder)


def _files(place: Path) -> list[Path]:
    return [*place.glob("rank-*.jsonl"), *place.glob(_LAUNCH)]


@final
class RunReader:
    """Reads the folder of a run; each time only what is new since the last one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.size = 0  # bytes that have been read
        self._ranks: dict[int, tuple[_Tail, RankReader]] = {}
        self._launch: _Tail | None = None
        self._launches = _Launches()
        self._broken: dict[Path, str] = {}

    def read(self) -> Source:
        """All that is there now. What cannot be read is said in `problems`."""
        place = record_in(self.folder)
        for path in _files(place):
            if path.name == _LAUNCH:
                self._launch = self._launch or _Tail(path)
                self._feed(self._launch, self._launches)
            elif path.stem[5:].isdigit():
                self._feed(*self._ranks.setdefault(int(path.stem[5:]), (_Tail(path), RankReader())))
        records = {rank: reader.record() for rank, (_, reader) in sorted(self._ranks.items())}
        ranks = {rank: record for rank, record in records.items() if record is not None}
        return Source(self.folder, Run(place, ranks), self._launches.launch, tuple(self._broken.values()))

    def _feed(self, tail: _Tail, reader: RankReader | _Launches) -> None:
        if tail.path in self._broken:
            return
        try:
            for line in tail.lines():
                self.size += len(line)
                reader.feed(line)
        except (ConfigError, OSError) as error:
            self._broken[tail.path] = f"{tail.path.name}: {error}"


@final
class _Tail:
    """A file that is appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def lines(self) -> Iterator[str]:
        """The whole lines since the last call."""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._at:
                raise ConfigError("another run has taken its place")
            file.seek(self._at)
            for line in file:
                if line.endswith(b"\n"):
                    self._at += len(line)
                    yield line.decode(errors="replace")


@final
class _Launches:
    """Reads the lines of launchers."""

    def __init__(self) -> None:
        self.launch: Launch | None = None

    def feed(self, line: str) -> None:
        """The next line.  Raises: ConfigError where it is none of ours."""
        try:
            values = json.loads(line)
            self.launch = _with(self.launch, values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"a line is none of a launcher: {error!r}") from error


def _with(launch: Launch | None, values: Mapping[str, Any]) -> Launch:
    """`launch`, with one line more."""
    if "launch" in values:
        begun = launch.began_ns if launch else values["time_ns"]
        about = tuple(values.get("command", ())), values.get("pid", 0), values.get("host", "")
        before = launch or Launch(begun, 0, "")
        return replace(before, command=about[0], pid=about[1], host=about[2], code=None, over_ns=0)
    if launch is None:
        raise ValueError("there is no launch before it")
    if "over" in values:
        return replace(launch, code=values["code"], over_ns=values["time_ns"])
    if "found" in values:
        return replace(launch, found=(*launch.found, values["found"]))
    if "attempt" in values:
        if any(attempt.name == values["attempt"] for attempt in launch.attempts):  # another machine's launcher
            return launch
        new = Attempt(values["attempt"], values["world_size"], values["time_ns"])
        return replace(launch, attempts=(*launch.attempts, new))
    if "ended" in values:
        return replace(launch, attempts=tuple(_ended(attempt, values) for attempt in launch.attempts))
    return launch  # of a later version


def _ended(attempt: Attempt, values: Mapping[str, Any]) -> Attempt:
    """With how it ended, if that is what `values` tell of."""
    if attempt.name != values["ended"]:
        return attempt
    causes = (*attempt.causes, *values.get("causes", ()))  # each machine's launcher says its own
    return replace(attempt, ended_ns=values["time_ns"], code=values["code"] or attempt.code, causes=causes)
