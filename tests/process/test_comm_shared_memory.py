"""What `Communicator.shared` holds: not another's before the last rank has let go, and none is lost."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import warnings

import pytest
import torch
from torch import Tensor

from comm_cases import same
from lockstep.comm.communicator import Communicator
from lockstep.comm.shm import segment
from lockstep.comm.shm_transport import ShmTransport
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveMismatch
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes
from shared_segments import mapped_segments
from shm_ranks import goes_on, segment_bytes, share, shared

MIB = 2**20
PAGE = 4096


def have(comm: Communicator, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = comm.shared(numel, dtype)
    assert tensor is not None
    return tensor


def in_every_order(comm: Communicator) -> None:
    """A block stays while one rank has it, whichever; then its memory goes, and comes again as zeros."""
    with shared(comm) as ours:
        goes_on(ours)  # what the group itself needs is there
        comm.barrier()
        before = segment_bytes()
        for order in itertools.permutations(range(comm.world_size)):
            comm.barrier()
            held = [have(ours, MIB)[17:20]]  # a view keeps all of it
            comm.barrier()
            assert segment_bytes() == before + 4 * MIB + PAGE
            for number, rank in enumerate(order):
                if number == 1 and ours.rank == 0:
                    other = ours.empty(100).fill_(7)  # takes no part of it
                    del other
                if rank == ours.rank:
                    held[0].fill_(rank)
                    held.clear()
                comm.barrier()
            probe = have(ours, 3)  # rank 0 looks around when it gives the next one
            same(probe, torch.zeros(3))
            comm.barrier()
            assert segment_bytes() == before + 2 * PAGE
            del probe
        comm.barrier()


def test_memory_goes_back_when_the_last_rank_lets_go() -> None:
    run_processes(3, in_every_order)


def used_again(comm: Communicator) -> int:
    """Fill, let go at different moments, ask again: what is new is zeros, and what is held keeps its values."""
    with shared(comm) as ours:
        addresses = set()
        held: list[tuple[Tensor, float]] = []
        for number in range(60):
            tensor = have(ours, 5000 + 700 * (number % 3))
            addresses.add(tensor.data_ptr())
            assert not tensor.any()
            ours.barrier()
            if number % ours.world_size == ours.rank:
                tensor.fill_(number + 1)
            ours.barrier()
            held.append((tensor, number + 1.0))
            del tensor
            while len(held) > 1 + (number + ours.rank) % 3:
                held.pop(0)
            for kept, expected in held:
                same(kept, torch.full_like(kept, expected))
            ours.barrier()
        return len(addresses)


def test_memory_is_used_again() -> None:
    for places in run_processes(3, used_again):
        assert places < 30


def outlives(comm: Communicator) -> None:
    before = mapped_segments()
    ours = share(comm)
    group = ours.split(0)
    assert group is not None
    tensor = have(group, 1000)
    group.barrier()
    tensor[ours.rank] = ours.rank + 1
    group.barrier()
    group.close()
    ours.close()
    del group, ours
    gc.collect()
    comm.barrier()
    assert tensor[: comm.world_size].tolist() == [rank + 1 for rank in range(comm.world_size)]
    assert mapped_segments() != before
    del tensor
    gc.collect()
    assert wait_until(lambda: mapped_segments() == before, 5)


def test_it_outlives_the_communicator_and_leaves_nothing() -> None:
    run_processes(2, outlives)


def without_room(comm: Communicator) -> list[str]:
    """More than the file system holds; more than the machine has left. None on all ranks, and nothing is taken."""
    with shared(comm) as ours, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        goes_on(ours)
        comm.barrier()
        before = segment_bytes()
        comm.barrier()
        assert ours.shared(2**42) is None
        left, segment.free_memory = segment.free_memory, lambda: 0.0
        try:
            assert ours.shared(8 * MIB) is None
        finally:
            segment.free_memory = left
        assert segment_bytes() == before
        comm.barrier()
        tensor = have(ours, 8 * MIB)
        comm.barrier()
        tensor[ours.rank] = 1
        comm.barrier()
        assert tensor[: ours.world_size].all()
    return [str(warning.message) for warning in caught]


def test_none_where_there_is_no_room() -> None:
    """One warning, from the rank that has to find the room."""
    first, *others = run_processes(3, without_room)
    assert others == [[], []]
    (text,) = first
    assert f"{4 * 2**42 + PAGE} bytes are needed" in text


def refused(comm: Communicator) -> None:
    with shared(comm) as ours:
        goes_on(ours)
        comm.barrier()
        before = segment_bytes()
        comm.barrier()
        with pytest.raises(CollectiveMismatch, match=f"rank 0: {MIB} x .*\n  rank 1: {MIB + 1} x "):
            ours.shared(MIB + ours.rank)
        comm.barrier()
        assert segment_bytes() == before
        comm.barrier()


def test_what_was_refused_takes_no_memory() -> None:
    run_processes(2, refused)


def forked(comm: Communicator) -> None:
    with shared(comm) as ours:
        tensor = have(ours, 1000)
        comm.barrier()
        tensor[ours.rank] = 1
        comm.barrier()
        before = segment_bytes()
        comm.barrier()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                del tensor
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert status == 0
        comm.barrier()
        other = have(ours, 1000)
        assert segment_bytes() == before + 2 * PAGE
        assert not other.any()
        assert tensor[:2].all()
        comm.barrier()


def test_a_forked_child_lets_nothing_go() -> None:
    run_processes(2, forked)


def one_is_killed(comm: Communicator) -> str:
    """What a rank that is no more had counts as let go."""
    ours = share(comm)
    group = ours.split(0 if ours.rank != 2 else 1)
    assert group is not None
    goes_on(group)
    comm.barrier()
    before = segment_bytes()
    comm.barrier()
    tensor = have(ours, MIB)
    comm.barrier()
    if ours.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert isinstance(ours.transport, ShmTransport)
    peers = ours.transport._host.peers
    assert wait_until(lambda: peers.has_ended(2), 20)
    del tensor
    group.barrier()
    probe = have(group, 3)
    group.barrier()
    assert segment_bytes() == before + 2 * PAGE
    group.barrier()
    del probe
    group.close()
    ours.close()
    return "went on"


def test_a_killed_rank_holds_nothing() -> None:
    with pytest.raises(RankFailed, match="rank 2 of 3") as raised:
        run_processes(3, one_is_killed, timeout_s=60)
    assert raised.value.results == {0: "went on", 1: "went on"}
