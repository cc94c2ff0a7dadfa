"""Signals that reach the launcher: remembered, and made visible to whoever waits for files."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import final

from lockstep.launch.processes import wait_for
from lockstep.launch.worker import INTERRUPTED


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Within, Ctrl-C ends this process without a word: for imports, in which an exception may meet C++ anywhere."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or somebody's own
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
        self._before = {number: signal.signal(number, self._on_signal) for number in self._numbers}
        self._before[signal.SIGCHLD] = signal.signal(
            signal.SIGCHLD, self._on_child
        )  # never SIG_IGN: ends would be lost
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

    def wait(self, descriptors: Sequence[int], timeout_s: float | None) -> None:
        """Until one of `descriptors` can be read, a signal arrives, a child ends, or `timeout_s` is over."""
        ready = wait_for([*descriptors, self._reading.fileno()], timeout_s)
        if self._reading.fileno() in ready:
            self._reading.recv(4096)

    def wait_for_one(self, descriptor: int, limit_s: float) -> bool:
        """True when `descriptor` can be read, False after `limit_s`. Raises: StoppedEarly when a signal has arrived."""
        deadline = time.monotonic() + limit_s
        while not self.arrived:
            left_s = deadline - time.monotonic()
            ready = wait_for([descriptor, self._reading.fileno()], max(0.0, left_s))
            if self._reading.fileno() in ready:
                self._reading.recv(4096)
            if descriptor in ready or left_s <= 0:
                return descriptor in ready
        raise StoppedEarly

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(number)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        """Its number in the wakeup file is all that is wanted."""
