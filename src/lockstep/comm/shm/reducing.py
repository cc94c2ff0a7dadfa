"""Sums and their like on shared memory, in the order of `tree_reduce`: the same bits for every way and size of chunk.

at once     small: every rank puts its tensor into its slot, waits once, and sums all slots itself
in place    the tensors lie in the segment: each rank sums its part of all of them, where they are; nothing is copied
in chunks   large and elsewhere: through the slots, one slot-full after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.op import CommOp, describe
from lockstep.comm.operands import pieces
from lockstep.comm.reduction import tree_reduce_into
from lockstep.comm.shm.staging import HALF_BYTES, Staging, move
from lockstep.errors import CollectiveMismatch

_BLOCK_BYTES = 256 * 1024  # one step of a sum in place: what is written last is still in the cache when it is copied
_EACH_FOR_ITSELF = 32 * 1024  # up to here every rank sums everything, however many there are


@final
class Reducing:
    """The reducing collectives of one rank. Every method blocks."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._control = staging.control
        self._segment = staging.segment
        self._rank = staging.rank
        self._world_size = staging.world_size
        self._scratch: dict[torch.dtype, list[Tensor]] = {}

    def all_reduce(self, op: CommOp) -> None:
        """Every rank's tensor becomes the reduction."""
        tensor = op.outputs[0].view(-1)
        if op.inputs[0] is not op.outputs[0]:
            move(tensor.data_ptr(), op.inputs[0].data_ptr(), tensor.nbytes)
        is_small = tensor.nbytes <= _EACH_FOR_ITSELF
        fits = is_small or (self._world_size == 2 and tensor.nbytes <= HALF_BYTES)
        has_place = self._staging.begin(op, tensor.numel(), None if is_small else tensor)
        if fits and not has_place:
            self._staging.put(tensor.data_ptr(), tensor.nbytes)
        self._staging.meet_and_check(op)
        places = self._control.places()
        if fits and not any(places):
            self._reduce_slots(op, tensor, 0)
        elif all(places):
            self._in_place(op, tensor, places)
        elif self._world_size == 2:
            self._each_for_itself(op, tensor)
        else:
            self._share_the_sum(op, tensor)

    def _in_place(self, op: CommOp, tensor: Tensor, places: Sequence[int]) -> None:
        """Rank r sums part r of all tensors into all of them: no byte moves that the sum does not need."""
        count = tensor.numel()
        everywhere = [self._segment.view(place - 1, count, tensor.dtype) for place in places]
        others = [view for rank, view in enumerate(everywhere) if rank != self._rank]
        self._reduce_blocks(op, everywhere[self._rank], everywhere, self._part(count, self._rank), others)
        self._control.meet(op)

    def _each_for_itself(self, op: CommOp, tensor: Tensor) -> None:
        """Chunk by chunk, every rank computes the whole sum: one wait each. Best for two ranks."""
        for chunk in tensor.split(HALF_BYTES // tensor.element_size()):
            self._staging.turn()
            self._staging.put(chunk.data_ptr(), chunk.nbytes)
            self._control.meet(op)
            self._reduce_slots(op, chunk, 0)

    def _share_the_sum(self, op: CommOp, tensor: Tensor) -> None:
        """Chunk by chunk, rank r sums part r and everybody takes it from there: two waits each."""
        size = tensor.element_size()
        for chunk in tensor.split(HALF_BYTES // size):
            self._staging.turn()
            self._staging.put(chunk.data_ptr(), chunk.nbytes)
            self._control.meet(op)
            first, last = self._part(chunk.numel(), self._rank)
            mine = chunk[first:last]
            self._reduce_slots(op, mine, first * size)
            self._staging.put(mine.data_ptr(), mine.nbytes, first * size)  # nobody else reads this part of this slot
            self._control.meet(op)
            for peer in range(self._world_size):
                if peer != self._rank:
                    first, last = self._part(chunk.numel(), peer)
                    self._staging.take(chunk.data_ptr() + first * size, (last - first) * size, peer, first * size)

    def reduce(self, op: CommOp) -> None:
        """The root's tensor becomes the reduction."""
        source = op.inputs[0].view(-1)
        target = op.outputs[0].view(-1) if self._rank == op.peer else None
        self._staging.begin(op, source.numel(), source)
        self._staging.meet_and_check(op)
        places = self._control.places()
        if all(places):
            if target is not None:
                everywhere = [self._segment.view(place - 1, source.numel(), source.dtype) for place in places]
                self._reduce_blocks(op, target, everywhere, (0, source.numel()))
            self._control.meet(op)
            return
        step = HALF_BYTES // source.element_size()
        for index, chunk in enumerate(source.split(step) if source.numel() else ()):
            self._staging.turn()
            self._staging.put(chunk.data_ptr(), chunk.nbytes)
            self._control.meet(op)
            if target is not None:
                self._reduce_slots(op, target[index * step : index * step + chunk.numel()], 0)

    def reduce_scatter(self, op: CommOp) -> None:
        """Every rank's output becomes the reduction of its part. Parts may differ in size, alike on all ranks.

        An output of a wider dtype: it is the narrow elements that lie in the slots, or are read where they are.
        """
        target = op.outputs[0].view(-1)
        parts = pieces(op.inputs, self._world_size)
        counts = [part.numel() for part in parts]
        self._control.put_sizes(counts)
        self._staging.begin(op, sum(counts), op.inputs[0] if len(op.inputs) == 1 else None)
        self._staging.meet_and_check(op)
        self._check_sizes(op)
        places = self._control.places()
        size = op.inputs[0].element_size()
        if all(places):
            count = counts[self._rank]
            start = count * self._rank * size
            everywhere = [self._segment.view(place - 1 + start, count, op.inputs[0].dtype) for place in places]
            self._reduce_blocks(op, target, everywhere, (0, count))
            self._control.meet(op)
            return
        step = HALF_BYTES // self._world_size // size
        for start in range(0, max(counts), step):
            self._staging.turn()
            for rank, part in enumerate(parts):
                chunk = part[start : start + step]
                self._staging.put(chunk.data_ptr(), chunk.nbytes, rank * step * size)
            self._control.meet(op)
            self._reduce_slots(op, target[start : start + step], self._rank * step * size)

    # ------------------------------------------------------------------ parts of the above

    def _part(self, count: int, rank: int) -> tuple[int, int]:
        """Which of `count` elements `rank` works on; where there are many, the borders lie on cache lines."""
        step = -(-count // self._world_size)
        if step >= 64:
            step = -(-step // 64) * 64
        return min(step * rank, count), min(step * (rank + 1), count)

    def _reduce_slots(self, op: CommOp, target: Tensor, at: int) -> None:
        """`target` becomes the reduction of as many elements of all slots, from `at` bytes on."""
        count = target.numel()
        if count:
            parts = [self._staging.view(rank, at, count, op.inputs[0].dtype) for rank in range(self._world_size)]
            tree_reduce_into(target, parts, op.reduction, self._scratch_for(target))

    def _reduce_blocks(
        self, op: CommOp, target: Tensor, parts: Sequence[Tensor], span: tuple[int, int], copies: Sequence[Tensor] = ()
    ) -> None:
        """Reduce `parts` into `target` over `span`, in blocks that stay in the cache, and copy each to `copies`."""
        reduction, step = op.reduction, _BLOCK_BYTES // target.element_size()
        for start in range(*span, step):
            end = min(start + step, span[1])
            block = target[start:end]
            tree_reduce_into(block, [part[start:end] for part in parts], reduction, self._scratch_for(block))
            for copy in copies:
                copy[start:end].copy_(block)

    def _scratch_for(self, target: Tensor) -> list[Tensor]:
        """Room for the inner nodes of the tree."""
        if self._world_size == 2:
            return []
        found = self._scratch.get(target.dtype)
        if found is None:
            count = HALF_BYTES // target.element_size()
            with torch.inference_mode(False):  # also for operations outside of it
                found = [torch.empty(count, dtype=target.dtype, device="cpu") for _ in range(self._world_size // 2)]
            self._scratch[target.dtype] = found
        return [tensor[: target.numel()] for tensor in found]

    def _check_sizes(self, op: CommOp) -> None:
        """Raises: CollectiveMismatch, on every rank, where the ranks' lists differ."""
        first = self._control.sizes(0)
        for rank in range(1, self._world_size):
            other = self._control.sizes(rank)
            if other != first:
                raise CollectiveMismatch(
                    f"{describe(op)} on rank {self._rank}: rank 0 gives parts of {first} elements, rank {rank} of "
                    f"{other}. Next: give the same sizes on every rank"
                )
