"""What each collective does with the tensors of all ranks, once they are in one place. `ops[rank]` throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.comm.op import ONE_ORDER, CommOp, describe, signature
from lockstep.comm.operands import pieces
from lockstep.comm.reduction import tree_reduce
from lockstep.errors import CollectiveMismatch

Ops = Sequence[CommOp] | Mapping[int, CommOp]  # rank -> what it asked for


def exchange(ops: Sequence[CommOp]) -> None:
    """Carry out one collective of all ranks. Raises: CollectiveMismatch where sizes do not fit."""
    with torch.no_grad():
        _EXCHANGE[ops[0].kind](ops)


def find_mismatch(ops: Mapping[int, CommOp]) -> CollectiveMismatch | None:
    """An error that names the first two ranks which called different things; None where all agree."""
    ranks = sorted(ops)
    for rank in ranks[1:]:
        if signature(ops[rank]) != signature(ops[ranks[0]]):
            return _mismatch("ranks called different operations at the same point", ops, ranks[0], rank)
    return None


def copy_message(send: CommOp, source: int, recv: CommOp, target: int) -> None:
    """One message from rank `source` to rank `target`. Raises: CollectiveMismatch for another dtype or size."""
    with torch.no_grad():
        _copy(recv.outputs[0], send.inputs[0], {source: send, target: recv}, source, target)


def _mismatch(problem: str, ops: Ops, *ranks: int) -> CollectiveMismatch:
    lines = "".join(f"\n  rank {rank}: {describe(ops[rank])}" for rank in ranks)
    return CollectiveMismatch(f"{problem}:{lines}\n{ONE_ORDER}")


def _copy(target: Tensor, source: Tensor, ops: Ops, source_rank: int, target_rank: int) -> None:
    if target.numel() != source.numel() or target.dtype != source.dtype:
        room, given = (f"{tensor.numel()} x {tensor.dtype}" for tensor in (target, source))
        problem = f"rank {target_rank} has room for {room} from rank {source_rank}, which gives {given}"
        raise _mismatch(problem, ops, source_rank, target_rank)
    target.view(-1).copy_(source.view(-1))


def _broadcast(ops: Sequence[CommOp]) -> None:
    root = ops[0].partner
    for rank, op in enumerate(ops):
        _copy(op.outputs[0], ops[root].inputs[0], ops, root, rank)


def _reduce(ops: Sequence[CommOp]) -> None:
    """To all ranks that have an output: the root of a reduce, every rank of an all_reduce."""
    result = tree_reduce([op.inputs[0] for op in ops], ops[0].reduction)
    for op in ops:
        for output in op.outputs:
            output.copy_(result)


def _scatter(ops: Sequence[CommOp]) -> None:
    root = ops[0].partner
    for rank, op in enumerate(ops):
        _copy(op.outputs[0], ops[root].inputs[rank], ops, root, rank)


def _gather(ops: Sequence[CommOp]) -> None:
    """To all ranks that have outputs: the root of a gather, every rank of an all_gather."""
    for target, op in enumerate(ops):
        for source, piece in enumerate(pieces(op.outputs, len(ops))):
            _copy(piece, ops[source].inputs[0], ops, source, target)


def _reduce_scatter(ops: Sequence[CommOp]) -> None:
    rows = [pieces(op.inputs, len(ops)) for op in ops]
    for source, row in enumerate(rows):
        for target, piece in enumerate(row):
            if piece.numel() != ops[target].outputs[0].numel():
                problem = (
                    f"rank {source} has {piece.numel()} elements to reduce into rank {target}'s output of another size"
                )
                raise _mismatch(problem, ops, source, target)
    sum_dtype = ops[0].outputs[0].dtype
    results = [tree_reduce([row[target].to(sum_dtype) for row in rows], ops[0].reduction) for target in range(len(ops))]
    for op, result in zip(ops, results, strict=True):  # only now: an output may be a part of its rank's input
        op.outputs[0].view(-1).copy_(result)


def _all_to_all(ops: Sequence[CommOp]) -> None:
    for target, op in enumerate(ops):
        for source, piece in enumerate(op.outputs):
            _copy(piece, ops[source].inputs[target], ops, source, target)


_EXCHANGE: dict[str, Callable[[Sequence[CommOp]], None]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _reduce,
    "gather": _gather,
    "all_gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": lambda _: None,  # all have come
}
