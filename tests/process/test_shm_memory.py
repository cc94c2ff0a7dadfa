"""What ranks on shared memory hold: it goes back when it is not needed, and nothing else goes with it."""

from __future__ import annotations

import atexit
import gc
import os
import threading
from typing import Any

import torch
from torch import Tensor

from comm_cases import same
from leaks import open_files
from lockstep.comm.communicator import Communicator
from lockstep.comm.waiting import wait_until
from lockstep.testing.worlds import close_pools, run_processes
from shared_segments import mapped_segments
from shm_ranks import (
    lies_in_segment,
    named_memory,
    named_since,
    segment_bytes,
    segment_files,
    share,
    shared,
)

MIB = 2**20


def use(comm: Communicator) -> None:
    """Some of everything: threads, channels, slots."""
    peer = (comm.rank + 1) % comm.world_size
    from_peer = (comm.rank - 1) % comm.world_size
    works = [comm.all_reduce(comm.empty(100_000).fill_(1), async_op=True)]
    works += [comm.isend(torch.ones(100_000), peer), comm.irecv(torch.ones(100_000), from_peer)]
    for work in works:
        work.wait()
    comm.barrier()


def holdings() -> tuple[set[int], int, list[tuple[int, int]]]:
    return open_files(), threading.active_count(), mapped_segments()


def met_and_closed(comm: Communicator) -> None:
    with shared(comm) as ours:
        use(ours)
    del ours
    before = holdings()
    for number in range(20):
        ours = share(comm)
        group = ours.split(ours.rank % 2 if number % 2 else 0)
        assert group is not None
        use(ours)
        if group.world_size > 1:
            use(group)
        kept = ours.empty(1000).fill_(number)
        if number % 4 == 1:
            group.close()
        if number % 4 != 2:
            ours.close()
        del ours, group
        same(kept, torch.full((1000,), float(number)))  # it outlives the communicator
    del kept
    gc.collect()
    assert wait_until(lambda: holdings() == before, 5), (before, holdings())


def test_communicators_leave_no_file_thread_or_mapping() -> None:
    close_pools()  # what earlier jobs have left may go while this one counts
    run_processes(3, met_and_closed)


def one_file_for_this_user(comm: Communicator) -> tuple[int, set[str]]:
    before = named_memory()
    with shared(comm):
        modes = {stat.st_mode & 0o777 for stat in segment_files()}
        assert {stat.st_uid for stat in segment_files()} == {os.getuid()}
        (mode,) = modes
        return mode, named_since(before)


def test_the_memory_has_no_name_and_is_this_user_s() -> None:
    assert run_processes(2, one_file_for_this_user) == [(0o600, set())] * 2


def allocated(comm: Communicator) -> None:
    with shared(comm) as ours:
        use(ours)
        comm.barrier()
        before = segment_bytes()
        comm.barrier()
        if ours.rank == 0:
            tensors = [ours.empty(MIB, torch.int64) for _ in range(4)]
            assert all(lies_in_segment(tensor) for tensor in tensors)
            assert segment_bytes() == before + 32 * MIB
            view = tensors.pop()[17:20].fill_(3)
            assert segment_bytes() == before + 32 * MIB  # a view keeps all of it
            del tensors
            assert segment_bytes() == before + 8 * MIB
            del view
            assert segment_bytes() == before
            for _ in range(200):  # the same memory again and again, from any thread
                dropped = [ours.empty(300_000)]
                thread = threading.Thread(target=dropped.clear)
                thread.start()
                thread.join()
            assert segment_bytes() == before
            parameter = torch.nn.Parameter(torch.ones(MIB))
            parameter.grad = ours.empty(MIB)
            (parameter * ours.empty(MIB).fill_(1)).sum().backward()
            parameter.grad = None
            assert segment_bytes() == before
        comm.barrier()


def test_memory_goes_back_with_the_last_tensor() -> None:
    run_processes(2, allocated)


def in_many_threads(comm: Communicator) -> None:
    """No two tensors share memory, whichever threads ask for it."""
    with shared(comm) as ours:
        wrong: list[object] = []

        def body(number: int) -> None:
            held: list[tuple[Tensor, int]] = []
            for round_ in range(150):
                mark = 1000 * number + round_
                held.append((ours.empty((100, 5000, 20_000)[round_ % 3], torch.int64).fill_(mark), mark))
                if len(held) > 10:
                    tensor, mark = held.pop(round_ % 10)
                    if not tensor.eq(mark).all():
                        wrong.append((number, mark, tensor.unique().tolist()))

        threads = [threading.Thread(target=body, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_memory_for_many_threads() -> None:
    run_processes(2, in_many_threads)


def split_often(comm: Communicator) -> int:
    """Closing a group gives its memory back on every rank, whoever closes first."""
    with shared(comm) as ours:
        use(ours)
        sizes = []
        for number in range(201):
            group = ours.split(0)
            assert group is not None
            if number % 10 == 0:
                use(group)
                comm.barrier()
                sizes.append(segment_bytes())
                comm.barrier()
            if number % 2 != ours.rank:
                group.close()
                ours.barrier()
            else:
                ours.barrier()
                if number % 3:
                    group.close()
            del group
        return max(sizes) - sizes[0]


def test_groups_that_come_and_go() -> None:
    for grown in run_processes(2, split_often):
        assert grown <= 8 * MIB  # a few that were closed last


def forked(comm: Communicator) -> None:
    """A forked child that drops tensors, closes, or ends: nothing of the parent's changes."""
    with shared(comm) as ours:
        tensors = [ours.empty(50_000).fill_(number) for number in range(3)]
        use(ours)
        before = segment_bytes()
        comm.barrier()
        child = os.fork()
        if child == 0:
            _drop_everything(ours, tensors)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert segment_bytes() == before
        comm.barrier()
        assert [float(tensor[0]) for tensor in tensors] == [0.0, 1.0, 2.0]
        use(ours)
        again = ours.empty(50_000).fill_(9)
        assert [float(tensor[-1]) for tensor in (*tensors, again)] == [0.0, 1.0, 2.0, 9.0]
        comm.barrier()


def _drop_everything(ours: Communicator, tensors: list[Any]) -> None:
    code = 1
    try:
        tensors.clear()
        ours.close()
        gc.collect()
        atexit._run_exitfuncs()
        code = 0
    finally:
        os._exit(code)


def test_a_forked_child_takes_nothing_along() -> None:
    close_pools()  # what earlier jobs have registered for the end of the process is not to run here
    run_processes(2, forked)
