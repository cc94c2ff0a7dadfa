"""Work that must end before connections are closed, because other ranks wait for it and nobody here does."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

_ends: list[tuple[int, weakref.WeakMethod[Callable[[], object]]]] = []  # beside each the thread it belongs to


def before_close(end: Callable[[], object]) -> None:
    """Call the method `end`, as long as its object lives, before a communicator of this thread closes, and at exit."""
    _ends[:] = [(owner, known) for owner, known in _ends if known() is not None]
    _ends.append((threading.get_ident(), weakref.WeakMethod(end)))


@atexit.register
def end_what_others_wait_for() -> None:
    """What a communicator does first in `close`. Ranks may be threads of one process: each ends its own."""
    for owner, known in tuple(_ends):
        end = known()
        if end is not None and owner == threading.get_ident():
            end()
