"""A process group ends when it is destroyed, whoever still holds a wrapper: its threads would abort some exits."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lockstep
from lockstep import Communicator, DistributedDataParallel
from lockstep.comm.process_group import register_backend
from lockstep.comm.waiting import wait_until
from lockstep.testing.worlds import run_processes
from shared_segments import kept_segments, mapped_segments


def gloo_threads() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            if "gloo" in Path(f"/proc/self/task/{task}/comm").read_text():
                found.add(task)
    return found


def train_and_close(rank: int, how: str) -> tuple[bool, int, int]:
    """Whether the group has ended; how many threads it had, and how many of them are left."""
    others = gloo_threads()  # of groups of earlier tests: torch's own FSDP keeps its, for a while
    if how == "init":
        comm = lockstep.init(rank=0, world_size=1, verbose=False)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    wrapper = DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(3):
        wrapper(torch.randn(2, 2)).sum().backward()
    of_group = gloo_threads() - others
    if how == "init":
        comm.close()
    else:
        dist.destroy_process_group()
    wait_until(lambda: not of_group & gloo_threads(), 20)  # who has joined a thread may still see it for a moment
    return group() is None, len(of_group), len(of_group & gloo_threads())


def test_a_group_of_init_ends_with_its_communicator() -> None:
    assert run_processes(1, train_and_close, "init", connect=False)[0][0]


def test_a_group_of_the_user_ends_with_its_destruction() -> None:
    ended, of_group, left = run_processes(1, train_and_close, "user", connect=False)[0]
    assert ended
    assert of_group > 0
    assert left == 0


def cut_and_destroy(rank: int, folder: str, backend: str) -> list[int]:
    """Segments left after each of three lives of the default group, whose meshes torch's caches of DTensors keep."""
    register_backend()
    before = {segment.name for segment in mapped_segments()}
    left: list[int] = []
    for life in range(3):
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}{life}", rank=rank, world_size=2)
        model = lockstep.fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        model(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        dist.barrier()
        del model
        dist.destroy_process_group()
        left.append(len(kept_segments(before) - before))
    return left


@pytest.mark.parametrize(("backend", "first"), [("lockstep", 0), ("gloo", 1)])
def test_a_group_that_torch_keeps_gives_its_memory_back(backend: str, first: int, tmp_path: Path) -> None:
    """Of Gloo nobody says that it was destroyed: its memory goes when the next group's is asked for."""
    for left in run_processes(2, cut_and_destroy, str(tmp_path), backend, connect=False):
        assert left == [first, 0, 0]


def split_and_close(comm: Communicator, times: int) -> None:
    for _ in range(times):
        part = comm.transport.split([range(comm.world_size)])
        assert part is not None
        part.close()


def test_a_group_may_be_closed_as_soon_as_it_is_made() -> None:
    """Others may still connect: one of some sixty closed what another connected to, where nobody waited for that."""
    run_processes(3, split_and_close, 150)
