"""What happened in a lesson: every rank writes its events, one JSON object a line; together they are a list of screens.

`events-<n>.jsonl` holds them in the order in which the rank did them. Times are those of the machine's own clock, which
all processes of one machine share.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

VALUES_MAX = 12  # of a tensor that are kept

Values = tuple[float, ...]


@dataclass(frozen=True)
class Event:
    """One thing that one rank did or said."""

    rank: int
    kind: str  # "screen", "show", "curve", "say", or what was asked of the communicator: "send", "all_reduce", ...
    began_ns: int = 0
    ended_ns: int = 0
    name: str = ""  # title of the screen, name of what is shown, label of an operation
    text: str = ""
    peer: int | None = None  # of a message, or the root
    reduce: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    before: Values = ()  # the first values of what went in
    after: Values = ()  # of what came out

    @property
    def is_message(self) -> bool:
        """Between two ranks."""
        return self.kind in ("send", "recv")

    def to_json(self) -> dict[str, Any]:
        """Without what is as usual."""
        return {name: value for name, value in asdict(self).items() if name == "rank" or value != _USUAL[name]}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Event:
        """The inverse of `to_json`."""
        lists: dict[str, Any] = {name: tuple(found[name]) for name in ("shape", "before", "after") if name in found}
        return Event(**{**found, **lists})


_USUAL = {field.name: field.default for field in fields(Event)}


@dataclass(frozen=True)
class Screen:
    """One idea: what is said about it, and what the ranks did meanwhile."""

    title: str
    text: str
    events: tuple[Event, ...]  # of all ranks, by time


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"events-{rank}.jsonl"  # not a name of `run_record`: a lesson is no run that was recorded


def read_events(folder: Path) -> list[list[Event]]:
    """The events of every rank, each in its own order; a line that was cut off in the middle is left out.

    Raises: ConfigError where there are none.
    """
    ranks: list[list[Event]] = []
    while (path := file_of(folder, len(ranks))).exists():
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        ranks.append([Event.from_json(json.loads(line)) for line in lines])
    if not any(ranks):
        raise ConfigError(f"{str(folder)!r} holds no events of a lesson: `lockstep learn NAME` makes some")
    return ranks


def screens(ranks: Sequence[Sequence[Event]]) -> list[Screen]:
    """The screens of a lesson: rank 0 gives title and text, and all ranks' events under one title belong together.

    What comes before the first screen is not shown: it makes things ready. A rank that has ended is missing from then
    on, until it is started again.
    """
    under: dict[tuple[str, int], list[Event]] = defaultdict(list)
    found: list[tuple[Event, list[Event]]] = []
    for rank, events in enumerate(ranks):
        seen: Counter[str] = Counter()
        current: list[Event] = []
        for event in events:
            if event.kind == "screen":
                seen[event.name] += 1
                current = under[event.name, seen[event.name]]
                if rank == 0:
                    found.append((event, current))
            else:
                current.append(event)
    return [
        Screen(head.name, head.text, tuple(sorted(current, key=lambda event: event.ended_ns)))
        for head, current in found
    ]


def words(event: Event) -> str:
    """An event in one line."""
    if event.kind == "say":
        return event.text
    if event.kind == "show":
        return f"{event.name} = {numbers(event.after, event.shape)}"
    if event.kind == "curve":
        return f"{event.name}: {spark(event.after)}  {event.after[0]:.3g} to {event.after[-1]:.3g}"
    label = f"  {event.name}" if event.name else ""
    if event.kind == "send":
        return f"sends {numbers(event.before, event.shape)} to rank {event.peer}, {count(event.bytes)}{label}"
    if event.kind == "recv":
        return f"receives {numbers(event.after, event.shape)} from rank {event.peer}{label}"
    root = "" if event.peer is None else f" root {event.peer}"
    how = f" {event.reduce}" if event.reduce else ""
    change = f": {numbers(event.before, event.shape)} -> {numbers(event.after, event.shape)}" if event.after else ""
    return f"{event.kind}{how}{root}{change}{label}"


def numbers(values: Values, shape: Sequence[int] = ()) -> str:
    """Values as a reader wants them: whole ones without a point, of a long tensor the first three."""
    listed = [str(int(value)) if value == value // 1 and abs(value) < 1e15 else f"{value:.4g}" for value in values]
    if not shape and len(listed) == 1:
        return listed[0]
    is_cut = len(values) == VALUES_MAX < math.prod(shape)
    return f"[{', '.join([*listed[:3], '..'] if is_cut else listed)}]"


def spark(values: Values, width: int = 24) -> str:
    """A curve in one line, as high as its values are."""
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else list(values)
    low, high = min(picked), max(picked)
    levels = "_.-=*#"
    return "".join(levels[round((value - low) / ((high - low) or 1) * (len(levels) - 1))] for value in picked)


def count(size: int) -> str:
    """Bytes in words."""
    return f"{size} B" if size < 10_000 else f"{size / 1024:.0f} KiB" if size < 10_000 << 10 else f"{size >> 20} MiB"
