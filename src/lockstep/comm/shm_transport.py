"""CPU ranks of one host, through memory that all of them see.

No socket, no copy in the kernel: a rank writes where the others read, and says so by a counter. See `comm/shm/`:
`segment` is the memory, `control` the counters; `moving`, `reducing` and `messages` are what is done with them.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lockstep.comm.engine import Engine
from lockstep.comm.local_exchange import exchange as exchange_alone
from lockstep.comm.op import DONE, AllWork, CommOp, Work, describe
from lockstep.comm.operands import check_on_cpu
from lockstep.comm.shm.announcement import agree_on_tensor
from lockstep.comm.shm.control import Control
from lockstep.comm.shm.host import TOKEN_BYTES, Host, Room, offer_memory, why_not_shared
from lockstep.comm.shm.messages import Mail
from lockstep.comm.shm.moving import Moving
from lockstep.comm.shm.post import Post
from lockstep.comm.shm.reducing import Reducing
from lockstep.comm.shm.segment import SegmentFile, default_directory
from lockstep.comm.shm.staging import SLOT_BYTES, Staging
from lockstep.comm.shm.waiting import Parking, best_parking
from lockstep.comm.transport import Transport, without_traceback
from lockstep.errors import CollectiveMismatch, CommError, SharedMemoryUnavailable, TransportClosed

Exchange = Callable[[Any], list[Any]]  # gives every rank's JSON value in rank order; collective


@final
class ShmTransport(Transport):
    """The operations of one group of ranks on one host.

    Messages and collectives are independent of each other; so are different groups. What is submitted asynchronously
    advances on a thread of the group, what is waited for at once in the thread that waits.
    Memory: 1 MiB per rank and group for staging, and 0.6 MiB for each pair of ranks that exchange messages.
    """

    def __init__(self, host: Host, room: Room, members: Sequence[int], global_ranks: Sequence[int]) -> None:
        """`members`: rank in this group -> rank in the segment. `room`: where the group's memory lies."""
        self.name = "shm"
        self.rank = list(members).index(host.rank)
        self.world_size = len(members)
        self.global_ranks = tuple(global_ranks)
        self.device = torch.device("cpu")
        self.timeout_s = host.timeout_s
        self.beneath: Transport | None = None  # closed with this one
        self._host = host
        self._members = tuple(members)
        self._control = control = host.control_of(room, members)
        control.put_slot(room.slot)
        name = f"lockstep-shm-{self.rank}"
        staging = Staging(host.segment, control)
        execute = partial(_carry_out, control, Reducing(staging), Moving(staging))
        self._engine = Engine(execute, control.patience, self.timeout_s, name)
        post = Post(host.segment, host.heap, control)
        self._mail = Mail(post, control, self.timeout_s, f"{name}-messages")
        parts = (host, control, self._engine, self._mail, post, room)
        self._end = weakref.finalize(self, _end, *parts, os.getpid())
        self._children: weakref.WeakSet[ShmTransport] = weakref.WeakSet()
        self._leaving = threading.RLock()  # an abort in another thread writes nothing after the group was left

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
        file, offer = offer_memory(place, rank, world_size)
        transport: ShmTransport | None = None
        try:
            offers = exchange(offer)
            problem = next((found["problem"] for found in offers if found["problem"]), "")
            if not problem:
                try:
                    file = file or SegmentFile.open(offers[0]["path"])
                    host = Host.join(file, offers, rank, timeout_s, str(place), parking or best_parking())
                    room = Room(TOKEN_BYTES, host.heap.allocate(SLOT_BYTES), owns_control=False)
                    transport = cls(host, room, range(world_size), global_ranks)
                except (OSError, ValueError, SharedMemoryUnavailable) as error:
                    problem = why_not_shared(error, rank, offers[0]["pid"])
            problem = next((found for found in exchange(problem) if found), "")
            if problem or transport is None:
                raise SharedMemoryUnavailable(problem)
        except BaseException:
            if transport is not None:
                transport.close()
            raise
        finally:
            if file is not None:
                file.close()
        transport.beneath = beneath
        return transport

    def submit(self, op: CommOp) -> Work:
        if not self._end.alive:
            raise TransportClosed(f"{describe(op)}: this communicator was closed on rank {self.rank}")
        if op.kind == "batch_send_recv":
            return AllWork([self.submit(part) for part in op.parts])
        if op.algorithm is not None:
            return op.algorithm.start(op)
        check_on_cpu(op)
        if op.kind in ("send", "recv"):
            return self._mail.submit(op, self)
        if self.world_size == 1 and self._engine.patience.aborted is None:
            exchange_alone([op])
            return DONE
        return self._engine.submit(op, self)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        mine = next((group for group in groups if self.rank in group), None)
        room, problem = None, False
        try:
            room = None if mine is None else self._host.new_room(len(mine), owns_control=mine[0] == self.rank)
        except SharedMemoryUnavailable:
            problem = True  # the others are told
        places = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
        said = torch.tensor([-1 if problem else 0 if room is None else room.control], device="cpu")
        try:
            self.submit(CommOp(-1, "all_gather", (said,), (places,), label="split", async_op=False)).wait()
            if int(places.min()) < 0:
                raise SharedMemoryUnavailable(
                    f"split on rank {self.rank}: rank {int(places.argmin())} has too little shared memory for a new "
                    f"group, which takes {SLOT_BYTES} bytes on each rank. Make {default_directory()} larger"
                )
        except CommError:
            if room is not None:
                self._host.give_back(room)
            raise
        if mine is None or room is None:
            return None
        room = room._replace(control=int(places[mine[0]]))
        members = [self._members[rank] for rank in mine]
        try:
            child = ShmTransport(self._host, room, members, [self.global_ranks[rank] for rank in mine])
        except BaseException:  # an interrupt: the others have the group and would wait in it
            self._host.control_of(room, members).leave()
            raise
        self._children.add(child)
        return child

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        try:
            return self._host.heap.empty(numel, dtype)
        except SharedMemoryUnavailable as error:
            self._warn(error)
            return torch.empty(numel, dtype=dtype, device="cpu")

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        commons, given = self._host.commons, -1
        if self.rank == 0:
            try:
                given = commons.give(max(numel, 1) * dtype.itemsize, self._members)
            except SharedMemoryUnavailable as error:  # the others are told
                self._warn(error)
        try:
            offset = agree_on_tensor(self, numel, dtype, given)
        except CollectiveMismatch:
            if given >= 0:
                commons.take_back(given)
            raise
        if offset < 0:
            return None
        whole = commons.view(offset, self._members, self.rank, max(numel, 1), dtype)
        return whole if numel else whole[:0]

    def _warn(self, error: SharedMemoryUnavailable) -> None:
        if not self._host.has_warned:
            self._host.has_warned = True
            text = f"rank {self.rank}: {error}. It goes on with ordinary memory, which costs copies"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def abort(self, error: CommError) -> None:
        for child in tuple(self._children):
            child.abort(error)
        if self._leaving.acquire(blocking=False):  # else it is being closed, which ends everything too
            try:
                if self._end.alive and self._engine.patience.aborted is None:
                    self._engine.patience.aborted = without_traceback(error)
                    control = self._control
                    control.fail(CommError(f"aborted: {error}"))
                    control.wake_own_threads()
            finally:
                self._leaving.release()
        if self.beneath is not None:
            self.beneath.abort(error)

    def close(self) -> None:
        if self._engine.is_mid_operation():  # a signal handler's: what is under way must end first, and the rest later
            self._engine.patience.closing = True
            return
        with self._leaving:
            self._end()
        if self.beneath is not None:
            self.beneath.close()


def _carry_out(control: Control, reducing: Reducing, moving: Moving, op: CommOp) -> None:
    """Do what a collective says, by the method that has the name of its kind; blocks.  Raises: CommError."""
    run = getattr(reducing if op.reduce else moving, op.kind)
    try:
        if op.outputs and op.outputs[0].is_inference():  # only inference mode may write to its tensors
            with torch.inference_mode():
                run(op)
        else:
            run(op)
    except CollectiveMismatch:  # raised where all ranks are in step: the group goes on
        raise
    except BaseException as error:
        control.fail(error, op)
        raise


def _end(host: Host, control: Control, engine: Engine, mail: Mail, post: Post, room: Room, owner: int) -> None:
    """Close a transport; also one that nobody holds any more, and at exit those that were forgotten."""
    if os.getpid() != owner:
        return  # a forked child has the object, but is not the rank
    control.patience.closing = True
    control.wake_own_threads()
    engine.close()
    mail.close()
    control.leave()
    host.retire(control, room, post.offsets)
