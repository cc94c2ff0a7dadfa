"""What the launchers of several machines tell each other, through the store of the start that they share."""

from __future__ import annotations

import _thread
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from lockstep.errors import LaunchError
from lockstep.launch.channel import Channel
from lockstep.launch.stop_signals import StopSignals

_STOP = "stop"
_ASK_S = 0.2


class Told(NamedTuple):
    """Another machine wants the run to stop."""

    number: int  # of the signal that it got
    host: str


@final
class Machines:
    """The machines of one start. Where the one that holds the store has gone, nothing is heard, and nobody waits."""

    def __init__(self, store: Any, here: int, count: int, least: int) -> None:
        self._channel = Channel(store, "lockstep")
        self._here = here  # number of this machine
        self._count = count
        self._is_lost = False  # the store
        self.can_spare_one = count > least  # the others go on without this one, as under torchrun

    def tell_stop(self, number: int) -> None:
        """Ask the others to stop, because of signal `number`, where they cannot go on without this machine."""
        if not self.can_spare_one:
            with self._noticing_loss():
                self._channel.put(_STOP, [number, socket.gethostname()])

    def told_stop(self) -> Told | None:
        """Who has asked all to stop."""
        with self._noticing_loss():
            if not self._is_lost and not self._channel.missing([_STOP], 0):
                return Told(*self._channel.read(_STOP))
        return None

    def meet(self, committed: int, limit_s: float, signals: StopSignals) -> int:
        """Wait until the run is over on all machines, for at most `limit_s`, or until a user will not wait.

        Returns: the largest `committed` of those that came.
        """
        deadline, patience = time.monotonic() + limit_s, max(signals.count, 1)
        ended = [committed]
        with self._noticing_loss():
            self._channel.put(f"ended/{self._here}", committed)
            while time.monotonic() < deadline and signals.count <= patience:
                ended = self._channel.read_all("ended", self._count)
                if len(ended) == self._count:
                    _wait(signals, 3 * _ASK_S)  # the others see it before the store has gone
                    break
                _wait(signals, _ASK_S)
        return max(ended)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, a wish of another machine to stop arrives as a SIGTERM: for a main thread that waits in torch."""
        is_over = threading.Event()

        def listen() -> None:
            while not is_over.wait(_ASK_S):
                if self.told_stop() is not None:
                    _thread.interrupt_main(signal.SIGTERM)
                    return

        thread = threading.Thread(target=listen, name="listens to other machines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Torch's rendezvous and the ranks find out what became of the machine that held the store, and say it."""
        try:
            yield
        except LaunchError:
            self._is_lost = True


def _wait(signals: StopSignals, seconds: float) -> None:
    """For so long, or until the next signal that asks to stop."""
    end, count = time.monotonic() + seconds, signals.count
    while signals.count == count and (left_s := end - time.monotonic()) > 0:
        signals.wait([], left_s)
