"""Ranks on shared memory that call different things: all hear of it, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comm_cases import same
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Work
from lockstep.errors import CollectiveMismatch, ConfigError
from lockstep.testing.worlds import run_processes
from shm_ranks import goes_on, shared


def different_calls(comm: Communicator) -> list[tuple[Callable[[], Work], Callable[[], Work], str]]:
    """What rank 1 calls, what the others call, and words that the error has on every rank."""
    W, rank = comm.world_size, comm.rank
    few, many = torch.ones(6), torch.ones(300_000)
    near = comm.empty(300_000).fill_(1)
    lists = [torch.ones(2) for _ in range(W)]
    other_lists = [torch.ones(2 + r % 2) for r in range(W)]

    def scatter_reduced(inputs: list[Tensor]) -> Work:
        return comm.reduce_scatter(torch.zeros_like(inputs[rank]), inputs)

    return [
        (comm.barrier, lambda: comm.all_reduce(few), "rank 1: barrier"),
        (lambda: comm.all_reduce(few), lambda: comm.broadcast(many), "rank 1: all_reduce float32 6 elements sum"),
        (lambda: comm.all_reduce(few.double()), lambda: comm.all_reduce(few), "rank 1: all_reduce float64"),
        (lambda: comm.all_reduce(few[:5]), lambda: comm.all_reduce(few), "5 elements"),
        (lambda: comm.all_reduce(few), lambda: comm.all_reduce(near), "300000 elements"),
        (lambda: comm.all_reduce(near), lambda: comm.all_reduce(few, async_op=True), "300000 elements"),
        (lambda: comm.all_reduce(few, "max"), lambda: comm.all_reduce(few), "6 elements max"),
        (lambda: comm.broadcast(few, 1), lambda: comm.broadcast(few, 0), "root=1"),
        (lambda: comm.reduce(few, 1), lambda: comm.reduce(few, 0), "root=0"),
        (lambda: comm.all_to_all(lists, lists), lambda: comm.all_gather(lists, lists[0]), "rank 1: all_to_all float32"),
        (lambda: scatter_reduced(lists), lambda: scatter_reduced(other_lists), "same sizes on every rank"),
        (
            lambda: comm.reduce(near, 0),
            lambda: comm.reduce_scatter_tensor(near[: 300_000 // W], near),
            "rank 1: reduce ",
        ),
    ]


def disagree(comm: Communicator) -> None:
    with shared(comm) as ours:
        for call_of_one, call, words in different_calls(ours):
            with pytest.raises(CollectiveMismatch, match=words) as raised:
                (call_of_one if ours.rank == 1 else call)().wait()
            assert f"on rank {ours.rank}" in str(raised.value)
            goes_on(ours)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_call_different_things(world_size: int) -> None:
    run_processes(world_size, disagree)


def sizes_that_do_not_fit(comm: Communicator) -> None:
    """Only the rank whose room is wrong can tell; the others have what they asked for."""
    with shared(comm) as ours:
        for count in (4, 200_000):
            mine = torch.full((count,), float(ours.rank))
            room = [torch.zeros(count) for _ in range(2)]
            wrong = [torch.zeros(count + 1) if r != ours.rank else torch.zeros(count) for r in range(2)]
            calls: list[Callable[[list[Tensor]], Work]] = [
                lambda outputs, mine=mine: ours.all_gather(outputs, mine),
                lambda outputs, mine=mine: ours.all_to_all(outputs, [mine, mine]),
                lambda outputs, mine=mine: ours.gather(mine, outputs if ours.rank == 0 else None, 0),
            ]
            for call in calls:
                if ours.rank == 0:
                    with pytest.raises(CollectiveMismatch, match=rf"room for {4 * count + 4} bytes from rank 1, which"):
                        call(wrong)
                else:
                    call(room)
                goes_on(ours)
            given = [torch.ones(count), torch.ones(count + 2)] if ours.rank == 0 else None
            if ours.rank == 1:
                with pytest.raises(CollectiveMismatch, match=rf"from rank 0, which gives {4 * count + 8}"):
                    ours.scatter(mine, given, 0)
            else:
                ours.scatter(mine, given, 0)
            goes_on(ours)


def test_sizes_that_do_not_fit() -> None:
    run_processes(2, sizes_that_do_not_fit)


def messages_that_do_not_fit(comm: Communicator) -> None:
    with shared(comm) as ours:
        for count, in_segment in ((3, False), (3000, False), (300_000, False), (300_000, True)):
            for wrong in (torch.zeros(count + 1), torch.zeros(count, dtype=torch.int32)):
                if ours.rank == 0:
                    sent = ours.empty(count).fill_(2) if in_segment else torch.full((count,), 2.0)
                    work = ours.isend(sent, 1)
                    if count > 1024:
                        with pytest.raises(CollectiveMismatch, match="rank 1 expects another dtype or size"):
                            work.wait()
                    work = ours.isend(sent, 1)
                    work.wait()
                else:
                    with pytest.raises(CollectiveMismatch, match=rf"but rank 0 sent {4 * count}"):
                        ours.recv(wrong, 0)
                    right = torch.zeros(count)
                    ours.recv(right, 0)
                    same(right, torch.full((count,), 2.0))
        goes_on(ours)


def test_messages_that_do_not_fit() -> None:
    run_processes(2, messages_that_do_not_fit)


def of_another_device(comm: Communicator) -> None:
    """A tensor that is not in this machine's memory is refused before anything is sent, also a default device's."""
    with shared(comm) as ours:
        there = torch.ones(6, device="meta")
        for call in (
            lambda: ours.all_reduce(there),
            lambda: ours.all_gather_into_tensor(torch.ones(6 * ours.world_size), there),
            lambda: ours.broadcast(there),
            lambda: ours.send(there, 1 - ours.rank),
            lambda: ours.irecv(there, 1 - ours.rank),
        ):
            with pytest.raises(ConfigError, match="a tensor on the meta device has no values"):
                call()
        with torch.device("meta"):
            assert {ours.empty(count).device.type for count in (0, 5)} == {"cpu"}
            group = ours.split(0)
            assert group is not None
            ours.all_reduce(torch.ones(300_000, device="cpu"))
            group.close()
        goes_on(ours)


def test_tensors_of_another_device() -> None:
    run_processes(2, of_another_device)
