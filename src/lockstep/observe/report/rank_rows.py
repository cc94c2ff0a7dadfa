"""One row per rank for the terminal: what the rank does now, and how its last steps went."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from lockstep.observe.profile.phases import EXPOSED
from lockstep.observe.profile.rank_reader import steps_of
from lockstep.observe.profile.run_record import Steps
from lockstep.observe.scene import STILL_S, Scene, Wait
from lockstep.observe.status import FINISHED, RAISED, Status, in_words
from lockstep.observe.wording import names, seconds

_WAITS_S = 1.0  # an operation that is open for less is under way
_NEWEST = 32  # lines of a record that are kept
_READ_BYTES = 64 << 10  # of a record that others have written long before

Mood = Literal["error", "warning", "good", "idle"]
GONE = "killed, or gone without a word"
_MOODS: tuple[Mood, ...] = ("error", "warning", "good", "idle")


class Stand(NamedTuple):
    """What a rank does at this moment."""

    mood: Mood
    text: str
    detail: str = ""
    age_s: float = 0.0  # for how long; 0 where that says nothing

    def __str__(self) -> str:
        lasted = f" for {seconds(self.age_s)}" if self.age_s else ""
        return f"{self.text}{lasted}{f': {self.detail}' * bool(self.detail)}"


class RankRow(NamedTuple):
    """One rank, or several that do the same."""

    ranks: tuple[int, ...]
    host: str
    step: int
    steps_ms: tuple[float, ...]  # of each of the last lines of the record
    shares: tuple[float, ...]  # of PHASES in those; () where nothing is known
    tokens_per_s: float
    samples_per_s: float
    memory_mib: int
    stand: Stand

    @property
    def step_ms(self) -> float:
        """Of the last steps, the typical one; 0 where none has ended."""
        return statistics.median(self.steps_ms) if self.steps_ms else 0.0


# ------------------------------------------------------------------ now


def stand_of(scene: Scene, rank: int) -> Stand:
    """What `rank`, which has been heard of, does."""
    sight = scene.sights[rank]
    status = sight.status
    if status.state == RAISED:
        return _raised(status)
    if status.state == FINISHED:
        return Stand("idle", "finished")
    place = f"at {status.stack[-1]}" if status.stack else ""
    if sight.is_gone:
        return Stand("error", GONE, place)
    if scene.is_silent(rank):
        return Stand("error", "stopped, no sign of life", place, sight.age_s)
    wait = scene.blocked.get(rank) or next((wait for wait in scene.waits if wait.rank == rank), None)
    doing = f"{status.activity}, " if status.activity else ""
    if wait is not None and wait.age_s >= _WAITS_S:
        return _waiting(wait, doing)
    if status.unmoved_s >= STILL_S:
        return Stand("warning", f"{doing}does not move", place, status.unmoved_s)
    return Stand("good", status.activity or "running")


def _raised(status: Status) -> Stand:
    words = status.words
    if words is None:
        return Stand("error", "raised")
    message = words.message.partition("\n")[0]
    where = f"raised at {words.where}" if words.where else "raised"
    return Stand("idle" if words.is_consequence else "error", where, in_words(words.kind, message))


def _waiting(wait: Wait, doing: str) -> Stand:
    kind, _, what = wait.record.text.partition(" ")
    label = f", {wait.record.label!r}" if wait.record.label else ""
    whom = f" for {names(wait.absent)}" if wait.absent else ""
    return Stand("warning", f"{doing}waits{whom}", f"{kind} at {wait.record.site} ({what}{label})", wait.age_s)


# ------------------------------------------------------------------ before


@final
class Tail:
    """The end of one rank's record, read on as it grows."""

    def __init__(self, path: Path) -> None:
        self.host = ""
        self.step = 0
        self.memory_mib = 0
        self.paces: deque[Steps] = deque(maxlen=_NEWEST)
        self.values: dict[str, float] = {}  # the newest of each name
        self._path = path
        self._file = self._at = 0
        self._rest = b""

    def read(self) -> None:
        """Take in what has been written since; of what others have written long before, the end."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:  # it has not begun
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._file:  # the first look, or another run has taken its place
                first = file.readline()
                if not first.endswith(b"\n"):
                    return
                self._take(first)
                self._file, self._at, self._rest = stat.st_ino, max(len(first), stat.st_size - _READ_BYTES), b""
            file.seek(self._at)
            data = file.read()
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        with contextlib.suppress(ValueError, TypeError, LookupError, OverflowError, StopIteration):
            self._put(json.loads(line))  # else it is cut off by a kill; or none of ours, which the report names

    def _put(self, values: dict[str, Any]) -> None:
        kind = next(iter(values))
        if kind == "start":
            self.host = str(values["host"])
            self.paces.clear()
        elif kind == "values":
            self.step = max(self.step, int(values.pop(kind)))
            self.values |= {name: n for name, n in values.items() if isinstance(n, int | float) and name != "at_us"}
        elif kind == "step":
            self.paces.append(line := steps_of({**values, "ops": []}))
            self.step, self.memory_mib = line.step, line.cuda_mib or line.rss_mib


def row_of(rank: int, tail: Tail, status: Status | None, stand: Stand) -> RankRow:
    """status: what the rank says of itself, where that can be heard."""
    paces = tail.paces
    wall_us = sum(pace.wall_us for pace in paces)
    phases = [sum(column) for column in zip(*(pace.phases_us for pace in paces), strict=True)]
    return RankRow(
        ranks=(rank,),
        host=tail.host if status is None else status.host,
        step=tail.step if status is None else max(tail.step, status.step),
        steps_ms=tuple([pace.wall_us / pace.count / 1000 for pace in paces]),
        shares=tuple([phase / wall_us for phase in phases]) if wall_us else (),
        tokens_per_s=sum(pace.tokens for pace in paces) / wall_us * 1e6 if wall_us else 0.0,
        samples_per_s=sum(pace.samples for pace in paces) / wall_us * 1e6 if wall_us else 0.0,
        memory_mib=tail.memory_mib,
        stand=stand,
    )


def rows_of(tails: Mapping[int, Tail], scene: Scene, world_size: int, rest: Stand) -> list[RankRow]:
    """All ranks of the run. rest: what is said of a rank that cannot be heard, or was stopped with all others."""
    unheard = Tail(Path())
    rows = []
    for rank in sorted({*range(world_size), *tails, *scene.sights}):
        sight = scene.sights.get(rank)
        is_told = sight is not None and not (sight.is_gone and rest.text == "stopped")
        stand = stand_of(scene, rank) if is_told else rest
        rows.append(row_of(rank, tails.get(rank, unheard), None if sight is None else sight.status, stand))
    return rows


def folded(rows: Sequence[RankRow], room: int) -> list[RankRow]:
    """At most `room` rows, at least one; what is worst is shown first.

    Ranks that do the same share one. Where there is room, those that wait least for others stand alone.
    """
    if len(rows) <= room:
        return list(rows)
    together: dict[Stand, list[RankRow]] = {}
    for row in rows:
        together.setdefault(row.stand._replace(age_s=0.0), []).append(row)
    shown, spare = [], room - len(together)
    for group in sorted(together.values(), key=lambda group: (_MOODS.index(group[0].stand.mood), group[0].ranks)):
        # by rounded shares of waiting: rows should not jump about
        by_waiting = sorted(group, key=lambda row: round(row.shares[EXPOSED], 1) if row.shares else 0.0)
        alone = by_waiting[: max(0, min(spare, len(group) - 2))]
        spare -= len(alone)
        shown += [*sorted(alone), _joined([row for row in group if row not in alone])]
    while len(shown) > max(1, room):
        shown[-2:] = [_joined(shown[-2:])]
    return shown


def _joined(rows: Sequence[RankRow]) -> RankRow:
    """The row in the middle by the time of a step stands for all."""
    middle = sorted(rows, key=lambda row: row.step_ms)[len(rows) // 2]
    hosts = sorted({row.host for row in rows})
    stands = dict.fromkeys(row.stand._replace(age_s=0.0) for row in rows)
    stand, *others = stands
    if others:
        stand = stand._replace(text="; ".join(dict.fromkeys(each.text for each in stands)), detail="")
    return middle._replace(
        ranks=tuple(sorted(rank for row in rows for rank in row.ranks)),
        host=hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts",
        step=min(row.step for row in rows),
        samples_per_s=sum(row.samples_per_s for row in rows),
        memory_mib=max(row.memory_mib for row in rows),
        stand=stand._replace(age_s=max(row.stand.age_s for row in rows)),
    )
