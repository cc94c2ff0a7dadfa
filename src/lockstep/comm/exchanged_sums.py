"""Reduce-scatter from exchanges: every rank gets what it has to add, and adds it in the order of the tree.

For Gloo, whose own is an all-reduce with copies: that takes more than twice as long, and its order depends on the size.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from lockstep.comm.op import AllWork, CommOp, ThenWork, Work
from lockstep.comm.operands import pieces
from lockstep.comm.reduction import tree_reduce_by_blocks

_KEPT_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20  # of an operand: up to here one exchange among all is faster than one for each distance

Exchange = Callable[[Tensor, Tensor, list[int], list[int]], Work]
# (target, source, coming, going): all-to-all of consecutive parts, `coming[r]` elements from rank r, `going[r]` to it


@final
class ExchangedSums:
    """The reduce-scatters of one group on a CPU.

    What has come is added by whoever waits, or by the next `start`, which needs its memory: so a long row of them, the
    buckets of a backward, takes little more than the two or three that are under way at once.
    Memory: (W - 1) / W of the operand from `start` until it is added; _KEPT_BYTES of that are kept for the next.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._kept = _KeptMemory()
        self._open: list[weakref.ref[ThenWork]] = []

    def start(self, op: CommOp, exchange: Exchange) -> Work:
        """Start a reduce_scatter. Every rank starts the same exchanges in the same order."""
        self._add_what_has_come()
        result, parts = op.outputs[0].view(-1), pieces(op.inputs, self._world_size)
        if self._world_size > 2 and sum(part.nbytes for part in parts) <= _SMALL_BYTES:
            work = self._among_all(op, result, parts, exchange)
        else:
            work = self._by_distance(op, result, parts, exchange)
        self._open.append(weakref.ref(work))
        return work

    def _among_all(self, op: CommOp, result: Tensor, parts: Sequence[Tensor], exchange: Exchange) -> ThenWork:
        came = parts[0].new_empty(self._world_size, result.numel())
        whole = op.inputs[0].view(-1) if len(op.inputs) == 1 else torch.cat([*parts])
        coming = [result.numel()] * self._world_size
        work = exchange(came.view(-1), whole, coming, [part.numel() for part in parts])
        return ThenWork(work, partial(tree_reduce_by_blocks, result, came.unbind(), op.reduction))

    def _by_distance(self, op: CommOp, result: Tensor, parts: Sequence[Tensor], exchange: Exchange) -> ThenWork:
        """To the next rank and from the one before, then two apart, ...: nothing is copied here."""
        width, size = self._world_size, result.numel()
        memory = self._kept.take((width - 1) * size * parts[0].element_size())
        came = memory.view(parts[0].dtype)[: (width - 1) * size].view(width - 1, size)
        rows = list(parts)
        works: list[Work] = []
        for distance in range(1, width):
            to, source = (self._rank + distance) % width, (self._rank - distance) % width
            rows[source] = came[distance - 1]
            coming = [size if rank == source else 0 for rank in range(width)]
            going = [parts[to].numel() if rank == to else 0 for rank in range(width)]
            works.append(exchange(rows[source], parts[to], coming, going))

        def add() -> None:
            tree_reduce_by_blocks(result, rows, op.reduction)
            self._kept.give(memory)

        return ThenWork(AllWork(works), add)

    def _add_what_has_come(self) -> None:
        still_open = []
        for known in self._open:
            work = known()
            if work is not None and work.is_done():
                with contextlib.suppress(RuntimeError):  # its own `wait` raises it again
                    work.wait()
            elif work is not None:
                still_open.append(known)
        self._open = still_open


@final
class _KeptMemory:
    """Memory to receive into, used again and again: what is fresh costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """At least so many bytes, the fewest that are here."""
        with self._lock:
            fitting = [place for place, memory in enumerate(self._free) if memory.nbytes >= nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda place: self._free[place].nbytes))
        return torch.empty(-(-nbytes // 16) * 16, dtype=torch.uint8)

    def give(self, memory: Tensor) -> None:
        """Keep it for `take`, unless there is enough."""
        with self._lock:
            if memory.nbytes + sum(kept.nbytes for kept in self._free) <= _KEPT_BYTES:
                self._free.append(memory)
