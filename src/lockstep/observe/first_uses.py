"""When torch's Flight Recorder may be asked: not while a thread makes a group, or starts the first operation of one.

Torch reads its tables of groups without the lock under which it writes them (2.11 to 2.13, `FlightRecorder::
getPgStatusJson`): it finds an entry that has no status yet, and the process dies of SIGSEGV. With a thread that asked
all the time that happened once in 5,000 first operations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, final

if TYPE_CHECKING:
    from lockstep.observe.torch_groups import WatchedGroup  # it imports this module

_ASKED = 4  # times, while a thread was in there: what it had to write is written, it waits for other ranks

Answer = TypeVar("Answer")


@final
class _Held:
    inside = 1


@final
class FirstUses:
    """Of one process. The threads of its program begin them; the guard's thread asks in between."""

    def __init__(self) -> None:
        self._begun: dict[WatchedGroup | _Held, int] = {}  # how often somebody has wanted to ask since
        self._lock = threading.RLock()  # a handler of a signal may begin one within

    def begin(self, use: WatchedGroup | _Held) -> None:
        """The thread that calls is inside of `use`, and about to write. Waits while somebody asks: a millisecond."""
        with self._lock:
            self._begun[use] = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within this the thread may write."""
        use = _Held()
        self.begin(use)
        try:
            yield
        finally:
            with self._lock:
                del self._begun[use]

    def ask(self, question: Callable[[], Answer]) -> Answer | None:
        """What torch answers; None where it must not be asked now."""
        with self._lock:
            for use, asked in tuple(self._begun.items()):
                if use.inside:
                    self._begun[use] = asked + 1
                else:
                    del self._begun[use]
            return question() if all(asked > _ASKED for asked in self._begun.values()) else None
