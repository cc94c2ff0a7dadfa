"""Messages between two ranks on shared memory: who moves them, and when.

All pending deliveries of a rank advance together: one pass over them does whatever can be done now. A rank that waits
makes the passes itself; while nobody waits, a thread does. Between passes it sleeps until a peer rings its bell.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import final

from lockstep.comm.background import Background
from lockstep.comm.op import CommOp, Work
from lockstep.comm.shm.announcement import DTYPE_CODES
from lockstep.comm.shm.channel import Channel, Letter
from lockstep.comm.shm.control import Control
from lockstep.comm.shm.post import Post
from lockstep.comm.shm.waiting import yield_core
from lockstep.comm.transport import blamed_on
from lockstep.comm.turn import Turn
from lockstep.errors import CollectiveTimeout, CommError, TransportClosed

_SLICE_S = 0.2  # sleepers look this often whether their partners still live
_SPINS = 30  # passes without success before sleeping, some 100 us


@final
class Message(Work):
    """One send or receive, and how far it has come."""

    def __init__(self, mail: Mail, op: CommOp, owner: object) -> None:
        self.op = op
        self.tensor = (op.inputs or op.outputs)[0]
        self.address = self.tensor.data_ptr()
        self.nbytes = self.tensor.nbytes
        self.dtype = DTYPE_CODES[self.tensor.dtype]
        self.moved = 0  # bytes that went over the belt
        self.letter: tuple[Channel, Letter] | None = None  # the one it has written or opened, and where
        self.source: int | None = None  # of a receive: the rank whose letter it opened
        self.deadline = math.inf  # on the monotonic clock, once somebody waits
        self.limit_s = math.inf
        self.done = False
        self.error: CommError | None = None
        self.owner = owner  # alive until it has ended
        self._mail = mail

    def end(self, error: CommError | None = None) -> None:
        """It is over, well or badly."""
        self.error = error
        self.done = True
        self.owner = None

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.done:
            self._mail.finish(self, timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done

    def source_rank(self) -> int | None:
        return self.source if self.op.kind == "recv" and self.op.peer is None else None


@final
class Mail:
    """The messages of one rank of one group."""

    def __init__(self, post: Post, control: Control, timeout_s: float, name: str) -> None:
        self.timeout_s = timeout_s
        self._closing = False
        self._post = post
        self._control = control
        self._pending: list[Message] = []  # in order of submission; changed by whoever has the turn, grown by `submit`
        self._turn = Turn()
        self._waiters = 0
        self._count = threading.Lock()  # of the waiters
        self._background = Background(self, Mail._serve, name)

    def submit(self, op: CommOp, owner: object) -> Message:
        """Begin a send or a receive. `owner` is kept alive until it has ended."""
        message = Message(self, op, owner)
        refusal = self._control.attendance.refusal(op)
        if refusal is not None:
            message.end(blamed_on(self._control.patience.aborted, refusal))
            return message
        self._pending.append(message)
        if op.async_op:
            try:
                if self._turn.take(message.is_done, 0.0):  # what can go now goes now
                    self._pass()
                else:
                    self._control.ring(self._control.rank)  # whoever has the turn looks again
            finally:
                self._turn.give()
            if not message.done:
                self._background.call(True)
        return message

    def finish(self, message: Message, timeout_s: float | None) -> None:
        """Return when `message` has ended, moving whatever can be moved meanwhile."""
        owner = message.owner  # not let go before the turn is given back: its end closes this
        message.limit_s = self.timeout_s if timeout_s is None else timeout_s
        message.deadline = time.monotonic() + message.limit_s  # whoever has the turn obeys it
        with self._count:
            self._waiters += 1
        try:
            self._control.ring(self._control.rank)  # the thread, if it sleeps, leaves the turn to this one
            while not message.done:
                try:
                    if self._turn.take(message.is_done, _SLICE_S):
                        while not message.done:
                            self._advance(lambda: message.done or self._closing, _SPINS)
                finally:
                    self._turn.give()
        finally:
            with self._count:
                self._waiters -= 1
            if any(waiting.op.async_op for waiting in self._pending):
                self._background.call(True)
        del owner

    def close(self) -> None:
        """End the thread, and what is pending with TransportClosed."""
        self._closing = True
        self._control.ring(self._control.rank)
        self._turn.give()  # an interrupt may have kept it here, and the thread would wait for it
        self._background.close()
        try:
            while not self._turn.take(lambda: False, _SLICE_S):
                self._control.ring(self._control.rank)
            for message in tuple(self._pending):
                self._abandon(message, self._closed(message.op))
            self._forget_ended()
        finally:
            self._turn.give()

    def _serve(self, _: bool) -> None:
        """What the thread does: pass until nothing is pending or somebody waits and does it himself."""
        owner = next((message.owner for message in tuple(self._pending)), None)  # as in `finish`
        while not self._is_unneeded():
            try:
                if self._turn.take(self._is_unneeded, _SLICE_S):
                    while not self._is_unneeded():
                        self._advance(self._is_unneeded, spins=0)
            finally:
                self._turn.give()
        del owner

    def _is_unneeded(self) -> bool:
        return self._waiters > 0 or self._closing or not self._pending

    def _is_aborted(self) -> bool:
        return self._control.patience.aborted is not None

    # ------------------------------------------------------------------ with the turn

    def _advance(self, enough: Callable[[], bool], spins: int) -> None:
        """Pass until something ended, at most one slice long; then look whether the awaited still live."""
        for _ in range(spins):
            if self._pass() or enough():
                break
            yield_core()
        else:
            now = time.monotonic()
            longest_s = min([_SLICE_S, *(message.deadline - now for message in tuple(self._pending))])
            if not self._control.sleep_until_rung(self._pass, lambda: enough() or self._is_aborted(), longest_s):
                self._look_around()
        self._give_up_the_late()

    def _look_around(self) -> None:
        for message in tuple(self._pending):
            end = self._post.end_of_peer(message)
            if end is not None:
                self._pass()  # what it said before it left counts
                if not message.done:
                    self._abandon(message, self._control.attendance.lost(message.op, *end))
        self._forget_ended()

    def _give_up_the_late(self) -> None:
        now = time.monotonic()
        for message in tuple(self._pending):
            if self._closing:
                self._abandon(message, self._closed(message.op))
            elif self._is_aborted():
                where = self._control.attendance.where(message.op)
                self._abandon(message, CommError(f"{where}: aborted on this rank"))
            elif now > message.deadline:
                self._abandon(message, self._late(message))
        self._forget_ended()

    def _pass(self) -> bool:
        """Move what can be moved; True where something ended."""
        self._post.advance(tuple(self._pending))
        return self._forget_ended()

    def _forget_ended(self) -> bool:
        """Take what has ended off the list; True where there was any. `submit` may append meanwhile."""
        ended = [message for message in self._pending if message.done]
        for message in ended:
            self._pending.remove(message)
        if ended:
            self._turn.tell()
        return bool(ended)

    def _abandon(self, message: Message, error: CommError) -> None:
        """End a message that will not arrive. The tensor is the caller's again, so nobody may touch it after this."""
        if not self._post.withdraw(message):
            self._control.fail(error, message.op)  # the other side is in the middle of it
        message.end(blamed_on(self._control.patience.aborted, error))

    def _late(self, message: Message) -> CollectiveTimeout:
        op = message.op
        who = "any rank" if op.peer is None else f"rank {op.peer}"
        did, do = ("nothing came from", "send") if op.kind == "recv" else ("it was not taken by", "receive")
        return CollectiveTimeout(
            f"{self._control.attendance.where(op)}: {did} {who} within {message.limit_s:g} s. "
            f"Next: find why {who} did not {do} with tag {op.tag}; if it is only slow, raise timeout_s",
            () if op.peer is None else (op.peer,),
        )

    def _closed(self, op: CommOp) -> TransportClosed:
        return TransportClosed(f"{self._control.attendance.where(op)}: this communicator was closed on this rank")
