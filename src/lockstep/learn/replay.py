"""A lesson's own run as one HTML file, to be played back: what each rank did, message by message, on one clock."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.learn.events import Event, Screen, count, numbers, words
from lockstep.learn.lanes import Row, rows
from lockstep.observe.report.single_file import asset, single_file


def replay(name: str, title: str, screens: Sequence[Screen], world_size: int) -> str:
    """The page, as pure ASCII: no network, opens from disk."""
    return single_file(
        title=f"{name} - lockstep",
        body=asset("replay.html", __file__).replace("$lesson", html.escape(f"{name}: {title}")),
        style=asset("replay.css", __file__),
        script=asset("replay.js", __file__),
        document={"name": name, "title": title, "ranks": world_size, "screens": [_screen(one) for one in screens]},
    )


def _screen(screen: Screen) -> Mapping[str, Any]:
    began_ns = min((event.began_ns for event in screen.events), default=0)
    found = rows(screen.events)
    slots = {level: number for number, level in enumerate(sorted({row.level for row in found}))}
    return {
        "title": screen.title,
        "text": screen.text,
        "slots": len(slots),
        "rows": [{"slot": slots[row.level], **_row(row, began_ns)} for row in found],
    }


def _row(row: Row, zero_ns: int) -> Mapping[str, Any]:
    first, ordered = row.events[0], sorted(row.events, key=lambda event: event.rank)
    kind = "message" if first.is_message else first.kind if first.kind in ("show", "curve", "say") else "collective"
    found: dict[str, Any] = {
        "kind": kind,
        "began_us": (min(event.began_ns for event in row.events) - zero_ns) // 1000,
        "ended_us": (row.at_ns - zero_ns) // 1000,
        "ranks": [_rank(event) for event in ordered],
        "words": [f"rank {event.rank} {words(event).replace('  ', ', ')}" for event in ordered],
    }
    if kind == "message":
        sender, receiver = (first.rank, first.peer) if first.kind == "send" else (first.peer, first.rank)
        values = next((event.before for event in row.events if event.kind == "send"), first.after)
        found |= {"from": sender, "to": receiver, "value": numbers(values, first.shape)}
    if kind == "collective":
        root = "" if first.peer is None else f" root {first.peer}"
        found["name"] = " ".join(filter(None, (first.kind, first.reduce + root, first.name)))
    found["about"] = f"{first.dtype} {list(first.shape)}, {count(first.bytes)}" if first.dtype else ""
    return found


def _rank(event: Event) -> Mapping[str, Any]:
    return {
        "rank": event.rank,
        "name": event.name,
        "before": numbers(event.before, event.shape) if event.before else "",
        "after": numbers(event.after, event.shape) if event.after else "",
        "values": list(event.after) if event.kind == "curve" else [],
        "text": event.text,
    }
