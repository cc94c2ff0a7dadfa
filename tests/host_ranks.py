"""Ranks of a job on several hosts, which are all this machine: only those of one host share memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lockstep.comm import choose, preflight
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import HierarchicalTransport
from lockstep.testing.worlds import run_threads


@contextlib.contextmanager
def pretending(rank: int, machines: Sequence[int]) -> Iterator[None]:
    """Let this process, which is one rank, be on machine `machines[rank]`; also for torch's default group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "machine_id", lambda: f"host {machines[rank]}")
        yield


@contextlib.contextmanager
def hosts(comm: Communicator, machines: Sequence[int]) -> Iterator[Communicator]:
    """A communicator of the same processes, each on one of several hosts, as ours get it. Collective."""
    with pretending(comm.rank, machines):
        wide = comm.transport.split([list(range(comm.world_size))])
        assert wide is not None
        with Communicator(choose.fastest(wide)) as ours:
            yield ours


def on_hosts(comm: Communicator, machines: Sequence[int]) -> Communicator:
    """The same threads, each on one of several hosts. Collective; close it."""
    return Communicator(HierarchicalTransport.over(comm.transport, machines, lambda plain: plain))


def run_on_hosts(machines: Sequence[int], fn: Callable[..., Any], *args: Any, timeout_s: float = 30.0) -> list[Any]:
    """`run_threads` with a rank on each of `machines`."""

    def body(comm: Communicator) -> Any:
        with on_hosts(comm, machines) as ours:
            return fn(ours, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "machine_id", lambda: f"host {machines[_rank_of_thread()]}")
        return run_threads(len(machines), body, timeout_s=timeout_s)


def _rank_of_thread() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))
