"""CPU ranks of one host, through memory that all of them see.

No socket, no copy in the kernel: a rank writes where the others read, and says so by a counter. See `comm/shm/`:
`segment` is the memory, `control` the counters, `collectives` and `messages` what is done with them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lockstep.comm.engine import Engine
from lockstep.comm.local_exchange import exchange as exchange_alone
from lockstep.comm.op import DONE, AllWork, CommOp, Work, describe
from lockstep.comm.reduction import is_reducible
from lockstep.comm.shm.collectives import Collectives
from lockstep.comm.shm.control import Control, control_bytes
from lockstep.comm.shm.messages import Mail
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.post import Post
from lockstep.comm.shm.segment import (
    PAGE,
    Heap,
    Segment,
    SegmentFile,
    capacity_of,
    default_directory,
    reserve,
    shortage,
)
from lockstep.comm.shm.staging import SLOT_BYTES, Staging
from lockstep.comm.shm.waiting import Parking, best_parking
from lockstep.comm.transport import Transport
from lockstep.errors import ConfigError, SharedMemoryUnavailable, TransportClosed

Exchange = Callable[[Any], list[Any]]  # gives every rank's JSON value in rank order; collective

_TOKEN_BYTES = 64  # at the start of the header: proves that two ranks see the same memory


@final
class ShmTransport(Transport):
    """The operations of one group of ranks on one host.

    Messages and collectives are independent of each other; so are different groups. What is submitted asynchronously
    advances on a thread of the group, what is waited for at once in the thread that waits.
    Memory: 1 MiB per rank and group for staging, and 0.6 MiB for each pair of ranks that exchange messages.
    """

    def __init__(
        self,
        host: _Host,
        control_at: int,
        members: Sequence[int],
        global_ranks: Sequence[int],
        beneath: Transport | None = None,
    ) -> None:
        """`members`: rank in this group -> rank in the segment. `control_at`: the group's words, zeroed."""
        self.name = "shm"
        self.rank = list(members).index(host.rank)
        self.world_size = len(members)
        self.global_ranks = tuple(global_ranks)
        self.device = torch.device("cpu")
        self.timeout_s = host.timeout_s
        self.beneath = beneath
        self._host = host
        self._members = tuple(members)
        self._control = Control(host.segment, control_at, members, self.rank, host.peers, host.parking)
        slot = host.heap.allocate(SLOT_BYTES)
        self._control.put_slot(slot)
        collectives = Collectives(Staging(host.segment, self._control))
        name = f"lockstep-shm-{self.rank}"
        self._engine = Engine(collectives.execute, self._control.patience, self.timeout_s, name)
        post = Post(host.segment, host.heap, self._control)
        self._mail = Mail(post, self._control, self.timeout_s, f"{name}-messages")
        owned = [slot, control_at] if self.rank == 0 and control_at >= host.segment.header_bytes else [slot]
        self._end = weakref.finalize(
            self, _end, host, self._control, self._engine, self._mail, post, owned, os.getpid()
        )

    @classmethod
    def meet(
        cls,
        exchange: Exchange,
        *,
        rank: int,
        world_size: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        directory: str | os.PathLike[str] | None = None,
        parking: Parking | None = None,
        beneath: Transport | None = None,
    ) -> ShmTransport:
        """Share memory with the other ranks; `exchange` is used for that only.

        beneath: a transport of the same ranks that is closed with this one. directory: a file system that lies in
        memory; /dev/shm where there is one. parking: how ranks sleep.
        Collective: every rank of one host.
        Memory: nothing has a name in `directory` once this returns, so nothing stays there, however the ranks end.
        Raises: SharedMemoryUnavailable, on every rank alike.
        """
        place = Path(directory) if directory is not None else default_directory()
        file, offer = _offer(place, rank, world_size)
        host: _Host | None = None
        try:
            offers = exchange(offer)
            problem = next((found["problem"] for found in offers if found["problem"]), "")
            transport: ShmTransport | None = None
            if not problem:
                try:
                    file = file or SegmentFile.open(offers[0]["path"])
                    host = _Host.join(file, offers, rank, timeout_s, str(place), parking or best_parking())
                    transport = cls(host, _TOKEN_BYTES, range(world_size), global_ranks, beneath)
                except (OSError, ValueError, SharedMemoryUnavailable) as error:
                    problem = _not_shared(error, rank, offers[0]["pid"])
            problem = next((found for found in exchange(problem) if found), "")
        finally:
            if file is not None:
                file.close()
        if problem or transport is None:
            if transport is not None:
                transport.beneath = None
                transport.close()
            raise SharedMemoryUnavailable(problem)
        return transport

    def submit(self, op: CommOp) -> Work:
        if not self._end.alive:
            raise TransportClosed(f"{describe(op)}: this communicator was closed on rank {self.rank}")
        if op.kind in ("send", "recv"):
            return self._mail.submit(op)
        if op.kind == "batch_send_recv":
            return AllWork([self._mail.submit(part) for part in op.parts])
        if op.reduce is not None:
            _check_reducible(op)
        if self.world_size == 1:
            exchange_alone([op])
            return DONE
        return self._engine.submit(op)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        mine = next((group for group in groups if self.rank in group), None)
        place = 0
        if mine is not None and mine[0] == self.rank:  # the first of a group makes its memory
            place = -1
            with contextlib.suppress(SharedMemoryUnavailable):  # the others are told by the -1
                place = self._host.new_control(len(mine))
        places = torch.empty(self.world_size, dtype=torch.int64)
        said = torch.tensor([place])
        self.submit(CommOp(-1, "all_gather", (said,), (places,), label="split", async_op=False)).wait()
        if int(places.min()) < 0:
            raise SharedMemoryUnavailable(
                f"split on rank {self.rank}: too little shared memory for a new group on rank {int(places.argmin())}"
            )
        if mine is None:
            return None
        members = [self._members[rank] for rank in mine]
        return ShmTransport(self._host, int(places[mine[0]]), members, [self.global_ranks[rank] for rank in mine])

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        try:
            return self._host.heap.empty(numel, dtype)
        except SharedMemoryUnavailable as error:
            warnings.warn(f"{error}. This rank goes on with ordinary memory, which costs a copy", stacklevel=2)
            return torch.empty(numel, dtype=dtype)

    def close(self) -> None:
        self._end()
        if self.beneath is not None:
            self.beneath.close()


@final
class _Host:
    """What one process has on its host: the segment, its own heap in it, the processes of the others."""

    def __init__(
        self, segment: Segment, heap: Heap, rank: int, peers: Peers, timeout_s: float, parking: Parking
    ) -> None:
        self.segment = segment
        self.heap = heap
        self.rank = rank
        self.peers = peers
        self.timeout_s = timeout_s
        self.parking = parking
        self._retired: list[tuple[Control, list[int]]] = []

    @classmethod
    def join(
        cls, file: SegmentFile, offers: list[Any], rank: int, timeout_s: float, where: str, parking: Parking
    ) -> _Host:
        """Map the segment and see that it is the one rank 0 made.  Raises: OSError, ValueError."""
        first = offers[0]
        segment = Segment(file.fd, first["header_bytes"], len(offers), first["heap_bytes"])
        if segment.map[:_TOKEN_BYTES] != first["token"].encode():
            raise ValueError("it is not the same memory")
        heap = Heap(segment, file.fd, rank, where)
        return cls(segment, heap, rank, Peers([offer["pid"] for offer in offers]), timeout_s, parking)

    def new_control(self, world_size: int) -> int:
        """The words of a new group, zeroed."""
        self.sweep()
        nbytes = control_bytes(world_size)
        place = self.heap.allocate(nbytes)
        self.segment.map[place : place + nbytes] = bytes(nbytes)
        return place

    def retire(self, control: Control, offsets: list[int]) -> None:
        """Give memory of a group back once the slowest of its ranks has left it."""
        self._retired.append((control, offsets))
        self.sweep()

    def sweep(self) -> None:
        still = []
        for control, offsets in self._retired:
            if control.all_left():
                for offset in offsets:
                    self.heap.give_back(offset)
            else:
                still.append((control, offsets))
        self._retired = still


def _end(host: _Host, control: Control, engine: Engine, mail: Mail, post: Post, owned: list[int], owner: int) -> None:
    """Close a transport; also one that nobody holds any more, and at exit those that were forgotten."""
    if os.getpid() != owner:
        return  # a forked child has the object, but is not the rank
    control.patience.closing = True
    control.wake_own_threads()
    engine.close()
    mail.close()
    control.leave()
    host.retire(control, owned + post.offsets)


def _offer(directory: Path, rank: int, world_size: int) -> tuple[SegmentFile | None, dict[str, Any]]:
    """What this rank says first: who it is, and on rank 0 where the memory lies."""
    offer: dict[str, Any] = {"pid": os.getpid(), "problem": ""}
    if rank != 0:
        return None, offer
    header = -(-(_TOKEN_BYTES + control_bytes(world_size)) // PAGE) * PAGE
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
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        os.pwrite(file.fd, token.encode(), 0)
    except OSError as error:
        return file, {**offer, "problem": shortage(str(directory), file.fd, need, error)}
    return file, {**offer, "path": file.path, "token": token, "header_bytes": header, "heap_bytes": heap}


def _not_shared(error: Exception, rank: int, first_pid: int) -> str:
    if isinstance(error, SharedMemoryUnavailable):
        return str(error)
    why = error.strerror if isinstance(error, OSError) else str(error)
    return (
        f"rank {rank} cannot map the memory of rank 0 (pid {first_pid}): {why}. Ranks of different containers or users "
        f"cannot share memory"
    )


def _check_reducible(op: CommOp) -> None:
    """Raises: ConfigError where torch cannot reduce this dtype on a CPU."""
    dtype = op.inputs[0].dtype
    assert op.reduce is not None
    if not is_reducible(dtype, op.reduce):
        raise ConfigError(
            f"{op.kind} of {dtype}: the {op.reduce} of this dtype cannot be computed; convert it first, to float32 say"
        )
