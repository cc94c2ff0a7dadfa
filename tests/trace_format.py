"""Whether a trace is one that chrome://tracing and Perfetto take as a whole, by the Trace Event Format and by what the
importer of Perfetto does with events: one that it cannot place it drops, and only counts that.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
Place = tuple[int, int]  # pid, tid

# ph -> what an event of that kind has beside ph, pid and tid
_NEEDED = {
    "M": ("name", "args"),
    "X": ("name", "ts", "dur"),
    "i": ("name", "ts"),
    "b": ("name", "cat", "id", "ts"),
    "e": ("name", "cat", "id", "ts"),
    "s": ("name", "cat", "id", "ts"),
    "f": ("name", "cat", "id", "ts", "bp"),
}
_ID_MAX = 1 << 53  # of numbers that JavaScript holds


def check_trace(trace: Mapping[str, Any]) -> None:
    """Raises: AssertionError where it is none."""
    json.dumps(trace, allow_nan=False)
    events: list[Event] = trace["traceEvents"]
    for event in events:
        _check_fields(event)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    _check_names(events)
    slices: dict[Place, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    for place, ones in slices.items():
        _check_nested(place, ones)
    _check_arrows(events, slices)
    _check_open(events)


def _check_fields(event: Event) -> None:
    assert event["ph"] in _NEEDED, event
    assert type(event["pid"]) is type(event["tid"]) is int, event
    for name in _NEEDED[event["ph"]]:
        assert name in event, event
    assert isinstance(event["name"], str), event
    for name in ("ts", "dur"):
        assert name not in event or (math.isfinite(event[name]) and event[name] >= 0), event


def _check_names(events: Iterable[Event]) -> None:
    """Every process and thread has one; by its number Perfetto finds a thread, in whichever process it is."""
    named: dict[str, dict[Any, str]] = {"process_name": {}, "thread_name": {}}
    orders: dict[int, int] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            of = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            assert of not in named[event["name"]], event
            named[event["name"]][of] = event["args"]["name"]
        elif event["ph"] == "M":
            assert event["name"] == "process_sort_index", event
            orders[event["pid"]] = event["args"]["sort_index"]
    assert all(named["process_name"].values())
    assert all(named["thread_name"].values())
    assert orders.keys() == named["process_name"].keys()
    assert len(set(orders.values())) == len(orders)
    threads = [tid for _, tid in named["thread_name"]]
    assert len(set(threads)) == len(threads)
    assert all(pid != tid for pid, tid in named["thread_name"]), "it would be the main thread of that process"
    assert {(event["pid"], event["tid"]) for event in events} <= named["thread_name"].keys()


def _check_nested(place: Place, slices: Iterable[Event]) -> None:
    """Of two slices of a thread one lies in the other, or they do not touch."""
    outer: list[float] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = round(1000 * event["ts"]), round(1000 * event["ts"]) + round(1000 * event["dur"])
        while outer and outer[-1] <= begin:
            outer.pop()
        assert not outer or end <= outer[-1], (place, event)
        outer.append(end)


def _check_arrows(events: Iterable[Event], slices: Mapping[Place, Iterable[Event]]) -> None:
    """Each has a beginning and an end, later and both in a slice that comes before it, and a number of its own."""
    ends: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            assert type(event["id"]) is int, event
            assert 0 <= event["id"] < _ID_MAX, event
            ends[event["cat"], event["name"], event["id"]].append(event)
            around = [e for e in slices[event["pid"], event["tid"]] if e["ts"] <= event["ts"] <= e["ts"] + e["dur"]]
            assert around, event
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"], pair
        assert pair[1]["bp"] == "e", pair


def _check_open(events: Iterable[Event]) -> None:
    """What is open beside the slices of threads ends once, under its name."""
    ends: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            ends[event["cat"], event["id"], event["name"]].append(event)
    assert all([event["ph"] for event in pair] == ["b", "e"] for pair in ends.values())
