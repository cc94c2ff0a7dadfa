"""The collectives on shared memory: how the bytes move once every rank can see every other's.

Three ways, chosen alike on all ranks:

    at once     small: every rank puts its tensor into its slot, waits once, and takes what it needs from all slots
    in place    the tensors lie in the segment: each rank works on its part of everybody's tensor; no copy at all
    in chunks   large and elsewhere: like "at once", one slot-full after the other

A slot has two halves that are used in turn. A rank writes into one while others may still read the other; before it
comes back to the first, it has waited for all of them once more.

Sums are made in the order of `tree_reduce`: the same bits on every rank, for every way and size of chunk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.op import CommOp, Reduction, describe
from lockstep.comm.shm.control import Control
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.summing import tree_reduce_into
from lockstep.errors import CollectiveMismatch

HALF_BYTES = 512 * 1024  # of a slot; half of a usual second-level cache
SLOT_BYTES = 2 * HALF_BYTES
_BLOCK_BYTES = 256 * 1024  # one step of a sum in place: what is written last is still in the cache when it is copied
_EACH_FOR_ITSELF = 32 * 1024  # up to here every rank computes the whole sum, also with more than two ranks

_move_small = ctypes.PyDLL(None).memmove  # keeps the interpreter's lock: cheaper than giving it away
_move_large = ctypes.CDLL(None).memmove
for _move in (_move_small, _move_large):
    _move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _move.restype = None
_SMALL_BYTES = 64 * 1024


def move(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses."""
    if nbytes and target != source:
        (_move_small if nbytes <= _SMALL_BYTES else _move_large)(target, source, nbytes)


@final
class Collectives:
    """Carries out the collectives of one rank of one group, one at a time. Every method blocks."""

    def __init__(self, segment: Segment, control: Control) -> None:
        self.control = control
        self.rank = control.rank
        self.world_size = control.world_size
        self._segment = segment
        self._slots: list[int] = []  # offsets, known after the first wait
        self._half = 0
        self._scratch: dict[torch.dtype, list[Tensor]] = {}
        self._run = {
            "broadcast": self._broadcast,
            "reduce": self._reduce,
            "all_reduce": self._all_reduce,
            "gather": self._gather,
            "all_gather": self._all_gather,
            "scatter": self._scatter,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "barrier": self._barrier,
        }

    def execute(self, op: CommOp) -> None:
        """Do what `op` says.  Raises: CommError."""
        run = self._run[op.kind]
        try:
            if op.outputs and op.outputs[0].is_inference():  # only inference mode may write to its tensors
                with torch.inference_mode():
                    run(op)
            else:
                run(op)
        except CollectiveMismatch:  # raised where all ranks are in step: the group goes on
            raise
        except BaseException as error:
            self.control.fail(error)
            raise

    # ------------------------------------------------------------------ reductions

    def _all_reduce(self, op: CommOp) -> None:
        tensor = op.outputs[0].view(-1)
        if op.inputs[0] is not op.outputs[0]:
            move(tensor.data_ptr(), op.inputs[0].data_ptr(), tensor.nbytes)
        count = tensor.numel()
        if tensor.nbytes <= (HALF_BYTES if self.world_size == 2 else _EACH_FOR_ITSELF):
            self._begin(op, count)
            self._put(tensor.data_ptr(), tensor.nbytes)
            self._meet_and_check(op)
            self._reduce_slots(op, tensor, 0, count, 0)
            return
        self._begin(op, count, tensor)
        self._meet_and_check(op)
        places = self.control.places()
        if places is not None:
            mine = self._part(count, self.rank)
            everywhere = [self._segment.view(place, count, tensor.dtype) for place in places]
            self._reduce_blocks(op, everywhere[self.rank], everywhere, mine, copies=everywhere)
            self.control.meet(op)
        elif self.world_size == 2:
            self._each_for_itself(op, tensor)
        else:
            self._share_the_sum(op, tensor)

    def _each_for_itself(self, op: CommOp, tensor: Tensor) -> None:
        """Chunk by chunk, every rank computes the whole sum: one wait each. Best for two ranks."""
        step = HALF_BYTES // tensor.element_size()
        for start in range(0, tensor.numel(), step):
            count = min(step, tensor.numel() - start)
            chunk = tensor[start : start + count]
            self._turn()
            self._put(chunk.data_ptr(), chunk.nbytes)
            self.control.meet(op)
            self._reduce_slots(op, chunk, 0, count, 0)

    def _share_the_sum(self, op: CommOp, tensor: Tensor) -> None:
        """Chunk by chunk, rank r sums part r and everybody takes it from there: two waits each."""
        step = HALF_BYTES // tensor.element_size()
        size = tensor.element_size()
        for start in range(0, tensor.numel(), step):
            chunk = tensor[start : start + min(step, tensor.numel() - start)]
            self._turn()
            self._put(chunk.data_ptr(), chunk.nbytes)
            self.control.meet(op)
            first, last = self._part(chunk.numel(), self.rank)
            mine = chunk[first:last]
            self._reduce_slots(op, mine, first, last, first)
            self._put(mine.data_ptr(), mine.nbytes, first * size)
            self.control.meet(op)
            for peer in range(self.world_size):
                if peer != self.rank:
                    first, last = self._part(chunk.numel(), peer)
                    place = self._slot(peer) + first * size
                    move(chunk.data_ptr() + first * size, self._segment.base + place, (last - first) * size)

    def _reduce(self, op: CommOp) -> None:
        source = op.inputs[0].view(-1)
        is_root = self.rank == op.peer
        target = op.outputs[0].view(-1) if is_root else source
        self._begin(op, source.numel(), source)
        self._meet_and_check(op)
        places = self.control.places()
        if places is not None:
            count = source.numel()
            everywhere = [self._segment.view(place, count, source.dtype) for place in places]
            if is_root:
                self._reduce_blocks(op, target, everywhere, (0, count))
            self.control.meet(op)
            return
        step = HALF_BYTES // source.element_size()
        for start in range(0, source.numel(), step):
            chunk = source[start : start + min(step, source.numel() - start)]
            self._turn()
            self._put(chunk.data_ptr(), chunk.nbytes)
            self.control.meet(op)
            if is_root:
                part = target[start : start + chunk.numel()]
                self._reduce_slots(op, part, 0, chunk.numel(), 0)

    def _reduce_scatter(self, op: CommOp) -> None:
        target = op.outputs[0].view(-1)
        pieces = _pieces(op.inputs, self.world_size)
        counts = [piece.numel() for piece in pieces]
        whole = op.inputs[0].view(-1) if len(op.inputs) == 1 else None
        self.control.put_sizes(counts)
        self._begin(op, sum(counts), whole)
        self._meet_and_check(op)
        self._check_sizes(op, counts)
        places = self.control.places()
        if places is not None:
            count = counts[self.rank]
            start = count * self.rank * target.element_size()
            everywhere = [self._segment.view(place + start, count, target.dtype) for place in places]
            self._reduce_blocks(op, target, everywhere, (0, count))
            self.control.meet(op)
            return
        size = target.element_size()
        step = HALF_BYTES // self.world_size // size
        for start in range(0, max(counts), step):
            self._turn()
            for rank, piece in enumerate(pieces):
                chunk = piece[start : start + step]
                if chunk.numel():
                    self._put(chunk.data_ptr(), chunk.nbytes, rank * step * size)
            self.control.meet(op)
            part = target[start : start + step]
            if part.numel():
                begin = self.rank * step
                self._reduce_slots(op, part, begin, begin + part.numel(), begin)

    # ------------------------------------------------------------------ moving data

    def _broadcast(self, op: CommOp) -> None:
        assert op.peer is not None
        target = op.outputs[0]
        is_root = self.rank == op.peer
        if is_root and op.inputs[0] is not target:
            move(target.data_ptr(), op.inputs[0].data_ptr(), target.nbytes)
        self._begin(op, target.numel(), target if is_root else None)
        small = target.nbytes <= HALF_BYTES
        if small and is_root:
            self._put(target.data_ptr(), target.nbytes)
        self._meet_and_check(op)
        place = self.control.announced(op.peer).place
        if small:
            self._take(target.data_ptr(), target.nbytes, op.peer)
        elif place:
            if not is_root:
                move(target.data_ptr(), self._segment.base + place - 1, target.nbytes)
            self.control.meet(op)
        else:
            for start, nbytes in _chunks(target.nbytes, HALF_BYTES):
                self._turn()
                if is_root:
                    self._put(target.data_ptr() + start, nbytes)
                self.control.meet(op)
                self._take(target.data_ptr() + start, nbytes, op.peer)

    def _all_gather(self, op: CommOp) -> None:
        self._collect(op, op.inputs[0], _pieces(op.outputs, self.world_size))

    def _gather(self, op: CommOp) -> None:
        self._collect(op, op.inputs[0], op.outputs)

    def _collect(self, op: CommOp, mine: Tensor, targets: Sequence[Tensor]) -> None:
        """Every rank's tensor goes to the ranks that have `targets`, one for each rank. Sizes may differ."""
        self._begin(op, mine.nbytes, mine)
        small = mine.nbytes <= HALF_BYTES
        if small:
            self._put(mine.data_ptr(), mine.nbytes)
        self._meet_and_check(op)
        announced = [self.control.announced(rank) for rank in range(self.world_size)]
        sizes = [said.numel for said in announced]
        wrong = _wrong_size(targets, sizes)  # raised at the end: the others count on this rank's ticks
        wanted = () if wrong is not None else targets
        largest = max(sizes)
        if largest <= HALF_BYTES:
            for rank, target in enumerate(wanted):
                self._take(target.data_ptr(), target.nbytes, rank, own=mine)
        elif all(said.place or not said.numel for said in announced):
            for rank, target in enumerate(wanted):
                move(target.data_ptr(), self._segment.base + announced[rank].place - 1, target.nbytes)
            self.control.meet(op)
        else:
            for start, _ in _chunks(largest, HALF_BYTES):
                self._turn()
                self._put(mine.data_ptr() + start, _left(mine.nbytes, start, HALF_BYTES))
                self.control.meet(op)
                for rank, target in enumerate(wanted):
                    nbytes = _left(target.nbytes, start, HALF_BYTES)
                    if rank != self.rank:
                        self._take(target.data_ptr() + start, nbytes, rank)
                    else:
                        move(target.data_ptr() + start, mine.data_ptr() + start, nbytes)
        if wrong is not None:
            raise self._size_mismatch(op, wrong, targets[wrong].nbytes, sizes[wrong])

    def _scatter(self, op: CommOp) -> None:
        assert op.peer is not None
        self._deal(op, op.inputs, [op.outputs[0] if rank == op.peer else None for rank in range(self.world_size)])

    def _all_to_all(self, op: CommOp) -> None:
        self._deal(op, op.inputs, op.outputs)

    def _deal(self, op: CommOp, sources: Sequence[Tensor], targets: Sequence[Tensor | None]) -> None:
        """Piece r of every rank that has `sources` goes to rank r, which takes it into its target for that rank."""
        self.control.put_sizes([source.nbytes for source in sources] or [0] * self.world_size)
        self._begin(op)
        self._meet_and_check(op)
        sizes = [self.control.sizes(rank) for rank in range(self.world_size)]
        coming = [sizes[rank][self.rank] for rank in range(self.world_size)]
        wrong = _wrong_size(targets, coming)
        room = HALF_BYTES // self.world_size // 64 * 64
        for start, _ in _chunks(max(max(row) for row in sizes), room):
            self._turn()
            for rank, source in enumerate(sources):
                self._put(source.data_ptr() + start, _left(source.nbytes, start, room), rank * room)
            self.control.meet(op)
            for rank, target in enumerate(targets if wrong is None else ()):
                if target is not None:
                    nbytes = _left(target.nbytes, start, room)
                    self._take(target.data_ptr() + start, nbytes, rank, self.rank * room)
        if wrong is not None:
            target = targets[wrong]
            assert target is not None
            raise self._size_mismatch(op, wrong, target.nbytes, coming[wrong])

    def _barrier(self, op: CommOp) -> None:
        self._begin(op)
        self._meet_and_check(op)

    # ------------------------------------------------------------------ parts of the above

    def _begin(self, op: CommOp, count: int = 0, tensor: Tensor | None = None) -> None:
        """Announce the operation; `tensor` is what others may use where it lies."""
        place = None if tensor is None else self._segment.offset_of(tensor.data_ptr(), tensor.nbytes)
        self._turn()
        self.control.announce(op, count, 0 if place is None else place + 1)

    def _turn(self) -> None:
        self._half ^= HALF_BYTES

    def _meet_and_check(self, op: CommOp) -> None:
        self.control.meet(op)
        if not self._slots:
            self._slots = self.control.slots()
        self.control.check(op)

    def _slot(self, rank: int) -> int:
        """The offset of the half of `rank`'s slot that is in use."""
        return self._slots[rank] + self._half

    def _put(self, address: int, nbytes: int, at: int = 0) -> None:
        """Copy into this rank's slot."""
        move(self._segment.base + self.control.own_slot + self._half + at, address, nbytes)

    def _take(self, address: int, nbytes: int, rank: int, at: int = 0, own: Tensor | None = None) -> None:
        """Copy out of `rank`'s slot; from `own` memory where it is this rank's."""
        source = self._segment.base + self._slot(rank) + at
        move(address, own.data_ptr() if own is not None and rank == self.rank else source, nbytes)

    def _part(self, count: int, rank: int) -> tuple[int, int]:
        """Which of `count` elements `rank` works on; borders lie on cache lines."""
        step = (
            -(-count // self.world_size // 64) * 64 if count >= 64 * self.world_size else -(-count // self.world_size)
        )
        return min(step * rank, count), min(step * (rank + 1), count)

    def _reduce_slots(self, op: CommOp, target: Tensor, first: int, last: int, at: int) -> None:
        """`target` becomes the reduction of elements `first` to `last` of all slots; it is this rank's own operand."""
        if first == last:
            return
        size = target.element_size()
        parts = [
            self._segment.view(self._slot(rank) + at * size, last - first, target.dtype)
            for rank in range(self.world_size)
        ]
        tree_reduce_into(target, parts, _reduction(op), self._scratch_for(target))

    def _reduce_blocks(
        self,
        op: CommOp,
        target: Tensor,
        parts: Sequence[Tensor],
        span: tuple[int, int],
        copies: Sequence[Tensor] = (),
    ) -> None:
        """Reduce `parts` into `target` over `span`, in blocks that stay in the cache, and copy each to `copies`."""
        reduction = _reduction(op)
        step = _BLOCK_BYTES // target.element_size()
        for start in range(*span, step):
            end = min(start + step, span[1])
            block = target[start:end]
            tree_reduce_into(block, [part[start:end] for part in parts], reduction, self._scratch_for(block))
            for copy in copies:
                if copy is not target:
                    copy[start:end].copy_(block)

    def _scratch_for(self, target: Tensor) -> list[Tensor]:
        """Room for the inner nodes of the tree."""
        if self.world_size == 2:
            return []
        found = self._scratch.get(target.dtype)
        if found is None:
            count = HALF_BYTES // target.element_size()
            found = [torch.empty(count, dtype=target.dtype) for _ in range((self.world_size + 1) // 2)]
            self._scratch[target.dtype] = found
        return [tensor[: target.numel()] for tensor in found]

    def _check_sizes(self, op: CommOp, counts: list[int]) -> None:
        """Raises: CollectiveMismatch, on every rank, where the ranks' lists are not equally long."""
        for rank in range(self.world_size):
            for other in range(rank):
                theirs, ours = self.control.sizes(rank), self.control.sizes(other)
                if theirs != ours:
                    raise CollectiveMismatch(
                        f"{describe(op)} on rank {self.rank}: rank {other} gives parts of {ours} elements, rank {rank} "
                        f"of {theirs}. Next: give the same sizes on every rank"
                    )

    def _size_mismatch(self, op: CommOp, rank: int, room: int, given: int) -> CollectiveMismatch:
        return CollectiveMismatch(
            f"{describe(op)}: rank {self.rank} has room for {room} bytes from rank {rank}, which gives {given}. "
            f"Next: give equal sizes, or in a list form the sizes that the other ranks have"
        )


def _reduction(op: CommOp) -> Reduction:
    assert op.reduce is not None
    return op.reduce


def _pieces(whole: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """One flat tensor per rank: `whole` is either that already or one tensor of equal parts."""
    if len(whole) == 1:
        flat = whole[0].view(-1)
        return flat.view(count, flat.numel() // count).unbind()
    return [tensor.view(-1) for tensor in whole]


def _chunks(nbytes: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


def _left(nbytes: int, start: int, step: int) -> int:
    """How much of a chunk of `step` at `start` there is in a tensor of `nbytes`."""
    return max(0, min(step, nbytes - start))


def _wrong_size(targets: Sequence[Tensor | None], sizes: Sequence[int]) -> int | None:
    """The first rank whose data do not fit their target; None where all do."""
    for rank, target in enumerate(targets):
        if target is not None and target.nbytes != sizes[rank]:
            return rank
    return None
