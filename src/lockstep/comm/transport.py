"""The one seam: every byte between ranks passes through `Transport.submit`.

A transport moves bytes. A layer is a transport that holds a transport: it sees every operation, may time, check,
record, delay or refuse it, and passes it on. A stack of layers over one transport is again a transport.
"""

from __future__ import annotations

import abc
import copy
import threading
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from lockstep.comm.op import CommOp, Work
from lockstep.errors import CommError, TransportClosed


class Transport(abc.ABC):
    """Moves the tensors of one group of ranks.

    Order: collectives are matched between ranks in the order of submission; so are messages with equal (peer, tag).
    Threads: one thread submits at a time; `Work.wait` may be called from any.
    """

    name: str  # "gloo", "nccl", "threads", ...
    rank: int  # within this group
    world_size: int
    global_ranks: tuple[int, ...]  # rank in this group -> rank in the job
    device: torch.device  # where this rank's tensors are expected
    timeout_s: float  # limit of every operation that names no other

    def stand_where(self, other: Transport) -> None:
        """Have the place of this rank in `other`, its device and its limit."""
        self.rank, self.world_size, self.global_ranks = other.rank, other.world_size, other.global_ranks
        self.device, self.timeout_s = other.device, other.timeout_s

    @abc.abstractmethod
    def submit(self, op: CommOp) -> Work:
        """Start `op` and return at once; never raises for what only the other ranks can cause (that is `Work.wait`)."""

    @abc.abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        """A transport for the one of `groups` that holds this rank; None where none does.

        `groups` are disjoint lists of ranks of this group. Collective: every rank of it, with the same `groups`.
        """

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor [numel] that this transport moves with the fewest copies; its values are whatever was there.

        Not collective. Memory: as long as the tensor, or anything that shares its storage, is referred to.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """One tensor [numel] of zeros, the same memory on all ranks; None, on all alike, where that cannot be had.

        Collective. Memory: until no rank refers to it any more.
        """
        return None

    @abc.abstractmethod
    def abort(self, error: CommError) -> None:
        """End what is under way on this rank, and let every later operation fail: all raise `error`, each its own copy.

        Sub-groups of this group share its fate; the other ranks see this one as failed. What had ended before stays
        so. From any thread and at any time, also while another one is blocked in a wait; never blocks long. A second
        call does nothing, nor does one after `close`. Not collective.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back threads, sockets and memory. A second call does nothing. Not collective."""


class TransportLayer(Transport):
    """A transport that holds a transport. Subclasses override `submit`, `over`, and `close` if they hold more."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name
        self.stand_where(inner)

    def submit(self, op: CommOp) -> Work:
        return self.inner.submit(op)

    @final
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.empty(numel, dtype)

    @final
    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.inner.shared(numel, dtype)

    @abc.abstractmethod
    def over(self, inner: Transport) -> Transport:
        """The same layer over the transport of a sub-group."""

    @final
    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        inner = self.inner.split(groups)
        return None if inner is None else self.over(inner)

    @final
    def abort(self, error: CommError) -> None:
        self.inner.abort(error)

    def close(self) -> None:
        self.inner.close()


@final
class LentTransport(TransportLayer):
    """The transport of a torch group, for the group itself and for communicators over it, also from several threads.

    Closing it closes nothing: the group does that, by its own transport, when it is destroyed.
    """

    def __init__(self, transport: Transport, owner: Any) -> None:
        super().__init__(transport)
        self._owner = weakref.ref(owner)
        self._submitting = threading.Lock()

    @property
    def process_group(self) -> Any:
        """The torch group that lends it."""
        owner = self._owner()
        if owner is None:
            raise TransportClosed(f"rank {self.rank}: the process group under this communicator was destroyed")
        return owner

    def submit(self, op: CommOp) -> Work:
        with self._submitting:
            return self.inner.submit(op)

    def over(self, inner: Transport) -> Transport:
        return inner  # a part is its maker's own

    def close(self) -> None:
        pass


def blamed_on(abort: CommError | None, error: CommError) -> CommError:
    """What to raise where an operation failed with `error`: once there was an abort, its error, from this one."""
    if abort is None:
        return error
    told = without_traceback(abort)
    told.__cause__ = error
    return told


def without_traceback(error: CommError) -> CommError:
    """`error` to be kept, or raised again: a traceback belongs to one raise, and holds what its frames hold.

    That is the model, and the transport itself, which would never be let go where it keeps the error.
    """
    return copy.copy(error)
