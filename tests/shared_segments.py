"""The segments of shared memory that a process maps: what a job of a rank should leave none of."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from lockstep.comm.waiting import wait_until
from lockstep.testing.failures import RankFailed

_MAPS = Path("/proc/self/maps")
_SEGMENT = re.compile(r"/(#\d+|lockstep-\w+) \(deleted\)$")  # without a name from the first, or after a moment
_COLLECTIONS = 3  # what C++ lets go of while one is under way is garbage for the next
_LIMIT_S = 60.0  # of asking
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


_kept: set[str] = set()  # by this process, which is a rank's
_told: WeakKeyDictionary[Any, tuple[int, list[str]]] = WeakKeyDictionary()  # pool -> after how many jobs, what


def _kept_here(rank: int) -> list[str]:
    """A job of its own: what the ones before it have left in this process."""
    global _kept
    _kept = kept_segments(_kept)
    return [f"{name} in rank {rank}" for name in sorted(_kept)]


def pool_segments() -> dict[str, str]:
    """What ranks of `run_processes` still map though their jobs are over."""
    worlds = sys.modules.get("lockstep.testing.worlds")
    found: dict[str, str] = {}
    for world_size, pool in () if worlds is None else tuple(worlds._pools.items()):
        jobs, kept = _told.get(pool, (0, []))
        if pool._jobs != jobs:
            kept = []
            if pool._processes:
                with contextlib.suppress(RankFailed):  # killed by a test: nothing is left there
                    lists = pool.run(_kept_here, (), {}, timeout_s=_LIMIT_S, env=None, connect=False)
                    kept = [name for names in lists for name in names]
            _told[pool] = pool._jobs, kept
        found |= {f"{name} of {world_size}": "" for name in kept}
    return found
