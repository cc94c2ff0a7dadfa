"""Who does the work that several threads of one rank wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final


@final
class Turn:
    """One thread at a time works for all. The others sleep until theirs is done, or until it is their turn.

    A lock would not do: whoever gives it back may take it again before those who wait have woken, and what they wait
    for may be done long before they could have it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._holder: int | None = None  # the thread that works
        self.waiting = 0  # threads that sleep until something is done; for hints only

    def take(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """True: this thread has the turn, and must `give` it back. False: `done()` holds, or the time is over.

        Call it within the `try` whose `finally` gives the turn back: an interrupt may come at any moment.
        """
        me = threading.get_ident()
        with self._changed:
            if done():
                return False
            if self._holder is None:
                self._holder = me
                return True
            end = time.monotonic() + timeout_s
            self.waiting += 1
            try:
                while not done():
                    if self._holder is None:
                        self._holder = me
                        return True
                    left_s = end - time.monotonic()
                    if left_s <= 0:
                        return False
                    self._changed.wait(left_s)
            finally:
                self.waiting -= 1
            return False

    def give(self) -> None:
        """Let the next one work. Nothing happens where this thread has not the turn."""
        if self.is_mine():
            with self._changed:
                self._holder = None
                if self.waiting:
                    self._changed.notify_all()

    def tell(self) -> None:
        """Something is done: wake those who wait for it."""
        if self.waiting:
            with self._changed:
                self._changed.notify_all()

    def is_mine(self) -> bool:
        """Whether this thread works now."""
        return self._holder == threading.get_ident()
