"""What one process has on its host: the segment, its own heap in it, the processes of the other ranks."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from lockstep.comm.shm.attendance import GONE, SWEPT
from lockstep.comm.shm.commons import Commons
from lockstep.comm.shm.control import Control, control_bytes
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.segment import PAGE, Heap, Segment, SegmentFile, capacity_of, reserve, shortage
from lockstep.comm.shm.staging import SLOT_BYTES
from lockstep.comm.shm.waiting import Parking
from lockstep.errors import SharedMemoryUnavailable

TOKEN_BYTES = 64  # at the start of the header: proves that two ranks see the same memory


class Room(NamedTuple):
    """Where the memory of a group lies."""

    control: int  # the words, of all ranks
    slot: int  # this rank's
    owns_control: bool


@dataclass(eq=False)
class _Retired:
    """A group that this rank has left."""

    control: Control
    room: Room
    offsets: list[int]  # this rank's memory, until it is given back


@final
class Host:
    """What one process has on its host: the segment, its own heap in it, the processes of the others."""

    def __init__(
        self, segment: Segment, heap: Heap, rank: int, peers: Peers, timeout_s: float, parking: Parking
    ) -> None:
        self.segment = segment
        self.heap = heap
        self.rank = rank
        self.peers = peers
        self.commons = Commons(segment, heap, peers)
        self.timeout_s = timeout_s
        self.parking = parking
        self._retired: list[_Retired] = []
        self.has_warned = False  # that the heap is full
        self._sweeping = threading.RLock()  # a group may be closed by the garbage collector, while another one is

    @classmethod
    def join(
        cls, file: SegmentFile, offers: list[Any], rank: int, timeout_s: float, where: str, parking: Parking
    ) -> Host:
        """Map the segment and see that it is the one rank 0 made.  Raises: OSError, ValueError."""
        first = offers[0]
        segment = Segment(file.fd, first["header_bytes"], len(offers), first["heap_bytes"])
        if segment.map[:TOKEN_BYTES] != first["token"].encode():
            raise ValueError("it is not the same memory")
        heap = Heap(segment, file.fd, rank, where)
        return cls(segment, heap, rank, Peers([offer["pid"] for offer in offers]), timeout_s, parking)

    def new_room(self, world_size: int, owns_control: bool) -> Room:
        """This rank's part of the memory of a new group.  Raises: SharedMemoryUnavailable."""
        self.sweep()
        room = Room(0, self.heap.allocate(SLOT_BYTES), owns_control)
        if not owns_control:
            return room
        nbytes = control_bytes(world_size)
        try:
            place = self.heap.allocate(nbytes)
        except SharedMemoryUnavailable:
            self.heap.give_back(room.slot)
            raise
        self.segment.map[place : place + nbytes] = bytes(nbytes)
        return room._replace(control=place)

    def control_of(self, room: Room, members: Sequence[int]) -> Control:
        """This rank's view of the words of a group. `members`: rank in the group -> rank in the segment."""
        index = list(members).index(self.rank)
        return Control(self.segment, room.control, members, index, self.peers, self.parking)

    def give_back(self, room: Room) -> None:
        """Return the memory of a group that was never made."""
        self.heap.give_back(room.slot)
        if room.owns_control:
            self.heap.give_back(room.control)

    def retire(self, control: Control, room: Room, channels: Sequence[int]) -> None:
        """Give memory of a group back once the slowest of its ranks has left it."""
        with self._sweeping:
            self._retired.append(_Retired(control, room, [room.slot, *channels]))
        self.sweep()

    def sweep(self) -> None:
        """Give back what nobody uses any more: first what is this rank's, then the words, when no rank reads them."""
        self.commons.sweep()
        with self._sweeping:
            for group in tuple(self._retired):
                if group.offsets and group.control.attendance.have_all(GONE):
                    while group.offsets:
                        self.heap.give_back(group.offsets.pop())
                    group.control.attendance.say(SWEPT)
                if not group.offsets and (not group.room.owns_control or group.control.attendance.have_all(SWEPT)):
                    self._forget(group)

    def _forget(self, group: _Retired) -> None:
        if group in self._retired:  # the garbage collector may sweep while we do
            self._retired.remove(group)
            if group.room.owns_control:
                self.heap.give_back(group.room.control)


def offer_memory(directory: Path, rank: int, world_size: int) -> tuple[SegmentFile | None, dict[str, Any]]:
    """What this rank says first: who it is, and on rank 0 where the memory lies."""
    offer: dict[str, Any] = {"pid": os.getpid(), "problem": ""}
    if rank != 0:
        return None, offer
    header = -(-(TOKEN_BYTES + control_bytes(world_size)) // PAGE) * PAGE
    need = header + world_size * SLOT_BYTES
    try:
        heap = capacity_of(directory, world_size)
        file = SegmentFile.create(directory, header + world_size * heap)
    except OSError as error:
        return None, {**offer, "problem": f"no file for shared memory can be made in {directory}: {error.strerror}"}
    try:
        free = os.fstatvfs(file.fd)
        if free.f_blocks and free.f_bavail * free.f_frsize < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file.fd, 0, header)
        token = secrets.token_hex(TOKEN_BYTES // 2)
        os.pwrite(file.fd, token.encode(), 0)
    except OSError as error:
        return file, {**offer, "problem": shortage(str(directory), file.fd, need, error)}
    return file, {**offer, "path": file.path, "token": token, "header_bytes": header, "heap_bytes": heap}


def why_not_shared(error: Exception, rank: int, first_pid: int) -> str:
    """The sentence for a rank that cannot take part."""
    if isinstance(error, SharedMemoryUnavailable):
        return str(error)
    why = error.strerror if isinstance(error, OSError) else str(error)
    return (
        f"rank {rank} cannot map the memory of rank 0 (pid {first_pid}): {why}. Ranks of different containers or users "
        f"cannot share memory"
    )
