"""The process of one rank in a pool: takes jobs from its pipe until the pipe ends."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle  # noqa: TID251 - a test's own functions, between its own processes
import random
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport, destroy_default_group, forget_meshes
from lockstep.launch.worker import hear_of_end
from lockstep.testing.failures import RankError

STACKS = signal.SIGUSR1  # makes a rank write the stacks of its threads into its log


class Job(NamedTuple):
    """One call for one rank, in plain types: what fn needs to be found is set before it is unpickled."""

    call: bytes  # pickled (fn, args, kwargs)
    sys_path: list[str]
    directory: str
    environment: dict[str, str]
    rendezvous: str | None  # file URL; None: fn gets its rank instead of a communicator
    timeout_s: float


def serve(rank: int, world_size: int, pipe: Connection, log: str) -> None:
    """Say that it is there; answer each job with a result or a RankError; end its group when all have, and say so."""
    _prepare_process(log)
    pipe.send_bytes(b"")
    while True:
        try:
            job = Job(*pickle.loads(pipe.recv_bytes()))  # noqa: S301 - from the parent process
        except EOFError:
            return
        transport, message = _perform(rank, world_size, job)
        _hear_stacks()
        pipe.send_bytes(message)
        try:
            pipe.recv_bytes()
        except EOFError:
            return
        _tear_down(transport)
        transport = None
        pipe.send_bytes(b"")


def _perform(rank: int, world_size: int, job: Job) -> tuple[TorchTransport | None, bytes]:
    """The job's group and its pickled answer; nothing else of it stays in a variable here."""
    transport: TorchTransport | None = None
    try:
        _prepare_job(rank, job)
        if job.rendezvous is not None:
            transport = TorchTransport.fresh(job.rendezvous, rank, world_size, job.timeout_s)
        fn, args, kwargs = pickle.loads(job.call)  # noqa: S301 - from the parent process
        answer: Any = fn(rank if transport is None else Communicator(transport), *args, **kwargs)
        return transport, pickle.dumps((True, answer))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        message = _pickled_error(error)
        traceback.clear_frames(error.__traceback__)  # locals of `fn` may hold groups, and so keep their sockets open
        _tear_down(transport)  # at once: the other ranks must not wait for this one
        gc.collect()
        return transport, message


def _prepare_process(log: str) -> None:
    hear_of_end(os.getppid(), signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    faulthandler.enable(file=2)
    _hear_stacks()
    torch.set_num_threads(1)


def _hear_stacks() -> None:
    """Again after a job, which may have had a handler of its own: the signal would end this process."""
    faulthandler.unregister(STACKS)  # else it takes its handler for still in place
    faulthandler.register(STACKS, file=2, all_threads=True)


def _prepare_job(rank: int, job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:] = job.sys_path
    os.chdir(job.directory)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(1000 + rank)  # ranks differ on purpose: what must be equal must have been made equal
    random.seed(1000 + rank)


def _tear_down(transport: TorchTransport | None) -> None:
    if transport is not None:
        transport.close()
    destroy_default_group()  # one that the job made itself
    forget_meshes()  # the next job's may look the same, and its groups have other names
    torch.ones((), requires_grad=True).backward()  # of one that raised, autograd keeps nodes until the thread's next


def _pickled_error(error: BaseException) -> bytes:
    told = RankError.of(error)
    try:
        message = pickle.dumps((False, told))
        pickle.loads(message)  # noqa: S301 - made in the line above
    except Exception:  # noqa: BLE001 - an exception class may do anything when pickled; its text is enough
        return pickle.dumps((False, told._replace(exception=None)))
    return message
