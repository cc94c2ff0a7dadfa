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
    for may be done long before they could have it. Nor a threading.Condition: a Ctrl-C inside its Python code can leave
    it locked. Here a signal is heard only where nothing is half done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # the thread that works
        self._sleepers: list[threading.Lock] = []  # each sleeps until its own is released

    def take(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """True: this thread has the turn, and must `give` it back. False: `done()` holds, or the time is over.

        Call it within the `try` whose `finally` gives the turn back: an interrupt may come at any moment.
        """
        me = threading.get_ident()
        end = time.monotonic() + timeout_s
        while True:
            sleeper = threading.Lock()
            with self._lock:
                if done():
                    return False
                if self._holder in (None, me):  # me: an interrupt came before the turn could be given back
                    self._holder = me
                    return True
                sleeper.acquire()
                self._sleepers.append(sleeper)
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False  # whoever wakes it later wakes nobody
            sleeper.acquire(timeout=left_s)

    def give(self) -> None:
        """Let the next one work. Nothing happens where this thread has not the turn."""
        if self.is_mine():
            with self._lock:
                self._holder = None
                self._wake()

    def tell(self) -> None:
        """Something is done: wake those who wait for it."""
        if self._sleepers:
            with self._lock:
                self._wake()

    def is_mine(self) -> bool:
        """Whether this thread works now."""
        return self._holder == threading.get_ident()

    def _wake(self) -> None:
        for sleeper in self._sleepers:
            sleeper.release()
        self._sleepers.clear()
