"""Runs the operations of one communicator in the order of their submission.

Whoever needs the result does the work: a blocking call runs in the thread that waits for it, with nothing handed over.
What was submitted asynchronously is run by a thread of the engine's own, which is started for the first of them.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import final

from lockstep.comm.op import CommOp, Work, describe
from lockstep.errors import CommError, TransportClosed

_SLICE_S = 0.2  # who waits for the turn looks this often whether it needs it still


@final
class Patience:
    """How the operation that runs now may wait. Another thread may shorten it."""

    __slots__ = ("closing", "deadline", "seconds", "spins")

    def __init__(self) -> None:
        self.spins = False  # worth looking again and again before sleeping: nobody else wants this core
        self.seconds = 0.0  # the limit, for messages
        self.deadline = 0.0  # on the monotonic clock
        self.closing = False

    def begin(self, seconds: float, spins: bool) -> None:
        """An operation begins and may take this long."""
        self.spins = spins
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def end(self, seconds: float) -> None:
        """Let the operation under way give up at its next look at the clock: somebody's `seconds` are over."""
        self.seconds = seconds
        self.deadline = 0.0


@final
class Engine:
    """A queue of operations and the turn to run the next one.

    `execute(op)` carries out one operation and blocks; it obeys `patience` and raises CommError. It must not refer to
    whatever owns the engine, so that an owner nobody holds any more can end the thread.
    """

    def __init__(self, execute: Callable[[CommOp], None], patience: Patience, timeout_s: float, name: str) -> None:
        self.patience = patience
        self.timeout_s = timeout_s
        self._execute = execute
        self._name = name
        self._queue: deque[EngineWork] = deque()
        self._turn = threading.Lock()  # whoever holds it runs operations
        self._for_thread: queue.SimpleQueue[EngineWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, op: CommOp) -> EngineWork:
        """Put `op` behind all that was submitted before."""
        work = EngineWork(self, op)
        self._queue.append(work)
        if op.async_op:
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name=self._name, daemon=True)
                self._thread.start()
            self._for_thread.put(work)
        return work

    def finish(self, work: EngineWork, timeout_s: float | None) -> None:
        """Return when `work` has ended: run what stands before it and itself, unless the thread does already."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + seconds
        while not self._turn.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), _SLICE_S)):
            if work.done:
                return
            if time.monotonic() > deadline:
                self.patience.end(seconds)
        try:
            while not work.done:
                self._run_next(seconds, spins=True)
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the thread. What has not begun fails; what is under way gives up at its next look."""
        self.patience.closing = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._for_thread.put(None)
            if thread is not threading.current_thread():
                thread.join()
        with self._turn:
            while self._queue:
                work = self._queue.popleft()
                assert work.op is not None
                work.error = TransportClosed(f"{describe(work.op)}: this communicator was closed on this rank")
                work.end()

    def _run_next(self, seconds: float, spins: bool) -> None:
        work = self._queue.popleft()
        op = work.op
        assert op is not None
        self.patience.begin(seconds, spins)
        try:
            self._execute(op)
        except CommError as error:
            work.error = error
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything; whoever waits is told
            work.error = CommError(f"{describe(op)}: {error}")
            work.error.__cause__ = error
        except BaseException as error:
            work.error = CommError(f"{describe(op)}: interrupted by {type(error).__name__}")
            raise
        finally:
            work.end()

    def _serve_one(self, work: EngineWork) -> None:
        with self._turn:
            while not work.done:
                self._run_next(self.timeout_s, spins=False)


def _serve(ref: weakref.ref[Engine]) -> None:
    """The thread: it holds the engine only while there is something to run."""
    engine = ref()
    signals = None if engine is None else engine._for_thread
    del engine
    while signals is not None and (work := signals.get()) is not None:
        engine = ref()
        if engine is None:
            return
        engine._serve_one(work)
        del engine, work


@final
class EngineWork(Work):
    """One operation in the queue."""

    __slots__ = ("_engine", "done", "error", "op")

    def __init__(self, engine: Engine, op: CommOp) -> None:
        self.op: CommOp | None = op  # None once it has ended: the tensors are the caller's again
        self.done = False
        self.error: CommError | None = None
        self._engine = engine

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.done:
            self._engine.finish(self, timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done

    def end(self) -> None:
        """The operation has ended, well or badly. Called by whoever ran it."""
        self.op = None
        self.done = True
