"""Whether processes whose guards are silent use a core: C code may hold Python's lock for long."""

from __future__ import annotations

from typing import final

from lockstep.comm.kernel import state_and_cpu_s
from lockstep.observe.sights import SILENT_S
from lockstep.observe.status import Sight

_WORKS = 0.02  # of a core: less is not work


@final
class Cores:
    """Of the processes of this machine."""

    def __init__(self) -> None:
        self._used: dict[int, tuple[float, float, bool]] = {}  # by silent rank: when, time on cores until then, works

    def seen(self, sight: Sight, now_s: float) -> Sight:
        """`sight`, with whether it works; from two looks that are a second apart."""
        rank = sight.status.rank
        if sight.age_s <= SILENT_S or sight.is_gone:
            self._used.pop(rank, None)
            return sight
        state, used_s = state_and_cpu_s(f"/proc/{sight.status.pid}/stat")
        since_s, before_s, works = self._used.get(rank, (now_s, used_s, False))
        if now_s - since_s >= SILENT_S:
            works = state == "R" or used_s - before_s > _WORKS * (now_s - since_s)
            since_s, before_s = now_s, used_s
        self._used[rank] = since_s, before_s, works
        return sight._replace(is_working=works)
