"""Waiting for what torch has started, and saying in our own errors how it failed."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, final

from lockstep.comm.op import CommOp, Work, describe
from lockstep.comm.transport import blamed_on
from lockstep.errors import CollectiveTimeout, CommError, PeerLost

if TYPE_CHECKING:
    from lockstep.comm.torch_transport import TorchTransport

_SLICE = timedelta(seconds=1)  # a wait returns to Python this often, so that Ctrl-C and SIGTERM are heard
_CLOSED_HERE = ("pair closure",)
_LOST = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "remote process")
_LATE = ("imed out", "imeout")


class Pending(Protocol):
    """What is used here of torch's `Work`."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...

    def _source_rank(self) -> int: ...


def failure(transport: TorchTransport, op: CommOp, error: RuntimeError, limit_s: float) -> CommError:
    """The backend's error as one of ours; the caller raises it from the original."""
    text = str(error)
    place = f"{describe(op)} on rank {transport.rank} of {transport.world_size} ({transport.name})"
    if transport.aborted is not None:  # whatever the backend makes of that
        return CommError(f"{place}: was under way when this rank aborted its group")
    if any(words in text for words in _CLOSED_HERE):
        return CommError(
            f"{place}: an earlier operation timed out on this rank, which closed its connections. "
            f"Next: the cause is in the first error; end this run, or make a new communicator"
        )
    if any(words in text for words in _LOST):
        peer = 1 - transport.rank if transport.world_size == 2 else None
        who = "another rank" if peer is None else f"rank {peer}"
        return PeerLost(
            f"{place}: lost the connection to {who}. Its process ended, or it gave up: after an error, a timeout, or "
            f"because the ranks gave different sizes. "
            f"Next: read that rank's own error or exit code (signal 9 is often the out-of-memory killer)",
            peer,
        )
    if any(words in text for words in _LATE):
        return CollectiveTimeout(
            f"{place}: not every rank came within {limit_s:g} s. Next: look where the other ranks are (log, stack): "
            f"one that ended, raised, skipped this call or gave other sizes leaves the others here. If it is only "
            f"slow, raise timeout_s"
        )
    return CommError(f"{place}: {text.splitlines()[0] if text else type(error).__name__}")


def _limit(seconds: float) -> timedelta:
    """At least a millisecond: torch takes less for no limit at all."""
    return timedelta(seconds=max(seconds, 0.001))


class TorchWork(Work):
    """A torch `Work`."""

    def __init__(self, transport: TorchTransport, op: CommOp, work: Pending) -> None:
        transport.pending += 1
        self._transport = transport
        self._op = op
        self._work: Pending | None = work
        self._error: CommError | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        work = self._work
        if work is None:
            if self._error is not None:
                raise self._error
            return
        try:
            self._block(work, timeout_s)
        except RuntimeError as error:
            limit_s = self._transport.timeout_s if timeout_s is None else timeout_s
            own = failure(self._transport, self._op, error, limit_s)
            own.__cause__ = error
            self._error = blamed_on(self._transport.aborted, own)
            self._work = None  # not before there is an error: another thread may wait, too
            raise self._error from self._error.__cause__
        work, self._work = self._work, None
        if work is not None:  # else the other thread has counted it
            self._transport.pending -= 1

    @abc.abstractmethod
    def _block(self, work: Pending, timeout_s: float | None) -> None:
        """Wait for the end. Raises: RuntimeError, the backend's own."""

    def is_done(self) -> bool:
        work = self._work
        return work is None or work.is_completed()


@final
class NcclWork(TorchWork):
    """An operation on a GPU: `wait` orders the current stream after it, and blocks only where a limit is given."""

    def _block(self, work: Pending, timeout_s: float | None) -> None:
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))


@final
class GlooWork(TorchWork):
    """A collective on CPU: blocks in slices, so that a signal is heard and the limit holds for the whole wait."""

    def _block(self, work: Pending, timeout_s: float | None) -> None:
        limit_s = self._transport.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        slice_ = _SLICE if limit_s > 1 else _limit(limit_s)
        while True:
            try:
                work.wait(slice_)
                return
            except RuntimeError as error:
                left = deadline - time.monotonic()
                if "Operation timed out!" not in str(error) or left <= 0 or self._transport.aborted is not None:
                    raise
                slice_ = min(_SLICE, _limit(left))


@final
class GlooMessage(TorchWork):
    """A send or receive on CPU. Gloo only learns of its end by waiting, so `is_done` sets a thread to wait."""

    def __init__(self, transport: TorchTransport, op: CommOp, work: Pending) -> None:
        super().__init__(transport, op, work)
        self._waiter: threading.Thread | None = None
        self._source: int | None = None

    def _block(self, work: Pending, timeout_s: float | None) -> None:
        work.wait(_limit(self._transport.timeout_s if timeout_s is None else timeout_s))
        if self._op.kind == "recv" and self._op.peer is None:
            self._source = work._source_rank()

    def wait(self, timeout_s: float | None = None) -> None:
        if self._waiter is not None:
            self._waiter.join(timeout_s)
            if self._waiter.is_alive():
                assert timeout_s is not None
                raise failure(self._transport, self._op, RuntimeError("timed out"), timeout_s)
        super().wait(timeout_s)

    def is_done(self) -> bool:
        if self._work is None:
            return True
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait_aside, name="lockstep-message", daemon=True)
            self._waiter.start()
        return not self._waiter.is_alive()

    def _wait_aside(self) -> None:
        with contextlib.suppress(CommError):  # kept: `wait` raises it
            super().wait()

    def source_rank(self) -> int | None:
        return self._source
