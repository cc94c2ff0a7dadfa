"""The group itself: what goes through its transport and what does not, its works and futures, who else may use it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import default_group, strided
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.process_group import transport_of
from lockstep.comm.shm_transport import ShmTransport
from lockstep.errors import CommError, ConfigError, SharedMemoryUnavailable, TransportClosed
from lockstep.testing.worlds import run_processes


def world() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group


def which_way(rank: int, world_size: int, folder: str) -> None:
    """Every call is one operation of the transport, but for those that are torch's or Gloo's."""
    with default_group("lockstep", folder, rank, world_size):
        group, W = world(), world_size
        one, many = torch.ones(2), torch.ones(2 * W)
        ours: list[Callable[[], object]] = [
            lambda: dist.all_reduce(one),
            lambda: dist.reduce(one, 0),
            lambda: dist.broadcast(one, 0),
            lambda: dist.all_gather([one.clone() for _ in range(W)], one),
            lambda: dist.all_gather_into_tensor(many, one),
            lambda: dist.reduce_scatter(one, [one.clone() for _ in range(W)]),
            lambda: dist.reduce_scatter_tensor(one, many),
            lambda: dist.gather(one, [one.clone() for _ in range(W)] if rank == 0 else None),
            lambda: dist.scatter(one, [one.clone() for _ in range(W)] if rank == 0 else None),
            lambda: dist.all_to_all([one.clone() for _ in range(W)], [one] * W),
            lambda: dist.all_to_all_single(many.clone(), many),
            lambda: dist.barrier(),
            lambda: torch.ops._c10d_functional.wait_tensor(all_reduce(one, "sum", group)),  # from C++
            lambda: group.allreduce(one).wait(),  # the form that DistributedDataParallel.join uses
        ]
        for number, call in enumerate(ours):
            call()
            assert group.comm._collectives == number + 1
        pending = all_reduce(torch.ones(2), "sum", group)
        before = group.comm._collectives
        dist.all_reduce(pending)  # of a class that waits in the dispatcher
        assert torch.as_tensor(pending).tolist() == [W * W] * 2
        dist.all_reduce(torch.tensor([3]), dist.ReduceOp.BAND)
        dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,), check_invariants=True))
        assert group.comm._collectives == before


def test_what_goes_through_the_transport(tmp_path: Path) -> None:
    run_processes(2, which_way, 2, str(tmp_path), connect=False)


def what_gloo_gets_wrong(rank: int, world_size: int, folder: str) -> None:
    """Strided tensors (Gloo reads the memory between their elements), stacked outputs, means of whole numbers."""
    with default_group("lockstep", folder, rank, world_size):
        whole = range(world_size)
        tensor = strided(torch.arange(3.0) + rank)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [sum(i + r for r in whole) for i in range(3)]
        columns = torch.zeros(3, world_size).t()
        dist.all_to_all_single(columns, torch.full((world_size, 3), float(rank)))
        assert columns.tolist() == [[float(r)] * 3 for r in whole]
        stacked = torch.zeros(world_size, 2)
        dist.all_gather_into_tensor(stacked, torch.full((2,), float(rank)))
        assert stacked.tolist() == [[float(r)] * 2 for r in whole]
        for sign in (1, -1):
            mean, total = torch.tensor([sign * (rank + 1)]), sign * sum(r + 1 for r in whole)
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            assert mean.item() == int(total / world_size)  # cut, as NCCL does
        mean = torch.tensor([rank + 1])
        dist.reduce(mean, 0, dist.ReduceOp.AVG)
        assert mean.item() == (int(total / -world_size) if rank == 0 else rank + 1)


def test_what_gloo_cannot(tmp_path: Path) -> None:
    run_processes(2, what_gloo_gets_wrong, 2, str(tmp_path), connect=False)


def works_and_futures(rank: int, world_size: int, folder: str) -> None:
    with default_group("lockstep", folder, rank, world_size):
        tensor = strided(torch.ones(3))
        polled = dist.all_reduce(tensor, async_op=True)
        assert polled is not None
        while not polled.is_completed():
            pass
        assert tensor.tolist() == [world_size] * 3  # also the copy back into strided memory
        assert polled.result()[0] is tensor
        assert polled.get_future().wait()[0] is tensor
        with torch.inference_mode():
            frozen = strided(torch.full((3,), float(rank)))
            work = dist.broadcast(frozen, 1, async_op=True)
        assert work is not None
        assert work.get_future().then(lambda future: future.value()[0].tolist()).wait() == [1.0] * 3
        works = [dist.all_reduce(torch.full((4,), float(number)), async_op=True) for number in range(8)]
        futures = torch.futures.collect_all([work.get_future() for work in works if work is not None]).wait()
        assert [future.wait()[0][0].item() for future in futures] == [number * world_size for number in range(8)]

        def in_a_callback(future: Any) -> Tensor:
            """Begins another operation where the first one's future is told, and awaits it there."""
            next_ = dist.all_reduce(future.value()[0], async_op=True)
            assert next_ is not None
            return next_.get_future().wait()[0]

        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        assert work.get_future().then(in_a_callback).wait().item() == world_size**2
        message = dist.isend(torch.ones(1), 1) if rank == 0 else dist.irecv(torch.ones(1), 0)
        assert message is not None
        with pytest.raises(ConfigError, match="has no future"):
            message.get_future()
        message.wait()


def test_works_and_futures(tmp_path: Path) -> None:
    run_processes(2, works_and_futures, 2, str(tmp_path), connect=False)


def from_two_threads(rank: int, world_size: int, folder: str) -> None:
    """One thread receives, the other one sends and reduces: nothing waits for a lock that the other one holds."""
    with default_group("lockstep", folder, rank, world_size):
        received = torch.zeros(1)
        thread = Thread(target=lambda: dist.recv(received, 1 - rank))
        thread.start()
        for _ in range(20):
            dist.all_reduce(torch.ones(3))
        dist.send(torch.tensor([float(rank)]), 1 - rank)
        thread.join()
        assert received.item() == 1 - rank


def test_threads(tmp_path: Path) -> None:
    run_processes(2, from_two_threads, 2, str(tmp_path), connect=False)


def our_own_code_over_it(rank: int, world_size: int, folder: str) -> None:
    with default_group("lockstep", folder, rank, world_size):
        group = world()
        transport = transport_of(group)
        assert transport is not None
        assert transport_of(dist.new_group(backend="gloo")) is None
        comm = Communicator(transport)
        assert comm.all_gather_object(rank) == list(range(world_size))
        part = comm.split(0, key=-rank)
        assert part is not None
        assert part.all_gather_object(rank) == list(range(world_size))[::-1]
        part.close()
        comm.close()
        dist.barrier()  # closing the communicator left the group alone
        model = lockstep.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert model.module.weight.grad.tolist() == [[0.5, 0.5]] * 2
        over = Communicator(transport)
    with pytest.raises(TransportClosed):
        over.barrier()


def test_our_own_code_over_the_group(tmp_path: Path) -> None:
    run_processes(2, our_own_code_over_it, 2, str(tmp_path), connect=False)


def of_other_devices(rank: int, world_size: int, folder: str) -> None:
    with default_group("lockstep", folder, rank, world_size):
        assert (world().name(), dist.get_backend(), world()._device_types) == (
            "lockstep",
            "lockstep",
            [torch.device("cpu")],
        )
        with pytest.raises(CommError, match=r"cannot carry cuda tensors.*cpu:lockstep,cuda:nccl"):
            world()._get_backend(torch.device("cuda"))
    with default_group("cpu:lockstep,cuda:nccl", folder, rank, world_size):  # nothing of NCCL until it is used
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world_size
        assert [device.type for device in world()._device_types] == ["cpu", "cuda"]
        if not dist.is_nccl_available():
            with pytest.raises(CommError, match="asks for nccl, which this build of torch does not have"):
                world()._get_backend(torch.device("cuda", 0))


def test_other_devices(tmp_path: Path) -> None:
    run_processes(2, of_other_devices, 2, str(tmp_path), connect=False)


def without_shared_memory(rank: int, world_size: int, folder: str) -> list[str]:
    def too_small(*args: object, **kwargs: object) -> ShmTransport:
        raise SharedMemoryUnavailable("/dev/shm is too small: 9 bytes are needed")

    meet = ShmTransport.meet
    ShmTransport.meet = too_small  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as caught, default_group("lockstep", folder, rank, world_size):
            warnings.simplefilter("always")
            transport = transport_of(world())
            assert transport is not None
            assert transport.name == "gloo"
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [world_size] * 3
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
            pending = dist.all_reduce(tensor, async_op=True)
            assert pending is not None
            pending.get_future()
    finally:
        ShmTransport.meet = meet
    return [str(warning.message) for warning in caught if "too small" in str(warning.message)]


def test_gloo_where_memory_cannot_be_shared(tmp_path: Path) -> None:
    first, second = run_processes(2, without_shared_memory, 2, str(tmp_path), connect=False)
    assert len(first) == 1
    assert first[0].endswith("/dev/shm is too small: 9 bytes are needed")
    assert second == []
