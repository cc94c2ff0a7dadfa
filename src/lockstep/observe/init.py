"""`lockstep.init`: the communicator of all ranks, with a guard over it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.comm import init as comm_init
from lockstep.comm.communicator import Communicator
from lockstep.comm.shm.segment import default_directory
from lockstep.comm.transport import Transport
from lockstep.errors import LockstepError
from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.group_layers import is_watched, watched_by
from lockstep.observe.guard import Guard
from lockstep.observe.last_words import DEBUG
from lockstep.observe.process_guard import current_guard, listen
from lockstep.observe.settings import GuardSettings, Mode
from lockstep.observe.sights import flight_path
from lockstep.observe.torch_watch import attach

if TYPE_CHECKING:
    from typing_extensions import Unpack


def init(*, guard: Mode | None = None, **options: Unpack[comm_init.Options]) -> Communicator:
    """The communicator of all ranks of this job: `with lockstep.init() as comm:`.

    guard: "on", unless LOCKSTEP_GUARD says otherwise: see `GuardSettings`.
    rank, world_size, address, port: None takes torchrun's variables, else Slurm's, else one process; rank 0 says which
    (`verbose`), and `comm.place` holds what was found. LOCKSTEP_ENV=off ignores the environment.
    file: meet in this file, which must not exist yet and which all ranks see, and not at an address.
    device: "cuda" where there is a GPU, else "cpu"; each rank takes the GPU of its local rank.
    backend: torch's name; None also lets CPU ranks of one host share memory, unless LOCKSTEP_SHM=off.
    threads: CPU threads of this rank. None shares the machine's cores among its ranks, unless OMP_NUM_THREADS is set; a
    1 under torchrun counts as not set, because torchrun itself puts it there.
    timeout_s: limit of every operation, also in sub-groups; 600 unless given. start_timeout_s: for all ranks to come.

    Where torch.distributed has a default group already, that is used, for all to come with its timeout, and left alone.
    Collective: every rank of the job, equally often; it blocks until all are there.
    Raises: EnvironmentProblems with all that is wrong, before a socket of the job is opened, and the same on every rank
    where ranks contradict each other; CollectiveTimeout naming the ranks that never came; ConfigError while the
    communicator of an earlier call is open.
    """
    settings = GuardSettings.of(os.environ, guard)
    frame = sys._getframe(1)
    caller = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    try:
        return comm_init.init(partial(guarded, settings), caller, **options)
    except LockstepError as error:
        if DEBUG in os.environ:
            raise
        raise error.with_traceback(None) from None  # its words say all


def guarded(settings: GuardSettings, transport: Transport, machines: Sequence[str], store: Any) -> Transport:
    """`transport` with a guard over it: the one that this process has already, or a new one.

    Collective: every rank of `transport`, which are all of the job.
    """
    if settings.mode == "off" or transport.world_size == 1 or is_watched(transport):
        return transport
    guard = current_guard()
    is_own = guard is None
    if guard is None:
        guard = meet(settings, transport, machines, store)
    if guard is None:
        return transport
    return watched_by(guard, settings.mode, transport, guard.name_of_world(), is_world=True, owns_guard=is_own)


def meet(settings: GuardSettings, transport: Transport, machines: Sequence[str], store: Any) -> Guard | None:
    """A guard for this rank, known to those of all other ranks; None, on all alike, where one cannot have one.

    Collective: every rank. Memory: 320 KiB per rank, in /dev/shm where there is one; nothing keeps a name there.
    """
    comm, rank = Communicator(transport), transport.rank
    here = [r for r, machine in enumerate(machines) if machine == machines[rank]]
    folder, problem = "", ""
    try:
        if rank == here[0]:
            folder = tempfile.mkdtemp(prefix="lockstep-flight-", dir=default_directory())
    except OSError as error:
        problem = str(error)
    try:
        folders: list[str] = comm.all_gather_object(folder, label="guard")
        recorder = None
        try:
            if folders[here[0]]:
                recorder = FlightRecorder(flight_path(folders[here[0]], rank), rank, transport.world_size)
        except OSError as error:
            problem = str(error)
        problem = next((p for p in comm.all_gather_object(problem, label="guard") if p), "")
        if problem or recorder is None:
            if recorder is not None:
                recorder.close()
            if rank == 0:
                text = f"this run has no guard, which needs room in {default_directory()}: {problem}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            return None
        own_store = None if store is None else store.clone()  # a call of the rank's own thread may hold its connection
        board = Board(folders[here[0]], recorder, here, own_store)
        board.open_all()
        guard = Guard(recorder, board, settings)
        comm.barrier(label="guard")  # all have opened all
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    listen(guard)
    guard.before_close.append(attach(guard))
    guard.start()
    return guard
