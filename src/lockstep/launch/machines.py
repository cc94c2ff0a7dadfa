"""What the launchers of several machines tell each other, through the store of the start that they share."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from lockstep.comm.store_calls import StoreCalls
from lockstep.launch.channel import LOST_BY, Channel
from lockstep.launch.course import Request
from lockstep.launch.ended import signal_name
from lockstep.launch.stop_signals import StopSignals
from lockstep.launch.words import say

T = TypeVar("T")

_STOP, _OVER = "stop", "over"
_ASK_S = 0.2
_NOTICE_S = 5.0
_MENDED_S = 20.0  # TCP waits as long again as a cable was cut: the connections of ranks may go on before it
_HEARD_S = 10.0  # for the others to hear of a failure, and to end their processes
_ANSWER_S = 5.0  # a store answers in milliseconds; that of a machine that was stopped never does


@final
class Machines:
    """The machines of one start. While the one that holds the store is gone or cut off, nothing is heard of the others.

    here: number of this machine. can_spare_one: the others go on without this one, as under torchrun. is_holder: of the
    store. run: a store of all starts, where each machine is needed: who stops while it joins may be counted among those
    of the next start.
    No method is blocked for longer than 5 s by what became of another machine; a signal cuts that short.
    """

    def __init__(
        self,
        store: Any,
        signals: StopSignals,
        here: int,
        count: int,
        *,
        can_spare_one: bool = False,
        is_holder: bool = False,
        run: Any = None,
    ) -> None:
        self._channel = Channel(store, "lockstep")
        self._stops = self._channel if run is None else Channel(run, "lockstep")
        self._signals = signals
        self._here, self._count = here, count
        self._calls = StoreCalls(*LOST_BY)
        self.can_spare_one, self._is_holder = can_spare_one, is_holder and not can_spare_one

    def tell_stop(self, number: int) -> None:
        """Ask the others to stop, by signal `number`, unless one has; where they cannot go on without this machine."""
        if not self.can_spare_one:
            asked = [number, socket.gethostname()]
            self.ask(lambda: self._stops.missing([_STOP], 0) and self._stops.put(_STOP, asked), None)

    def told_stop(self) -> Request | None:
        """What another machine has asked of all."""

        def look() -> Request | None:
            if self._stops.missing([_STOP], 0):
                return None
            number, host = self._stops.read(_STOP)
            return Request(number, f"{host} was asked to stop by {signal_name(number)}: stopping")

        return self.ask(look, None)

    def give_up(self, why: str) -> None:
        """The run has failed here: `why`. The others, where they cannot go on without this machine, end by it too."""
        if not self.can_spare_one:
            self.ask(lambda: self._channel.missing([_OVER], 0) and self._channel.put(_OVER, why), None)

    def given_up(self) -> str:
        """How the run has failed on another machine, without which this one cannot go on; else ""."""
        return self.ask(lambda: "" if self._channel.missing([_OVER], 0) else str(self._channel.read(_OVER)), "")

    def meet(self, committed: int, limit_s: float, *, has_failed: bool = False) -> int:
        """Wait until the run is over on all machines, for at most `limit_s`, or until a user will not wait.

        has_failed: here. Once it has on any machine, only who holds the store waits, for the others to hear of that.
        Returns: the largest `committed` of those that came.
        """
        begun_s, patience = time.monotonic(), max(self._signals.count, 1)
        ended, has_said = [committed], False
        while not self._calls.is_lost and self._signals.count <= patience:
            self.ask(lambda: self._channel.put(f"ended/{self._here}", committed), None)
            ended = self.ask(lambda: self._channel.read_all("ended", self._count), ended)
            if len(ended) == self._count:
                self.linger()
                break
            passed_s = time.monotonic() - begun_s
            if not has_failed and (why := self.given_up()):
                has_failed, limit_s = True, min(limit_s, passed_s + _HEARD_S)
                say(f"all was done here; elsewhere {why}")
            if has_failed and not self._is_holder:
                self.linger()
                break
            if passed_s >= (min(limit_s, _MENDED_S) if self.is_mute else limit_s):
                break
            if not has_said and passed_s > _NOTICE_S:
                has_said = True
                say(f"all is done here; waiting for the end on the other machines, up to {limit_s:g} s")
            self.wait(_ASK_S)
        return max(ended)

    def linger(self) -> None:
        """The others see what was said here last before the store has gone, if it is on this machine."""
        self.wait(3 * _ASK_S)

    def ask(self, call: Callable[[], T], default: T) -> T:
        """What `call`, of the store, returns; `default` where no answer comes, or a signal comes first.

        Torch's rendezvous and the ranks find out what became of the machine that held the store, and say it.
        """
        count = self._signals.count
        limit_s = _ANSWER_S if count < 2 else _ASK_S  # two: the user will not wait
        return self._calls.ask(call, default, limit_s, lambda: self._signals.count > count)

    @property
    def is_mute(self) -> bool:
        """Nothing can be heard of the others, now or any more."""
        return self._calls.is_mute

    def wait(self, seconds: float) -> None:
        """For so long, or until the next signal that asks to stop."""
        end, count = time.monotonic() + seconds, self._signals.count
        while self._signals.count == count and (left_s := end - time.monotonic()) > 0:
            self._signals.wait([], left_s)
