"""`Communicator.shared`: one tensor for all ranks, on threads and on shared memory; None where ranks share nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_cases import MOVED, same, value
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import HierarchicalTransport
from lockstep.errors import CollectiveMismatch, ConfigError, TransportClosed
from lockstep.testing.worlds import run_processes, run_threads
from shm_ranks import lies_in_segment, on_shm, shared


def have(comm: Communicator, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = comm.shared(numel, dtype)
    assert tensor is not None
    assert (tensor.shape, tensor.dtype, tensor.device) == ((numel,), dtype, comm.device)
    return tensor


def own(comm: Communicator, numel: int) -> slice:
    """This rank's part of `numel` elements; parts differ in size, and some are empty."""
    each = math.ceil(numel / comm.world_size)
    return slice(min(comm.rank * each, numel), min((comm.rank + 1) * each, numel))


def every_rank_sees_what_one_writes(comm: Communicator) -> None:
    for dtype in MOVED:
        for numel in (0, 1, 3, 1009, 300_001):
            tensor = have(comm, numel, dtype)
            same(tensor, torch.zeros(numel, dtype=dtype))
            comm.barrier()  # from here on others may write
            expected = value(3, (numel,), dtype)
            tensor[own(comm, numel)] = expected[own(comm, numel)]
            comm.barrier()
            same(tensor, expected)


def two_at_once_are_two(comm: Communicator) -> None:
    first, second = have(comm, 1001), have(comm, 1001)
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        first.fill_(1)
        second.fill_(2)
    comm.barrier()
    same(torch.stack([first, second]), torch.tensor([[1.0], [2.0]]).expand(2, 1001).contiguous())


def a_collective_writes_into_it(comm: Communicator) -> None:
    """Its parts are as good as any other memory: this rank's own for the reduction, the whole for none."""
    for count in (5, 200_003):
        tensor = have(comm, comm.world_size * count)
        mine = tensor[comm.rank * count : (comm.rank + 1) * count]
        comm.barrier()
        comm.reduce_scatter_tensor(mine, value(comm.rank, (comm.world_size * count,)))
        comm.barrier()
        same(tensor, sum((value(r, (comm.world_size * count,)) for r in range(comm.world_size)), torch.zeros(())))
        comm.barrier()
        comm.broadcast(mine, comm.world_size - 1)
        comm.barrier()
        last = tensor[-count:]
        same(tensor, last.repeat(comm.world_size))


def for_use_in_every_mode(comm: Communicator) -> None:
    """Made under inference mode, written outside of it, saved by autograd: like any tensor."""
    with torch.inference_mode():
        tensor = have(comm, 12)
    assert not tensor.is_inference()
    comm.barrier()
    tensor[own(comm, 12)] = value(comm.rank, (12,))[own(comm, 12)]
    comm.barrier()
    saved = tensor.detach().requires_grad_()
    loss = (saved * saved).sum()
    comm.barrier()
    if comm.rank == 0 and comm.world_size > 1:
        have_changed = tensor._version
        with torch.no_grad():
            tensor.copy_(tensor.clone())
        assert tensor._version > have_changed
    comm.barrier()
    if comm.rank != 0:
        loss.backward()  # what another rank wrote is no change that this rank's autograd counts
        assert saved.grad is not None
        same(saved.grad, 2 * saved.detach())
    comm.barrier()


def groups_have_their_own(comm: Communicator) -> None:
    """Each group's lies with its own first rank, and outlives the group."""
    group = comm.split(comm.rank % 2, key=-comm.rank)
    assert group is not None
    tensor = have(group, 1001)
    group.barrier()
    if group.rank == group.world_size - 1:
        tensor.fill_(10 + comm.rank % 2)
    group.barrier()
    group.close()
    same(tensor, torch.full((1001,), 10.0 + comm.rank % 2))
    with pytest.raises(TransportClosed, match="shared on a closed communicator"):
        group.shared(1)


def different_tensors_are_refused(comm: Communicator) -> None:
    """Every rank says who asked for what, and the next one is right again."""
    with pytest.raises(ConfigError, match="shared of -1 elements"):
        comm.shared(-1)
    if comm.world_size == 1:
        return
    last = comm.world_size - 1
    for numel, dtype in ((8, torch.float32), (7, torch.int64)):
        words = rf"(?s)different tensors.*rank 0: 7 x torch.float32\n  rank {last}: {numel} x {dtype}\nNext"
        with pytest.raises(CollectiveMismatch, match=words):
            comm.shared(*((numel, dtype) if comm.rank == last else (7, torch.float32)))
        have(comm, 7)


CASES: tuple[Callable[[Communicator], None], ...] = (
    every_rank_sees_what_one_writes,
    two_at_once_are_two,
    a_collective_writes_into_it,
    for_use_in_every_mode,
    groups_have_their_own,
    different_tensors_are_refused,
)


def run_all(comm: Communicator) -> int:
    for case in CASES:
        case(comm)
    return len(CASES)


def run_all_on_shm(comm: Communicator) -> object:
    return on_shm(comm, run_all)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_every_case(run: Callable[..., list[Any]], world_size: int) -> None:
    case = run_all if run is run_threads else run_all_on_shm
    assert run(world_size, case) == [len(CASES)] * world_size


def where_it_lies(comm: Communicator) -> tuple[bool, int]:
    with shared(comm) as ours:
        tensor = have(ours, 5, torch.int8)
        return lies_in_segment(tensor), tensor.data_ptr() % 4096


def test_it_begins_on_a_page_of_the_segment() -> None:
    assert run_processes(2, where_it_lies) == [(True, 0)] * 2


def nothing_is_shared(comm: Communicator) -> bool:
    found = comm.shared(5)
    assert comm.all_gather_object(found is None) == [comm.world_size > 1] * comm.world_size
    return found is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_none_on_gloo(world_size: int) -> None:
    """One rank alone shares with itself."""
    assert run_processes(world_size, nothing_is_shared) == [world_size > 1] * world_size


def nothing_between_hosts(comm: Communicator) -> bool:
    with Communicator(HierarchicalTransport.over(comm.transport, [0, 0, 1], lambda plain: plain)) as hosts:
        return nothing_is_shared(hosts)


def test_none_between_hosts() -> None:
    """Also for those ranks that share a host: none has what another lacks."""
    assert run_threads(3, nothing_between_hosts) == [True] * 3
