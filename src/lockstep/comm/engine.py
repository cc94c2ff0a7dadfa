"""Runs the operations of one communicator in the order of their submission.

Whoever needs the result does the work: a blocking call runs in the thread that waits for it, with nothing handed over.
What was submitted asynchronously is run by a thread of the engine's own, which is started for the first of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from lockstep.comm.background import Background
from lockstep.comm.op import CommOp, Work, describe
from lockstep.comm.transport import blamed_on
from lockstep.comm.turn import Turn
from lockstep.errors import CommError, TransportClosed

_LONGEST_S = threading.TIMEOUT_MAX
_AGAIN_S = 0.1  # an operation that was asked to give up and has not is asked again


@final
@dataclass(slots=True, eq=False)
class Patience:
    """How the operation that runs now may wait. Another thread may shorten it."""

    spins: bool = False  # worth looking again and again before sleeping: nobody else wants this core
    seconds: float = 0.0  # the limit, for messages
    deadline: float = 0.0  # on the monotonic clock
    closing: bool = False
    aborted: CommError | None = None  # what everything fails with from now on
    _op: CommOp | None = None  # what runs now
    _given_up: CommOp | None = None

    def begin(self, op: CommOp, seconds: float, spins: bool) -> None:
        """An operation begins and may take this long."""
        self._op = op
        self.spins = spins
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def end(self) -> None:
        """It has ended."""
        self._op = self._given_up = None

    def give_up(self, seconds: float) -> None:
        """Somebody's `seconds` are over: let the operation under way end at its next look, and no later one."""
        self.seconds = seconds
        self._given_up = self._op

    def check_open(self, where: str) -> None:
        """Raises: TransportClosed where this rank has closed the group, CommError where it was aborted."""
        if self.closing:
            raise TransportClosed(f"{where}: this communicator was closed on this rank")
        if self.aborted is not None:
            raise CommError(f"{where}: aborted on this rank")

    def is_busy(self) -> bool:
        """Whether an operation is under way."""
        return self._op is not None

    def is_over(self) -> bool:
        """Whether the operation under way must give up."""
        has_given_up = self._given_up is not None and self._given_up is self._op
        return has_given_up or self.aborted is not None or time.monotonic() > self.deadline


@final
class Engine:
    """A queue of operations, and the turn to run the next one.

    `execute(op)` carries out one operation and blocks; it obeys `patience` and raises CommError. It must not refer to
    whatever owns the engine, so that an owner nobody holds any more can end the thread.
    """

    def __init__(self, execute: Callable[[CommOp], None], patience: Patience, timeout_s: float, name: str) -> None:
        self.patience = patience
        self.timeout_s = timeout_s
        self._execute = execute
        self._queue: deque[EngineWork] = deque()
        self._turn = Turn()
        self._background = Background(self, Engine._run_until, name)

    def submit(self, op: CommOp, owner: object = None) -> EngineWork:
        """Put `op` behind all that was submitted before. `owner` is kept alive until it has ended."""
        work = EngineWork(self, op, owner)
        self._queue.append(work)
        if op.async_op:
            self._background.call(work)
        return work

    def finish(self, work: EngineWork, timeout_s: float | None, spins: bool = True) -> None:
        """Return when `work` has ended: run what stands before it and itself, unless another thread does already.

        After `timeout_s` the operation under way gives up, which may be an earlier one: nothing overtakes it.
        """
        owner = work.owner  # not let go before the turn is given back: its end may close this engine
        seconds = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + seconds
        while not work.done:
            try:
                left_s = min(max(deadline - time.monotonic(), 0.0), _LONGEST_S)
                if self._turn.take(work.is_done, left_s):
                    while not work.done:
                        self._run_next(seconds, spins)
                elif not work.done:
                    self.patience.give_up(seconds)
                    deadline = time.monotonic() + _AGAIN_S
            finally:
                self._turn.give()
        del owner

    def close(self) -> None:
        """End the thread. What has not begun fails; what is under way gives up at its next look."""
        self.patience.closing = True
        self._turn.give()  # an interrupt may have kept it here, and the thread would wait for it
        self._background.close()
        for work in tuple(self._queue):
            self.finish(work, 0.0, spins=False)

    def is_mid_operation(self) -> bool:
        """Whether this very thread is in the middle of an operation, below the caller."""
        return self._turn.is_mine() and self.patience.is_busy()

    def _run_until(self, work: EngineWork) -> None:
        """What the thread does."""
        self.finish(work, None, spins=False)

    def _run_next(self, seconds: float, spins: bool) -> None:
        work = self._queue[0]
        op = work.op
        assert op is not None
        try:
            self.patience.begin(op, seconds, spins)
            if self.patience.closing or self.patience.aborted is not None:
                self.patience.check_open(describe(op))
            self._execute(op)
        except CommError as error:
            work.error = blamed_on(self.patience.aborted, error)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything; whoever waits is told
            own = CommError(f"{describe(op)}: {error}")
            own.__cause__ = error
            work.error = blamed_on(self.patience.aborted, own)
        except BaseException as error:
            work.error = CommError(f"{describe(op)}: interrupted by {type(error).__name__}")
            raise
        finally:
            self.patience.end()
            self._queue.popleft()
            work.end()
            self._turn.tell()


@final
class EngineWork(Work):
    """One operation in the queue."""

    def __init__(self, engine: Engine, op: CommOp, owner: object) -> None:
        self.op: CommOp | None = op  # None once it has ended: the tensors are the caller's again
        self.done = False
        self.ended_ns = 0
        self.error: CommError | None = None
        self._engine = engine
        self.owner = owner

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.done:
            self._engine.finish(self, timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done

    def end(self) -> None:
        """The operation has ended, well or badly. Called by whoever ran it."""
        if self.op is not None and self.op.async_op:  # of others whoever waits for it knows when
            self.ended_ns = time.monotonic_ns()
        self.op = None
        self.owner = None
        self.done = True
