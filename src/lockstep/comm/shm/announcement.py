"""An operation, or a tensor that is asked for, as numbers that ranks can compare, and back as words."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lockstep.comm.op import REDUCTIONS, CommOp
from lockstep.comm.transport import Transport
from lockstep.errors import CollectiveMismatch

SAME_SIZE = frozenset({"broadcast", "reduce", "all_reduce"})  # the sizes of all ranks' tensors must be equal

_KINDS = (*sorted(SAME_SIZE), "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all", "barrier")
_KIND_CODES = {kind: number for number, kind in enumerate(_KINDS)}
_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
DTYPE_CODES = {dtype: number for number, dtype in enumerate(_DTYPES)}


class Announcement(NamedTuple):
    """What a rank said about its current operation."""

    code: int
    numel: int  # of its tensor, where that must be equal everywhere; its bytes, where others must know them
    place: int  # 1 + offset of its tensor in the segment; 0 where it lies elsewhere


def code_of(op: CommOp) -> int:
    """Kind, dtype, reduction with its own dtype, root: what must be equal on every rank."""
    tensors = op.inputs or op.outputs
    code = _KIND_CODES[op.kind]
    if tensors:
        code |= (DTYPE_CODES[tensors[0].dtype] + 1) << 8
    if op.reduce is not None:
        code |= (REDUCTIONS.index(op.reduce) + 1) << 16
        if op.outputs and op.outputs[0].dtype != op.inputs[0].dtype:
            code |= (DTYPE_CODES[op.outputs[0].dtype] + 1) << 56
    if op.peer is not None:
        code |= (op.peer + 1) << 24
    return code


def words_for(announced: Announcement) -> str:
    """What another rank is doing, for a message."""
    code = announced.code
    words = [_KINDS[code & 0xFF]]
    if dtype := code >> 8 & 0xFF:
        words.append(str(_DTYPES[dtype - 1]).removeprefix("torch."))
    if words[0] in SAME_SIZE:
        words.append(f"{announced.numel} elements")
    if reduce := code >> 16 & 0xFF:
        words.append(REDUCTIONS[reduce - 1])
    if dtype := code >> 56:
        words.append("in " + str(_DTYPES[dtype - 1]).removeprefix("torch."))
    if root := code >> 24 & 0xFFFF_FFFF:
        words.append(f"root={root - 1}")
    return " ".join(words)


def agree_on_tensor(transport: Transport, numel: int, dtype: torch.dtype, given: int) -> int:
    """Rank 0's `given`, where every rank asks for the same tensor.

    Collective.  Raises: CollectiveMismatch, on every rank alike.
    """
    said = torch.tensor([given, numel, DTYPE_CODES[dtype]], device="cpu")
    found = torch.empty(transport.world_size, len(said), dtype=torch.int64, device="cpu")
    transport.submit(CommOp(-1, "all_gather", (said,), (found,), label="shared", async_op=False)).wait()
    asked = found[:, 1:].tolist()
    for rank, request in enumerate(asked):
        if request != asked[0]:
            lines = "".join(f"\n  rank {r}: {asked[r][0]} x {_DTYPES[asked[r][1]]}" for r in (0, rank))
            raise CollectiveMismatch(
                f"shared on rank {transport.rank}: ranks asked for different tensors:{lines}\nNext: find what makes "
                f"the sizes differ; every rank must ask for the same"
            )
    return int(found[0, 0])
