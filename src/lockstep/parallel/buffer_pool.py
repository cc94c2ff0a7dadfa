"""Buffers for gradients under way, used again and again: fresh memory costs as much as the sums themselves."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator


@final
class BufferPool:
    """Buffers by communicator and dtype, in memory that the communicator moves best.

    Memory: of each size about as many as are out at once; kept as long as the pool.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of at least `numel` elements, and at most twice as many, with whatever values."""
        free = self._free.get((id(comm), dtype, device), [])
        for place, buffer in enumerate(free):
            if numel <= buffer.numel() <= 2 * numel:
                return free.pop(place)
        if device == comm.device:
            return comm.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, comm: Communicator, buffer: Tensor) -> None:
        """Let the next `take` have it."""
        self._free.setdefault((id(comm), buffer.dtype, buffer.device), []).append(buffer)

    def clear(self) -> None:
        """Give all memory back that is not out."""
        self._free.clear()
