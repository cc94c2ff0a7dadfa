"""Messages between two ranks of a group: what a Communicator has that no third rank takes part in."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lockstep.comm.op import CommOp, Kind, ThenWork, Work
from lockstep.comm.operands import check_tag, check_tensors, dense, in_place, other_rank
from lockstep.comm.rank_group import RankGroup
from lockstep.errors import ConfigError


class PointToPoint(RankGroup, abc.ABC):
    """Sends and receives. Messages from one rank to another with the same tag arrive in the order they were sent."""

    _messages = 0  # so many were begun

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, label: str = "") -> Work:
        """Send `tensor` to rank `dst`; returns when the tensor may be changed again."""
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
