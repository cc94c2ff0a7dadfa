"""A lockstep `Work` in the form that torch's callers expect, with a future that is told when it ends."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lockstep.comm.background import Background
from lockstep.comm.op import Work
from lockstep.comm.operands import writing_to
from lockstep.errors import CollectiveTimeout, CommError, ConfigError

_NO_TIMEOUT = timedelta(0)
Teller = Background[Any, "GroupWork"]


def future_teller(name: str) -> Teller:
    """What waits for works in the order they came, and tells their futures.

    In a thread of its own, because what a user attaches to a future runs in the thread that completes it, and may begin
    and await another operation: the transport's own thread would then wait for itself.
    """
    return Background(GroupWork, lambda _, work: work.settle(), name)


@final
class GroupWork(dist.Work):
    """One operation of a `LockstepGroup`. Whichever thread waits first does what is left to do, the others see it."""

    def __init__(
        self, work: Work, outputs: list[Tensor], limit_s: float, teller: Teller | None, source: int = -1
    ) -> None:
        """teller: None for a message, which has no future. source: the rank that a message comes from, where known."""
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._limit_s = limit_s
        self._teller = teller
        self._source = source
        self._waiting = threading.Lock()
        self._ended = False
        self._error: CommError | None = None
        self._told: CommError | None = None  # to the future
        self._signal: Future[None] | None = None
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return when the outputs may be read. Raises: CommError, the same at each call."""
        if not self._ended:
            self._end(timeout.total_seconds() if timeout > _NO_TIMEOUT else self._limit_s)
        if self._error is not None:
            raise self._error
        return True

    def _end(self, limit_s: float) -> None:
        if not self._waiting.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
            raise CollectiveTimeout(f"not ended within {limit_s:g} s; another thread of this rank waits for it too")
        try:
            if not self._ended:
                with writing_to(self._outputs):
                    self._work.wait(limit_s)
                self._ended = True
        except CommError as error:
            self._error = error
            self._ended = True
        except RuntimeError as error:  # of what is left to do here: whoever waits for the future must hear of it too
            self._error = CommError(f"the outputs could not be filled: {error}")
            self._error.__cause__ = error
            self._ended = True
        finally:
            self._waiting.release()

    def is_completed(self) -> bool:
        """True once the outputs may be read, or the operation has failed."""
        if not self._ended and self._work.is_done():
            self._end(self._limit_s)  # what is left to do here: a copy back into strided memory, a division
        return self._ended

    def get_future(self) -> Any:
        """A future of the outputs. Its error is a RuntimeError with the text of ours: torch keeps no more of it."""
        if self._teller is None:
            raise ConfigError("a send or a receive has no future: call wait(), or poll is_completed()")
        if self._future is None:
            self._signal = Future()
            self._future = self._signal.then(self._outcome)  # so that an error reaches callers in C++ as an error
            # within a future's callback it is done here, and so it is where the thread has ended: at once
            if self._ended or self._teller.is_here() or not self._teller.call(self):
                self.settle()
        return self._future

    def settle(self) -> None:
        """Wait, and complete the future."""
        signal = self._signal
        assert signal is not None
        try:
            self.wait()
        except CommError as error:  # also one of this wait alone: the outputs are not there
            self._told = error
        signal.set_result(None)

    def _outcome(self, _: Future[None]) -> list[Tensor]:
        if self._told is not None:
            raise copy.copy(self._told)  # a fresh one: torch would put the stack of this one into its text
        return self._outputs

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def is_success(self) -> bool:
        """True once the operation has ended well."""
        return self._ended and self._error is None

    def exception(self) -> CommError | None:
        """How the operation failed, or None."""
        return self._error

    def synchronize(self) -> None:
        """`wait`: on the CPU there is no stream to order."""
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        """Of an ended receive: the rank in the group that the message came from."""
        source = self._work.source_rank()
        return self._source if source is None else source

    _source_rank = source_rank
