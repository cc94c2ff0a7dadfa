"""Tensors that all ranks of a group hold as one: who still does, and when the memory may be another's.

A block lies in the heap of the group's first rank: [ a page with one word for each rank | the elements ]. A rank writes
its word when its last reference goes, and nobody ever writes it again. The first rank takes the block back when every
word is written, or belongs to a process that has ended. So it does not matter who lets go first, nor whether the group
is closed by then; and a view that some rank keeps, keeps the memory of all. A block that was being given when a rank
was lost stays as long as the segment.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.segment import PAGE, Heap, Segment, when_dropped
from lockstep.comm.shm.waiting import fence

_WORD = 8


@final
class Commons:
    """What one process has of such blocks: those it gave, and its own views of any."""

    def __init__(self, segment: Segment, heap: Heap, peers: Peers) -> None:
        self._segment = segment
        self._heap = heap
        self._peers = peers
        self._given: dict[int, tuple[int, ...]] = {}  # offset -> who may use it, by rank in the segment

    def give(self, nbytes: int, members: Sequence[int]) -> int:
        """The offset of a new block of zeros for these ranks.  Raises: SharedMemoryUnavailable."""
        self.sweep()
        offset = self._heap.allocate(_head(len(members)) + nbytes)
        if not hasattr(mmap, "MADV_REMOVE"):  # memory that was used before holds what it held
            ctypes.memset(self._segment.base + offset, 0, _head(len(members)) + nbytes)
        self._given[offset] = tuple(members)
        return offset

    def take_back(self, offset: int) -> None:
        """Undo `give` before any rank has a view."""
        del self._given[offset]
        self._heap.give_back(offset)

    def view(self, offset: int, members: Sequence[int], rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's tensor [numel > 0] in the block. `rank`: among `members`."""
        start = offset + _head(len(members))
        window = memoryview(self._segment.map)[start : start + numel * dtype.itemsize]
        when_dropped(window, self.let_go, offset + _WORD * rank)
        with torch.inference_mode(False):  # one made in that mode could be written in no other
            return torch.frombuffer(window, dtype=dtype)

    def let_go(self, word: int) -> None:
        """This rank has no reference any more. Called by finalizers: at any moment, in any thread."""
        fence()  # what was written into the block comes before
        self._segment.map[word] = 1
        self.sweep()

    def sweep(self) -> None:
        """Take back the blocks of this process that no rank refers to any more."""
        for offset, members in tuple(self._given.items()):
            words = self._segment.map[offset : offset + _WORD * len(members) : _WORD]
            is_free = all(word or self._peers.has_ended(member) for word, member in zip(words, members, strict=True))
            if is_free and self._given.pop(offset, None) is not None:  # the garbage collector may sweep while we do
                self._heap.give_back(offset)


def _head(ranks: int) -> int:
    return -(-_WORD * ranks // PAGE) * PAGE
