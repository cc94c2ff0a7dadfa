"""The segments of shared memory that this process maps: what a job of a rank should leave none of."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import NamedTuple

from lockstep.testing.waiting import wait_until

_MAPS = Path("/proc/self/maps")
_SEGMENT = re.compile(r"/(#\d+|lockstep-\w+) \(deleted\)$")  # without a name from the first, or after a moment
_COLLECTIONS = 3  # what C++ lets go of while one is under way is garbage for the next
_PATIENCE_S = 1.0  # for a thread of a transport that is just ending


class Segment(NamedTuple):
    """Where a segment lies; not the semaphores, recorders and data of other libraries or jobs."""

    name: str
    start: int
    end: int


def mapped_segments() -> list[Segment]:
    """All that this process maps (Linux; elsewhere none is known)."""
    found: list[Segment] = []
    for line in _MAPS.read_text().splitlines() if _MAPS.exists() else ():
        addresses, access, _, _, inode, *path = line.split(maxsplit=5)
        if access == "rw-s" and int(inode) and (match := _SEGMENT.search(path[0])):
            start, end = addresses.split("-")
            found.append(Segment(match[1], int(start, 16), int(end, 16)))
    return found


def kept_segments(known: set[str]) -> set[str]:
    """Names of the segments that are mapped for good. known: of those no other look is taken.

    A model is full of cycles, so what is mapped right after a job says nothing; but only then is garbage searched for,
    which takes longer than most jobs.
    """

    def mapped() -> set[str]:
        return {segment.name for segment in mapped_segments()}

    for _ in range(_COLLECTIONS):
        if (kept := mapped()) <= known:
            return kept
        gc.collect()
    wait_until(lambda: mapped() <= known, _PATIENCE_S)
    return mapped()
