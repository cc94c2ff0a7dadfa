"""The collectives on shared memory that only move data: bytes, whatever they mean.

What lies in the segment is read where it lies. Everything else goes through the slots, whole or in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor

from lockstep.comm.op import CommOp, describe
from lockstep.comm.operands import pieces
from lockstep.comm.shm.staging import HALF_BYTES, Staging, move
from lockstep.errors import CollectiveMismatch


@final
class Moving:
    """The moving collectives of one rank. Every method blocks."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._control = staging.control
        self._base = staging.segment.base
        self._rank = staging.rank
        self._world_size = staging.world_size

    def barrier(self, op: CommOp) -> None:
        """Everybody has come."""
        self._staging.begin(op)
        self._staging.meet_and_check(op)

    def broadcast(self, op: CommOp) -> None:
        """Every rank's tensor becomes the root's."""
        target = op.outputs[0]
        is_root = self._rank == op.peer
        if is_root:
            move(target.data_ptr(), op.inputs[0].data_ptr(), target.nbytes)
        fits = target.nbytes <= HALF_BYTES
        self._staging.begin(op, target.numel(), target if is_root and not fits else None)
        if fits and is_root:
            self._staging.put(target.data_ptr(), target.nbytes)
        self._staging.meet_and_check(op)
        place = self._control.announced(op.partner).place
        if fits:
            if not is_root:
                self._staging.take(target.data_ptr(), target.nbytes, op.partner)
        elif place:
            if not is_root:
                move(target.data_ptr(), self._base + place - 1, target.nbytes)
            self._control.meet(op)
        else:
            for start, nbytes in _chunks(target.nbytes, HALF_BYTES):
                self._staging.turn()
                if is_root:
                    self._staging.put(target.data_ptr() + start, nbytes)
                self._control.meet(op)
                if not is_root:
                    self._staging.take(target.data_ptr() + start, nbytes, op.partner)

    def all_gather(self, op: CommOp) -> None:
        """Every rank has every rank's tensor."""
        self._collect(op, op.inputs[0], pieces(op.outputs, self._world_size))

    def gather(self, op: CommOp) -> None:
        """The root has every rank's tensor."""
        self._collect(op, op.inputs[0], op.outputs)

    def _collect(self, op: CommOp, mine: Tensor, targets: Sequence[Tensor]) -> None:
        """Every rank's tensor goes to the ranks that have `targets`, one for each rank. Sizes may differ."""
        fits = mine.nbytes <= HALF_BYTES
        self._staging.begin(op, mine.nbytes, mine)
        if fits:
            self._staging.put(mine.data_ptr(), mine.nbytes)
        self._staging.meet_and_check(op)
        said = [self._control.announced(rank) for rank in range(self._world_size)]
        sizes = [announcement.numel for announcement in said]
        wrong = _wrong_size(targets, sizes)
        if wrong is not None:
            targets = ()  # it is raised at the end: the others count on this rank's ticks
        elif targets:
            own = targets[self._rank]
            move(own.data_ptr(), mine.data_ptr(), own.nbytes)
        coming = [(rank, target) for rank, target in enumerate(targets) if rank != self._rank]
        if max(sizes) <= HALF_BYTES:
            for rank, target in coming:
                self._staging.take(target.data_ptr(), target.nbytes, rank)
        elif all(announcement.place or not announcement.numel for announcement in said):
            for rank, target in coming:
                move(target.data_ptr(), self._base + said[rank].place - 1, target.nbytes)
            self._control.meet(op)
        else:
            for start, _ in _chunks(max(sizes), HALF_BYTES):
                self._staging.turn()
                self._staging.put(mine.data_ptr() + start, _left(mine.nbytes, start, HALF_BYTES))
                self._control.meet(op)
                for rank, target in coming:
                    self._staging.take(target.data_ptr() + start, _left(target.nbytes, start, HALF_BYTES), rank)
        if wrong is not None:
            raise self._size_mismatch(op, *wrong)

    def scatter(self, op: CommOp) -> None:
        """Every rank has its piece of the root's list."""
        self._deal(op, op.inputs, [op.outputs[0] if rank == op.peer else None for rank in range(self._world_size)])

    def all_to_all(self, op: CommOp) -> None:
        """Every rank has its piece of every rank's list."""
        self._deal(op, op.inputs, op.outputs)

    def _deal(self, op: CommOp, sources: Sequence[Tensor], targets: Sequence[Tensor | None]) -> None:
        """Piece r of every rank that has `sources` goes to rank r, which takes it into its target for that rank."""
        self._control.put_sizes([source.nbytes for source in sources] or [0] * self._world_size)
        self._staging.begin(op)
        self._staging.meet_and_check(op)
        sizes = [self._control.sizes(rank) for rank in range(self._world_size)]
        wrong = _wrong_size(targets, [row[self._rank] for row in sizes])
        if wrong is not None:
            targets = ()
        room = HALF_BYTES // self._world_size // 64 * 64
        for start, _ in _chunks(max(max(row) for row in sizes), room):
            self._staging.turn()
            for rank, source in enumerate(sources):
                self._staging.put(source.data_ptr() + start, _left(source.nbytes, start, room), rank * room)
            self._control.meet(op)
            for rank, target in enumerate(targets):
                if target is not None:
                    nbytes = _left(target.nbytes, start, room)
                    self._staging.take(target.data_ptr() + start, nbytes, rank, self._rank * room)
        if wrong is not None:
            raise self._size_mismatch(op, *wrong)

    def _size_mismatch(self, op: CommOp, rank: int, room: int, given: int) -> CollectiveMismatch:
        return CollectiveMismatch(
            f"{describe(op)}: rank {self._rank} has room for {room} bytes from rank {rank}, which gives {given}. "
            f"Next: give equal sizes, or in a list form the sizes that the other ranks have"
        )


def _chunks(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(step, nbytes - start)) for start in range(0, nbytes, step))


def _left(nbytes: int, start: int, step: int) -> int:
    """How much of a chunk of `step` at `start` there is in a tensor of `nbytes`."""
    return max(0, min(step, nbytes - start))


def _wrong_size(targets: Sequence[Tensor | None], sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """The first rank whose data do not fit their target, the room there is, and what it gives; None where all fit."""
    for rank, target in enumerate(targets):
        if target is not None and target.nbytes != sizes[rank]:
            return rank, target.nbytes, sizes[rank]
    return None
