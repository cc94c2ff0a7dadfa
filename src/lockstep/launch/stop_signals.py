"""Signals that reach the launcher: remembered, and made visible to whoever waits for files."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import TypeVar, final

from lockstep.comm.preflight import Aside
from lockstep.launch.processes import wait_for
from lockstep.launch.worker import INTERRUPTED, stop_signals

T = TypeVar("T")

STARTING = "stopped while the processes were starting"
_LOOK_S = 0.1  # while something goes on aside


@contextmanager
def leaving_at_once() -> Iterator[tuple[Callable[[], None], ExitStack]]:
    """Within, a signal that asks to stop ends this process with a sentence: imports meet C++, and no exception is safe.

    Yields what is called when the exit code is known: from then on such signals change nothing, nor do they after it;
    and a stack for what has to be put away, also by such an end.
    """
    is_settled, stack = False, ExitStack()

    def leave(number: int, frame: FrameType | None) -> None:
        if not is_settled:
            with suppress(OSError):  # a terminal that was closed
                os.write(2, f"lockstep: {STARTING}\n".encode())
            stack.close()
            os._exit(INTERRUPTED)

    def settle() -> None:
        nonlocal is_settled
        is_settled = True

    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in stop_signals() if (handler := signal.getsignal(number)) in defaults}
    for number in before:
        signal.signal(number, leave)
    after = before
    try:
        with stack:
            yield settle, stack
        after = dict.fromkeys(before, signal.SIG_IGN)
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)


class StoppedEarly(Exception):
    """A signal has asked to stop before there were workers that could be asked."""


@final
class StopSignals:
    """The signals that have asked the launcher to stop, while it is entered; two mean that the user will not wait.

    A Ctrl-C at the terminal comes here only: workers have sessions of their own.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self.arrived: list[int] = []

    def __enter__(self) -> StopSignals:
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        handlers = {**dict.fromkeys(self._numbers, self._on_signal), signal.SIGCHLD: lambda *_: None}  # for the wakeup
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reading.close()
        self._writing.close()

    @property
    def count(self) -> int:
        """How many have arrived."""
        return len(self.arrived)

    def wait_aside(self, call: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """What `call` returns or raises, from a thread of its own, as C++ hears no signals.

        meanwhile: called several times a second. Raises: StoppedEarly when a signal has arrived; the call stays behind.
        """
        aside = Aside(call)
        while not aside.is_done(_LOOK_S):
            self._raise_if_arrived()
            meanwhile()
        return aside.result()

    def wait(self, descriptors: Sequence[int], timeout_s: float | None) -> list[int]:
        """Until one of `descriptors` can be read, a signal arrives, a child ends, or `timeout_s` is over; which."""
        own = self._reading.fileno()
        ready = wait_for([*descriptors, own], timeout_s)
        if own in ready:
            self._reading.recv(4096)
        return [descriptor for descriptor in ready if descriptor != own]

    def wait_for_one(self, descriptor: int, limit_s: float) -> bool:
        """True when `descriptor` can be read, False after `limit_s`. Raises: StoppedEarly when a signal has arrived."""
        deadline = time.monotonic() + limit_s
        while True:
            self._raise_if_arrived()
            left_s = deadline - time.monotonic()
            if self.wait([descriptor], max(0.0, left_s)):
                return True
            if left_s <= 0:
                return False

    def _raise_if_arrived(self) -> None:
        if self.arrived:
            raise StoppedEarly

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(number)
