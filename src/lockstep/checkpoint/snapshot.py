"""A copy of what this rank writes, taken in one go, so that training can change the tensors while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.checkpoint.tensor_file import DTYPES, Piece

_ALIGNMENT = 64  # bytes; a view of any dtype may begin there


@final
class Snapshot:
    """One buffer on the CPU, page-locked where tensors are on a GPU; it is kept and used again."""

    def __init__(self) -> None:
        self.release()

    def take(self, pieces: Sequence[Piece], sources: Sequence[Tensor]) -> list[Tensor]:
        """Copies of `sources`, which are `pieces`, complete on return; they are valid until the next call.

        Memory: the pieces', kept until `release`. Time: for the `pieces` of the call before, that of the copying.
        """
        is_on_gpu = any(source.is_cuda for source in sources)
        if pieces is not self._pieces or (is_on_gpu and not self._buffer.is_pinned()):
            self._make_room(pieces, is_on_gpu)
        with torch.no_grad():
            for room, source in zip(self._rooms, sources, strict=True):
                room.copy_(source, non_blocking=True)
        if is_on_gpu:
            torch.cuda.current_stream().synchronize()
        return self._rooms

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pieces: Sequence[Piece] = ()  # that `rooms` are for
        self._rooms: list[Tensor] = []  # views of the buffer

    def _make_room(self, pieces: Sequence[Piece], is_pinned: bool) -> None:
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._buffer
        self.release()
        if buffer.numel() < end or (is_pinned and not buffer.is_pinned()):
            del buffer  # given back before the larger one is asked for
            buffer = torch.empty(end, dtype=torch.uint8, pin_memory=is_pinned)
        self._buffer = buffer
        self._rooms = [
            buffer[start : start + piece.nbytes].view(DTYPES[piece.dtype]).view(piece.part.shape)
            for piece, start in zip(pieces, starts, strict=True)
        ]
        self._pieces = pieces
