"""A copy of what this rank writes, taken in one go, so that training can change the tensors while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.checkpoint.tensor_file import DTYPES, Piece
from lockstep.comm.tensor_parts import AnyTensor, held

_ALIGNMENT = 64  # bytes; a view of any dtype may begin there


@final
class Snapshot:
    """One buffer on the CPU, page-locked where tensors are on a GPU; it is kept and used again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, pieces: Sequence[Piece], tensors: Mapping[str, AnyTensor]) -> list[Tensor]:
        """Copies of `pieces` of `tensors`, complete on return; they are valid until the next call.

        Memory: the pieces', kept until `release`.
        """
        sources = [piece_of(piece, tensors[piece.path]) for piece in pieces]
        starts, end = [], 0
        for source in sources:
            starts.append(end)
            end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        is_on_gpu = any(source.is_cuda for source in sources)
        if self._buffer.numel() < end or (is_on_gpu and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # given back before the larger one is asked for
            self._buffer = torch.empty(end, dtype=torch.uint8, pin_memory=is_on_gpu)
        copies = []
        with torch.no_grad():
            for piece, source, start in zip(pieces, sources, starts, strict=True):
                room = self._buffer[start : start + source.nbytes].view(DTYPES[piece.dtype]).view(source.shape)
                copies.append(room.copy_(source, non_blocking=True))
        if is_on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def piece_of(piece: Piece, tensor: AnyTensor) -> Tensor:
    """The elements of `piece`, as a view of what this rank holds of `tensor`."""
    parts = held(tensor)
    part, local = parts[0] if len(parts) == 1 else next(p for p in parts if piece.part.overlap(p[0]) == piece.part)
    return local if part == piece.part else local[piece.part.within(part).slices]
