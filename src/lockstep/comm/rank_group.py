"""The ranks of one group: who they are, which memory they have together, messages between two, and until when."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.comm.op import CommOp, Kind, ThenWork, Work
from lockstep.comm.operands import check_numel, check_tag, check_tensors, dense, in_place, other_rank
from lockstep.comm.place import Place
from lockstep.comm.pulse import open_pulse
from lockstep.comm.transport import Transport
from lockstep.errors import ConfigError, TransportClosed

if TYPE_CHECKING:
    from typing_extensions import Self


class RankGroup(abc.ABC):  # noqa: B024 (it is complete, but users want a Communicator)
    """This rank's place among the others: what a Communicator has that needs no third rank.

    Messages from one rank to another with the same tag arrive in the order they were sent. It lasts until `close`, or
    the end of a `with`.
    """

    _messages = 0  # so many were begun

    def __init__(self, transport: Transport, name: str = "world") -> None:
        self.transport = transport
        self.name = name
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.global_ranks = transport.global_ranks  # rank in this group -> rank in the job
        self.device = transport.device  # where this rank's tensors are expected
        self.timeout_s = transport.timeout_s  # limit of every operation that names no other
        self.place: Place | None = None  # where init() found this process; None for groups made otherwise
        self.forget: Callable[[Any], object] = lambda _: None  # told of the end, by whoever lists this one
        self._pulse = open_pulse(os.environ)  # so that a launcher sees whether this rank gets on
        self._closed = False

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}"
        return f"<{type(self).__name__} {self.name!r}: {place}, {self.transport.name}, {self.device}>"

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor [numel] where this group's operations need the fewest copies, with whatever values were there.

        Between ranks of one host it lies in memory that all see. A tensor like any other, also for other groups.
        Not collective. Memory: given back with the last reference to its storage.
        """
        check_numel("empty", numel)
        return self.transport.empty(numel, dtype)

    def shared(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """One tensor [numel] of zeros that all ranks see: what one writes, the others read after the next collective.

        None, on every rank alike, where ranks cannot share memory or there is no room for it. Do not pass it to a
        collective as what each rank has for itself: it is the same on all. Collective.
        Memory: given back when no rank refers to its storage any more; a rank that keeps it keeps it for all.
        Raises: CollectiveMismatch, where ranks ask for different tensors.
        """
        self._begin("shared")
        check_numel("shared", numel)
        if self.world_size == 1:
            with torch.inference_mode(False):  # like what the transports make: for use in every mode
                return torch.zeros(numel, dtype=dtype, device=self.device)
        return self.transport.shared(numel, dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what this communicator holds. Not collective; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.transport.close()
            self.forget(self)

    # ------------------------------------------------------------------ messages between two ranks

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, label: str = "") -> Work:
        """Send `tensor` to rank `dst`; returns when the tensor may be changed again.

        tag: the receive with the same one takes it. NCCL knows none and no receive from any rank: ConfigError there.
        """
        work = self.transport.submit(self.send_op(tensor, dst, tag, label=label)._replace(async_op=False))
        work.wait()
        return work

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0, *, label: str = "") -> Work:
        """Receive into `tensor` from rank `src`, or from any rank (`Work.source_rank()` then tells which)."""
        work = self._receive(tensor, src, tag, label, async_op=False)
        work.wait()
        return work

    def isend(self, tensor: Tensor, dst: int, tag: int = 0, *, label: str = "") -> Work:
        """`send` without waiting. `tensor` must not change before `Work.wait()` has returned."""
        return self.transport.submit(self.send_op(tensor, dst, tag, label=label))

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0, *, label: str = "") -> Work:
        """`recv` without waiting."""
        return self._receive(tensor, src, tag, label, async_op=True)

    def send_op(self, tensor: Tensor, dst: int, tag: int = 0, *, label: str = "") -> CommOp:
        """A send for `batch_send_recv`."""
        peer = other_rank(self, "dst", dst, tag)
        return self._message("send", inputs=(dense(tensor),), peer=peer, tag=tag, label=label)

    def recv_op(self, tensor: Tensor, src: int, tag: int = 0, *, label: str = "") -> CommOp:
        """A receive for `batch_send_recv`; `tensor` must be contiguous."""
        check_tensors(tensor)
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():  # there is no `wait` that would copy back
            raise ConfigError("recv_op needs a contiguous tensor, not conjugated: receive into a buffer and copy it")
        return self._recv_op(tensor, src, tag, label)[0]

    def batch_send_recv(self, ops: Sequence[CommOp], *, async_op: bool = False) -> Work:
        """Start several messages together, so that no order of them can deadlock (`send_op`, `recv_op` make them)."""
        if not ops:
            raise ConfigError("batch_send_recv needs at least one send_op or recv_op")
        for op in ops:
            if not isinstance(op, CommOp) or op.kind not in ("send", "recv"):
                raise ConfigError(f"batch_send_recv takes what send_op and recv_op return, not {op!r}")
        parts = tuple(op._replace(async_op=async_op) for op in ops)
        work = self.transport.submit(self._message("batch_send_recv", parts=parts, async_op=async_op))
        if not async_op:
            work.wait()
        return work

    def _receive(self, tensor: Tensor, src: int | None, tag: int, label: str, async_op: bool) -> Work:
        op, copy_back = self._recv_op(tensor, src, tag, label)
        work = self.transport.submit(op._replace(async_op=async_op))
        return work if copy_back is None else ThenWork(work, copy_back)

    def _recv_op(
        self, tensor: Tensor, src: int | None, tag: int, label: str
    ) -> tuple[CommOp, Callable[[], object] | None]:
        if src is None and self.world_size == 1:
            raise ConfigError(f"recv from any rank: {self.name!r} has one rank, so no message can come")
        check_tag(tag)
        peer = None if src is None else other_rank(self, "src", src, tag)
        flat, copy_back = in_place(tensor)
        return self._message("recv", outputs=(flat,), peer=peer, tag=tag, label=label), copy_back

    def _message(self, kind: Kind, **fields: Any) -> CommOp:
        self._begin(kind)
        op = CommOp(self._messages, kind, **fields)
        self._messages += 1
        return op

    def _begin(self, kind: str) -> None:
        """An operation begins on this rank. Raises: TransportClosed after the end."""
        if self._closed:
            raise TransportClosed(f"{kind} on a closed communicator ({self.name!r}, rank {self.rank})")
        self._pulse.beat()
