"""What a launcher tells the guards of other machines of the ranks of this one, and what it hears of theirs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

from lockstep.launch.machines import Machines
from lockstep.observe.board import put_up_in, send_ends, send_silent
from lockstep.observe.cores import Cores
from lockstep.observe.onlooker import Onlooker
from lockstep.observe.sights import SILENT_S

_LOOK_S = 0.25


@final
class Guards:
    """Of one start, through the store in which they meet; without one they do not, and nothing is told or heard."""

    def __init__(self, machines: Machines | None = None, store: Any = None, place: str = "") -> None:
        """place: of the store, for the ranks."""
        self.place = place
        self._machines = None if store is None else machines
        self._store: Any = store
        self._flights = Path()
        self._onlooker, self._cores = Onlooker(), Cores()
        self._looked_s, self._waited = 0.0, False

    def follow(self, flights: Path) -> None:
        """The records of this machine's ranks are there."""
        self._flights = flights
        self._onlooker.follow([flights])

    def tell_ends(self, ends: Mapping[int, str | None]) -> None:
        """How processes ended; None: they are stopped. See `send_ends`."""
        if ends and self._machines is not None:
            self._machines.ask(partial(send_ends, self._flights, ends, self._store), None)

    def look(self, now_s: float) -> None:
        """Tell, once in a while, that processes run whose own guards do not speak, as C code may not let them."""
        if self._machines is None or now_s < self._looked_s + SILENT_S:
            return
        self._looked_s, self._waited = now_s, self._all_wait()
        sights = [self._cores.seen(sight, now_s) for sight in self._onlooker.sights().values()]
        silent = [one for one in sights if one.age_s > SILENT_S and not (one.is_gone or one.is_stopped)]
        if silent:
            self._machines.ask(partial(send_silent, silent, self._store), None)

    def are_waiting(self) -> bool:
        """Whether all ranks of this machine do, or did a moment ago: then some of another machine may be to blame."""
        return self._waited or self._all_wait()

    def _all_wait(self) -> bool:
        sights = {} if self._machines is None else self._onlooker.sights()
        return bool(sights) and all(one.is_gone or one.status.waiting for one in sights.values())

    def news(self, limit_s: float) -> str:
        """What a guard of any machine has found, as soon as one has; "" after `limit_s`, or where none can be heard."""
        deadline = time.monotonic() + limit_s
        while self._machines is not None and not self._machines.is_mute:
            up = self._machines.ask(partial(put_up_in, self._store), "")
            if up or time.monotonic() >= deadline:
                return up
            self._machines.wait(_LOOK_S)
        return ""

    def close(self) -> None:
        """Give back the memory."""
        self._onlooker.close()
