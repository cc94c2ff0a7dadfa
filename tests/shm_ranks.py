"""The ranks of a job over shared memory, and what of it this process holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from comm_cases import same
from lockstep.comm.communicator import Communicator
from lockstep.comm.shm.waiting import Parking, PollingParking
from lockstep.comm.shm_transport import ShmTransport
from lockstep.comm.waiting import wait_until
from shared_segments import mapped_segments

LIMIT_S = 30.0  # of every operation: a test that gets there has failed
_NAMES = Path("/dev/shm")


def share(
    comm: Communicator,
    *,
    timeout_s: float = LIMIT_S,
    parking: Parking | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Communicator:
    """A communicator of the same ranks over shared memory. Collective; close it."""
    transport = ShmTransport.meet(
        comm.all_gather_object,
        rank=comm.rank,
        world_size=comm.world_size,
        global_ranks=comm.global_ranks,
        timeout_s=timeout_s,
        directory=directory,
        parking=parking,
    )
    return Communicator(transport)


@contextlib.contextmanager
def shared(comm: Communicator, *, timeout_s: float = LIMIT_S, parking: Parking | None = None) -> Iterator[Communicator]:
    """`share`, closed at the end."""
    ours = share(comm, timeout_s=timeout_s, parking=parking)
    try:
        yield ours
    finally:
        ours.close()


def on_shm(comm: Communicator, case: Callable[[Communicator], object]) -> object:
    """Run `case` on shared memory between the ranks of `comm`."""
    with shared(comm) as ours:
        return case(ours)


def on_polling_shm(comm: Communicator, case: Callable[[Communicator], object]) -> object:
    """The same, where the system has no futex."""
    with shared(comm, parking=PollingParking()) as ours:
        return case(ours)


def goes_on(comm: Communicator) -> None:
    """The group is in step."""
    for count in (3, 300_000):
        tensor = torch.full((count,), float(comm.rank))
        comm.all_reduce(tensor)
        same(tensor, torch.full((count,), float(sum(range(comm.world_size)))))


def lies_in_segment(tensor: Tensor) -> bool:
    """Whether other processes can see this tensor's memory."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(segment.start <= begin and end <= segment.end for segment in mapped_segments())


def segment_files() -> list[os.stat_result]:
    """The files of segments that this process holds open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if os.readlink(link).endswith("(deleted)") and link.stat().st_size > 2**20:
                found.append(link.stat())
    return found


def segment_bytes() -> int:
    """How much memory the open segments take, of all ranks together."""
    files = {(stat.st_dev, stat.st_ino): stat.st_blocks for stat in segment_files()}
    return 512 * sum(files.values())


def named_memory() -> set[str]:
    """Shared memory of this machine that has a name; without the locks of multiprocessing, which tests beside have."""
    return {name for name in os.listdir(_NAMES) if not name.startswith("sem.mp-")}


def named_since(before: set[str]) -> set[str]:
    """What has got a name and keeps it; other programs' names come and go."""
    new = named_memory() - before
    wait_until(lambda: not new & named_memory(), LIMIT_S)
    return new & named_memory()
