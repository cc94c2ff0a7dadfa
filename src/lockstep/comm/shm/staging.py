"""Each rank's slot: where it puts what the others shall take.

A slot has two halves that are used in turn. A rank writes into one while others may still read the other; before it
comes back to the first, it has waited for all of them once more. So every `turn` is followed by one `meet`.
"""

from __future__ import annotations

import ctypes
from typing import final

import torch
from torch import Tensor

from lockstep.comm.op import CommOp
from lockstep.comm.shm.control import Control
from lockstep.comm.shm.segment import Segment

HALF_BYTES = 512 * 1024  # half of a usual second-level cache
SLOT_BYTES = 2 * HALF_BYTES

_SMALL_BYTES = 64 * 1024  # below it is cheaper to keep the interpreter's lock than to give it away
_move_small = ctypes.PyDLL(None).memmove
_move_large = ctypes.CDLL(None).memmove
for _move in (_move_small, _move_large):
    _move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _move.restype = None


def move(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses."""
    if nbytes and target != source:
        (_move_small if nbytes <= _SMALL_BYTES else _move_large)(target, source, nbytes)


@final
class Staging:
    """One rank's view of its group's slots, with the phases in which they are used."""

    def __init__(self, segment: Segment, control: Control) -> None:
        self.segment = segment
        self.control = control
        self.rank = control.rank
        self.world_size = control.world_size
        self._slots: list[int] = []  # offsets, known after the first wait
        self._half = 0

    def begin(self, op: CommOp, count: int = 0, tensor: Tensor | None = None) -> bool:
        """Announce an operation; True where `tensor` lies in the segment, so that others may use it there."""
        place = None if tensor is None else self.segment.place_of(tensor)
        self.turn()
        self.control.announce(op, count, 0 if place is None else place + 1)
        return place is not None

    def meet_and_check(self, op: CommOp) -> None:
        """The first wait of an operation.  Raises: CollectiveMismatch where ranks are in different ones."""
        self.control.meet(op)
        if not self._slots:
            self._slots = self.control.slots()
        self.control.check(op)

    def turn(self) -> None:
        """Go on with the other half."""
        self._half ^= HALF_BYTES

    def put(self, address: int, nbytes: int, at: int = 0) -> None:
        """Copy into this rank's slot."""
        move(self.segment.base + self.control.own_slot + self._half + at, address, nbytes)

    def take(self, address: int, nbytes: int, rank: int, at: int = 0) -> None:
        """Copy out of `rank`'s slot. After a wait."""
        move(address, self.segment.base + self._slots[rank] + self._half + at, nbytes)

    def view(self, rank: int, at: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements of `rank`'s slot, `at` bytes from the beginning of the half."""
        return self.segment.view(self._slots[rank] + self._half + at, count, dtype)
