"""One `CommOp` as calls of a torch process group, the same for Gloo and NCCL.

Where a backend lacks a form (uneven lists, a mean, a dtype) it is built here from those it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d

from lockstep.comm.op import COLLECTIVE_TAG, AllWork, CommOp, Reduction, ThenWork, Work
from lockstep.comm.operands import as_bytes, pieces
from lockstep.comm.reduction import tree_reduce_by_blocks
from lockstep.comm.torch_work import GlooMessage, GlooWork, NcclWork
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.comm.torch_transport import TorchTransport

# What both backends move and reduce. Everything else is moved as bytes, and refused where it would have to be reduced.
_NATIVE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
)
_REDUCE_OPS: dict[Reduction, ReduceOp.RedOpType] = {
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}
_BOOL_OPS: dict[Reduction, Reduction] = {"sum": "max", "product": "min", "min": "min", "max": "max"}  # or, and
_BROADCASTS_BYTES = 1 << 20  # of all ranks: from here on an all-gather of Gloo is as many broadcasts


def make_options(
    limit: timedelta, is_nccl: bool, kind: Callable[[], Any], reduce: Reduction | None = None, root: int | None = None
) -> Any:
    """Torch's options of one kind of operation; they may be used again."""
    options = kind()
    options.timeout = limit
    if reduce is not None:
        mean = ReduceOp.AVG if is_nccl else ReduceOp.SUM
        options.reduceOp = ReduceOp(mean if reduce == "mean" else _REDUCE_OPS[reduce])
    if root is not None:
        options.rootRank = root
    return options


def _work(transport: TorchTransport, op: CommOp, work: dist.Work) -> Work:
    return (NcclWork if transport.is_nccl else GlooWork)(transport, op, work)


def _movable(tensor: Tensor) -> Tensor:
    """`tensor` as one dimension, as bytes where its dtype is unknown to the backends."""
    return tensor.detach().view(-1) if tensor.dtype in _NATIVE else as_bytes(tensor.detach())


# ------------------------------------------------------------------ messages


def _message(transport: TorchTransport, op: CommOp) -> Work:
    if not transport.is_nccl:
        return GlooMessage(transport, op, _post(transport, op))
    _check_for_nccl(op)
    return NcclWork(transport, op, _post(transport, op))


def _check_for_nccl(op: CommOp) -> None:
    """It would take a message for another one, and not say so."""
    if op.kind == "recv" and op.peer is None:
        raise ConfigError("NCCL cannot receive from any rank: name the source, recv(tensor, src)")
    if op.tag not in (0, COLLECTIVE_TAG):
        raise ConfigError(
            f"{op.kind} with tag {op.tag}: NCCL knows no tags, messages come in the order they were sent in. Receive "
            "them in that order, without a tag; or send what is small by Gloo, from the CPU"
        )


def _post(transport: TorchTransport, op: CommOp) -> dist.Work:
    if op.kind == "send":
        return transport.process_group.send([_movable(op.inputs[0])], op.partner, op.tag)
    if op.peer is None:
        return transport.process_group.recv_anysource([_movable(op.outputs[0])], op.tag)
    return transport.process_group.recv([_movable(op.outputs[0])], op.peer, op.tag)


def _batch(transport: TorchTransport, op: CommOp) -> Work:
    if not transport.is_nccl:
        return AllWork([transport.submit(part) for part in op.parts])
    for part in op.parts:
        _check_for_nccl(part)
    transport.process_group._start_coalescing(transport.device)
    for part in op.parts:
        _post(transport, part)
    return NcclWork(transport, op, transport.process_group._end_coalescing(transport.device))


# ------------------------------------------------------------------ reductions


def _reduction(transport: TorchTransport, op: CommOp) -> Reduction:
    """The reduction to ask the backend for; bools are combined by or and and, where bytes would be added."""
    reduce, dtype = op.reduction, op.inputs[0].dtype
    if dtype not in _NATIVE:
        raise ConfigError(
            f"{op.kind} of {dtype}: {transport.name} cannot compute the {reduce} of this dtype; convert it first, "
            f"to one of {', '.join(sorted(str(t) for t in _NATIVE))}"
        )
    return _BOOL_OPS[reduce] if dtype == torch.bool else reduce


def _reduced(transport: TorchTransport, op: CommOp, work: dist.Work, result: Tensor) -> Work:
    """NCCL divides the sum into a mean itself; Gloo's own mean is wrong for some kinds."""
    if op.reduce != "mean" or transport.is_nccl:
        return _work(transport, op, work)
    return ThenWork(GlooWork(transport, op, work), lambda: result.div_(transport.world_size))


def _all_reduce(transport: TorchTransport, op: CommOp) -> Work:
    tensor = op.outputs[0]
    options = transport.options(dist.AllreduceOptions, _reduction(transport, op))
    return _reduced(transport, op, transport.process_group.allreduce([tensor], options), tensor)


def _reduce(transport: TorchTransport, op: CommOp) -> Work:
    is_root = transport.rank == op.peer
    result = op.outputs[0] if is_root else op.inputs[0].clone()  # gloo writes partial sums into it
    if is_root and result is not op.inputs[0]:
        result.copy_(op.inputs[0])
    options = transport.options(dist.ReduceOptions, _reduction(transport, op), op.peer)
    work = transport.process_group.reduce([result], options)
    return _reduced(transport, op, work, result) if is_root else _work(transport, op, work)


def _reduce_scatter(transport: TorchTransport, op: CommOp) -> Work:
    """Gloo: see ExchangedSums. NCCL's own where it has one; else the same in one exchange, added on the stream."""
    reduce = _reduction(transport, op)
    if not transport.is_nccl:
        return transport.sums.start(op, partial(_exchange_parts, transport, op))
    result = op.outputs[0].view(-1)
    parts = pieces(op.inputs, transport.world_size)
    if result.dtype == parts[0].dtype and len({part.numel() for part in parts}) == 1:
        options = transport.options(dist.ReduceScatterOptions, reduce)
        if len(op.inputs) == 1:
            work = transport.process_group._reduce_scatter_base(result, op.inputs[0].view(-1), options)
        else:
            work = transport.process_group.reduce_scatter([result], [list(parts)], options)
        return NcclWork(transport, op, work)
    came = parts[0].new_empty(transport.world_size, result.numel())
    work = transport.process_group.alltoall(list(came.unbind()), list(parts), transport.options(dist.AllToAllOptions))
    return ThenWork(NcclWork(transport, op, work), partial(tree_reduce_by_blocks, result, came.unbind(), op.reduction))


def _exchange_parts(
    transport: TorchTransport, op: CommOp, target: Tensor, source: Tensor, coming: list[int], going: list[int]
) -> Work:
    options = transport.options(dist.AllToAllOptions)
    return GlooWork(transport, op, transport.process_group.alltoall_base(target, source, coming, going, options))


# ------------------------------------------------------------------ moving data


def _broadcast_from(transport: TorchTransport, op: CommOp, tensor: Tensor, root: int) -> Work:
    options = transport.options(dist.BroadcastOptions, root=root)
    return _work(transport, op, transport.process_group.broadcast([_movable(tensor)], options))


def _all_gather(transport: TorchTransport, op: CommOp) -> Work:
    """Uneven sizes, and what is large on Gloo, whose own copies it twice: one broadcast per rank, all together."""
    mine = op.inputs[0].view(-1)
    rows = pieces(op.outputs, transport.world_size)
    is_even = all(row.numel() == mine.numel() for row in rows)
    if is_even and (transport.is_nccl or op.nbytes < _BROADCASTS_BYTES):
        options = transport.options(distributed_c10d.AllgatherOptions)
        source, group = _movable(mine), transport.process_group
        if len(op.outputs) == 1:
            return _work(transport, op, group._allgather_base(_movable(op.outputs[0]), source, options))
        return _work(transport, op, group.allgather([[_movable(row) for row in rows]], [source], options))
    if rows[transport.rank].data_ptr() != mine.data_ptr():
        rows[transport.rank].copy_(mine)
    return AllWork([_broadcast_from(transport, op, row, root) for root, row in enumerate(rows)])


def _gather(transport: TorchTransport, op: CommOp) -> Work:
    """Every rank sends to the root. A rank does not know the others' sizes, so even and uneven are one case."""
    nothing = [op.inputs[0].new_empty(0)] * transport.world_size
    given = [op.inputs[0] if rank == op.peer else empty for rank, empty in enumerate(nothing)]
    return _exchange(transport, op, given, op.outputs or nothing)


def _scatter(transport: TorchTransport, op: CommOp) -> Work:
    nothing = [op.outputs[0].new_empty(0)] * transport.world_size
    taken = [op.outputs[0] if rank == op.peer else empty for rank, empty in enumerate(nothing)]
    return _exchange(transport, op, op.inputs or nothing, taken)


def _exchange(transport: TorchTransport, op: CommOp, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
    """All to all with any sizes. Gloo works on one tensor per side, so several are copied into one."""
    sources, targets = [_movable(t) for t in inputs], [_movable(t) for t in outputs]
    if transport.is_nccl:
        options = transport.options(dist.AllToAllOptions)
        return NcclWork(transport, op, transport.process_group.alltoall(targets, sources, options))
    in_sizes, out_sizes = [t.numel() for t in sources], [t.numel() for t in targets]
    given, filled = [t for t in sources if t.numel()], [t for t in targets if t.numel()]
    source = given[0] if len(given) == 1 else torch.cat(sources)
    whole = filled[0] if len(filled) == 1 else targets[0].new_empty(sum(out_sizes))
    work = _exchange_parts(transport, op, whole, source, out_sizes, in_sizes)

    def copy_out() -> None:
        for target, part in zip(targets, whole.split(out_sizes), strict=True):
            target.copy_(part)

    return ThenWork(work, copy_out) if len(filled) > 1 else work


def _barrier(transport: TorchTransport, op: CommOp) -> Work:
    options = transport.options(dist.BarrierOptions)
    if transport.is_nccl:
        options.device_ids = [transport.device.index]
    return _work(transport, op, transport.process_group.barrier(options))


START: dict[str, Callable[[TorchTransport, CommOp], Work]] = {
    "send": _message,
    "recv": _message,
    "batch_send_recv": _batch,
    "broadcast": lambda transport, op: _broadcast_from(transport, op, op.outputs[0], op.partner),
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "gather": _gather,
    "all_gather": _all_gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": lambda transport, op: _exchange(transport, op, op.inputs, op.outputs),
    "barrier": _barrier,
}  # kind -> what starts such an operation
