"""Buffers for gradients under way, used again and again: fresh memory costs as much as the sums themselves."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator


@final
class BufferPool:
    """Buffers by communicator and dtype, in memory that the communicator moves best.

    Memory: of each size about as many as are out at once.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._uses: dict[int, int] = {}  # address of a buffer -> how often it was taken since the last `trim`

    def take(self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of at least `numel` elements, and at most twice as many, with whatever values."""
        free = self._free.get((id(comm), dtype, device), [])
        for place, buffer in enumerate(free):
            if numel <= buffer.numel() <= 2 * numel:
                return self._count(free.pop(place))
        if device == comm.device:
            return self._count(comm.empty(numel, dtype))
        return self._count(torch.empty(numel, dtype=dtype, device=device))

    def _count(self, buffer: Tensor) -> Tensor:
        self._uses[buffer.data_ptr()] = self._uses.get(buffer.data_ptr(), 0) + 1
        return buffer

    def give_back(self, comm: Communicator, buffer: Tensor) -> None:
        """Let the next `take` have it."""
        self._free.setdefault((id(comm), buffer.dtype, buffer.device), []).append(buffer)

    def trim(self) -> None:
        """Give back what was used only once since the last time: a buffer as large as the largest unit, mostly."""
        for key, free in self._free.items():
            self._free[key] = [buffer for buffer in free if self._uses.get(buffer.data_ptr(), 0) > 1]
        self._uses.clear()
