"""What a run has left in its folder: the records of its ranks, and the lines of its launchers; read as they grow."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

from lockstep.errors import ConfigError
from lockstep.observe.profile.notes import Note
from lockstep.observe.profile.rank_reader import OtherFormat, RankReader
from lockstep.observe.profile.run_record import RankRecord, Run, without_wholes
from lockstep.observe.profile.window import LAUNCH
from lockstep.observe.report.open_step import Moment, moment_of, moments_in

RECORD = "profile"  # the record of `lockstep train` in its folder
_NEAR = 3  # runs that are named where there is none


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, as their launcher saw it."""

    name: str
    world_size: int
    began_ns: int  # since the epoch
    ended_ns: int = 0  # 0: not yet
    code: int | None = None
    causes: tuple[str, ...] = ()
    flights: tuple[Path, ...] = ()  # folders of its flight records, as long as it lives
    left: tuple[Moment, ...] = ()  # the step that its ranks did not end


@dataclass(frozen=True)
class Launch:
    """What the launchers of a run have written; the last one counts where there can be one only."""

    began_ns: int
    pid: int
    host: str
    command: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    found: tuple[str, ...] = ()  # after the death of ranks, in what they left
    elsewhere: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # by attempt, what guards of other machines have found
    record: Path | None = None  # where the ranks record, if that is elsewhere
    code: int | None = None  # of the run; None: it is not over
    over_ns: int = 0


class Source(NamedTuple):
    """All there is of a run."""

    folder: Path
    run: Run  # may have no ranks yet
    launch: Launch | None
    problems: tuple[str, ...]  # what cannot be read
    moments: tuple[Moment, ...] = ()  # of the step that was not ended

    def notes(self, kind: str) -> Iterator[tuple[int, Note]]:
        """(rank, note) of one kind, by rank, as they were written."""
        for rank, record in self.run.ranks.items():
            yield from ((rank, note) for note in record.notes if note.kind == kind)


def find_run(folder: Path | None, below: Path) -> Path:
    """The folder of a run: `folder`, or the newest one in `below`.  Raises: ConfigError where there is none."""
    if folder is None:
        newest = next(iter(_runs_in(below)), None)
        if newest is None:
            raise ConfigError(f"there is no run in {below}/: `lockstep run` makes one, or give the folder of a run")
        return newest.resolve()
    given, folder = folder, folder.resolve()
    if not files_in(record_in(folder)):
        for place in filter(Path.is_dir, (folder, folder / RECORD)):
            os.listdir(place)  # one that may not be read looks empty to `glob`: an OSError names it
        how = "holds no record of a run" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        near = next(filter(None, (_runs_in(place) for place in (given, given.parent, below))), [])
        named = f"{', '.join(map(str, near[:_NEAR]))}{', ...' if near[_NEAR:] else ''}"
        hint = f"; the newest nearby: {named}" if near else ""
        raise ConfigError(
            f"{folder} {how}: give the folder that `lockstep run` or `train` has named, or none "
            f"for the newest one in runs/{hint}"
        )
    return folder.parent if folder.name == RECORD and not files_in(folder.parent) else folder


def _runs_in(place: Path) -> list[Path]:
    """The newest first."""
    found = {run: files_in(record_in(run)) for run in place.glob("*") if run.is_dir()}
    times = {run: max(path.stat().st_mtime for path in files) for run, files in found.items() if files}
    return sorted(times, key=lambda run: -times[run])


def record_in(folder: Path) -> Path:
    """Where the record of the run in `folder` lies."""
    return next((place for place in (folder, folder / RECORD) if files_in(place)), folder)


def files_in(place: Path) -> list[Path]:
    """Those of a record."""
    return [*place.glob("rank-*.jsonl"), *place.glob(LAUNCH)]


def places_of(folder: Path) -> tuple[Path, tuple[Path, ...]]:
    """Where the ranks of the run that was launched in `folder` record; and where its newest start has its flight
    records, as its launchers of this machine say.
    """
    launches = _Launches()
    with suppress(OSError, ConfigError):  # there is none, or what follows is none of ours
        for line in _Tail(folder / LAUNCH).lines():
            launches.feed(line)
    launch = launches.launch
    if launch is None:
        return folder, ()
    record = folder if launch.record is None else record_in(launch.record)
    return record, launch.attempts[-1].flights if launch.attempts else ()


@contextmanager
def unswept() -> Iterator[None]:
    """Within, nobody looks for rings of garbage: among all that a record holds that takes as long as reading it."""
    after = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        yield
    finally:
        after()


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

    @unswept()
    def read(self) -> Source:
        """All that is there now. What cannot be read is said in `problems`.  Raises: OtherFormat, also of one rank."""
        place = record_in(self.folder)
        path = place / LAUNCH
        if path.exists():
            self._launch = self._launch or _Tail(path)
            self._feed(self._launch, self._launches)
        launch = self._launches.launch
        elsewhere = None if launch is None else launch.record
        place = place if elsewhere is None else record_in(elsewhere)
        for path in sorted(place.glob("rank-*.jsonl")):
            if path.stem[5:].isdigit():
                self._feed(*self._ranks.setdefault(int(path.stem[5:]), (_Tail(path), RankReader())))
        records = {rank: reader.record() for rank, (_, reader) in sorted(self._ranks.items())}
        ranks = {rank: record for rank, record in records.items() if record is not None}
        if launch is not None and elsewhere is not None:
            ranks = {rank: record for rank, record in ranks.items() if _is_of(record, launch)}
        moments = () if launch is None else _moments(launch, ranks)
        if moments or any(line.whole == 0 for record in ranks.values() for line in record.lines):
            ranks = without_wholes(ranks)
        return Source(self.folder, Run(place, ranks), launch, tuple(self._broken.values()), moments)

    def cut_off(self) -> Iterator[str]:
        """What is wrong with it where nobody writes any more: a rank has left no whole line, or a part of one."""
        for tail, reader in (self._ranks[rank] for rank in sorted(self._ranks)):
            if tail.path not in self._broken and (tail.rest or reader.record() is None):
                how = "its last line has no end" if reader.record() else "there is no whole line in it"
                yield f"{tail.path.name}: {how}"

    def _feed(self, tail: _Tail, reader: RankReader | _Launches) -> None:
        if tail.path in self._broken:
            return
        try:
            for line in tail.lines():
                self.size += len(line)
                reader.feed(line)
        except OtherFormat as error:
            self._ranks.clear()  # or the next look would go on behind that line
            raise OtherFormat(f"{tail.path}: {error}") from error
        except (ConfigError, OSError) as error:
            self._broken[tail.path] = f"{tail.path.name}: {getattr(error, 'strerror', None) or error}"


def _is_of(record: RankRecord, launch: Launch) -> bool:
    """Whether the launch has started it: another run may have recorded there before or after."""
    return any(launch.began_ns <= start.time_ns <= (launch.over_ns or start.time_ns) for start in record.starts)


def _moments(launch: Launch, ranks: Mapping[int, RankRecord]) -> tuple[Moment, ...]:
    """Of the step that the last attempt has not ended, or in which it stands, by what its ranks have found."""
    last = launch.attempts[-1] if launch.attempts else Attempt("", 0, 0)
    found = (note for record in ranks.values() for note in record.notes if note.kind == "finding")
    if last.ended_ns or launch.code is not None or not any(note.attempt == last.name for note in found):
        return last.left
    return tuple(moments_in(last.flights))


@final
class _Tail:
    """A file that is appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest = False  # the last line has no end yet
        self._at = 0

    def lines(self) -> Iterator[str]:
        """The whole lines since the last call."""
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._at:
                raise ConfigError("another run has taken its place")
            file.seek(self._at)
            for line in file:
                self.rest = not line.endswith(b"\n")
                if not self.rest:
                    self._at += len(line)
                    yield line.decode(errors="replace")


@final
class _Launches:
    """Reads the lines of launchers."""

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self._number = 0

    def feed(self, line: str) -> None:
        """The next line.  Raises: ConfigError where it is none of ours."""
        self._number += 1
        try:
            self.launch = _with(self.launch, json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if not (isinstance(error, json.JSONDecodeError) and line.startswith('{"')):  # cut off as it was killed
                raise ConfigError(f"line {self._number} is none of a launcher: {line.strip()[:80]!r}") from error


def _with(launch: Launch | None, values: Mapping[str, Any]) -> Launch:
    """`launch`, with one line more."""
    if "launch" in values:
        about = {"pid": values.get("pid", 0), "host": values.get("host", ""), "code": None, "over_ns": 0}
        before = launch or Launch(values["time_ns"], 0, "")
        return replace(before, command=tuple(values.get("command", ())), **about)
    if launch is None:
        raise ValueError("there is no launch before it")
    if "over" in values:
        return replace(launch, code=values["code"], over_ns=values["time_ns"])
    if "found" in values:
        return replace(launch, found=(*launch.found, values["found"]))
    if "elsewhere" in values:
        return replace(launch, elsewhere=(*launch.elsewhere, (values["elsewhere"], values["finding"])))
    if "record" in values:
        return replace(launch, record=Path(values["record"]))
    for kind, changed in (("attempt", _begun), ("left", _left), ("ended", _ended)):
        if kind in values:
            name, attempts = values[kind], {attempt.name: attempt for attempt in launch.attempts}
            if kind == "attempt":
                attempts.setdefault(name, Attempt(name, values["world_size"], values["time_ns"]))
            if name in attempts:
                attempts[name] = changed(attempts[name], values)
            return replace(launch, attempts=tuple(attempts.values()))
    return launch  # of a later version


# Each machine's launcher says its own of an attempt.


def _begun(attempt: Attempt, values: Mapping[str, Any]) -> Attempt:
    place = Path(values.get("flights", ""))
    return replace(attempt, flights=(*attempt.flights, place)) if place.is_absolute() else attempt


def _left(attempt: Attempt, values: Mapping[str, Any]) -> Attempt:
    return replace(attempt, left=(*attempt.left, *map(moment_of, values["ranks"])))


def _ended(attempt: Attempt, values: Mapping[str, Any]) -> Attempt:
    causes = (*attempt.causes, *values.get("causes", ()))
    return replace(attempt, ended_ns=values["time_ns"], code=values["code"] or attempt.code, causes=causes)
