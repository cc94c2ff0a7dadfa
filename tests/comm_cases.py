"""What every transport must do: one table of cases, run on threads and on real processes.

A case is a function of one rank's communicator that raises where something is wrong. Every rank knows every rank's
data, so each checks its own result against torch on one process. The values are small whole numbers: any order of
summation gives the same.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comm_cases_wrong import arguments_of_other_types, wrong_arguments
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import REDUCTIONS, Reduction, Work
from lockstep.errors import CommError, ConfigError, TransportClosed

SHAPES = ((), (1,), (7,), (3, 5), (2, 0, 3), (0,), (1001,))
REDUCED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128),
)
MOVED = (*REDUCED, torch.int16, torch.uint16, torch.float8_e4m3fn)

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def value(rank: int, shape: tuple[int, ...] = (7,), dtype: torch.dtype = torch.float32) -> Tensor:
    """What rank `rank` holds: whole numbers from 1 to 5."""
    count = math.prod(shape)
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).reshape(shape).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same(left: Tensor, right: Tensor) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert torch.equal(bits(left), bits(right)), f"{left} is not {right}"


def reduced(tensors: list[Tensor], reduce: Reduction) -> Tensor:
    total = functools.reduce(_COMBINE[reduce], tensors[1:], tensors[0].clone())
    if reduce == "mean":
        (torch.view_as_real(total) if total.is_complex() else total).div_(len(tensors))
    return total


def reductions_of(dtype: torch.dtype) -> list[Reduction]:
    if dtype.is_complex:
        return ["sum", "mean"]
    return [reduce for reduce in REDUCTIONS if reduce != "mean" or dtype.is_floating_point]


def strided(tensor: Tensor) -> Tensor:
    """The same numbers in memory that is not contiguous."""
    holder = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    view = holder[..., 0]
    view.copy_(tensor)
    return view


# ---------------------------------------------------------------------- reductions


def all_reduce_every_dtype_and_reduction(comm: Communicator) -> None:
    for dtype in REDUCED:
        for reduce in reductions_of(dtype):
            tensor = value(comm.rank, dtype=dtype)
            comm.all_reduce(tensor, reduce)
            same(tensor, reduced([value(r, dtype=dtype) for r in range(comm.world_size)], reduce))


def all_reduce_every_shape(comm: Communicator) -> None:
    for shape in SHAPES:
        for make in (torch.clone, strided):
            tensor = make(value(comm.rank, shape))
            comm.all_reduce(tensor, "mean")
            same(tensor, reduced([value(r, shape) for r in range(comm.world_size)], "mean"))


def all_reduce_of_views(comm: Communicator) -> None:
    """A transposed matrix, a conjugated tensor, a parameter that needs a gradient."""
    matrix = value(comm.rank, (3, 5)).t()
    comm.all_reduce(matrix)
    same(matrix, reduced([value(r, (3, 5)).t() for r in range(comm.world_size)], "sum"))
    conjugated = torch.complex(value(comm.rank), value(comm.rank + 1)).conj()
    comm.all_reduce(conjugated)
    whole = reduced([torch.complex(value(r), value(r + 1)) for r in range(comm.world_size)], "sum")
    same(conjugated.resolve_conj(), whole.conj().resolve_conj())
    parameter = torch.nn.Parameter(value(comm.rank))
    comm.all_reduce(parameter, "mean")
    same(parameter.detach(), reduced([value(r) for r in range(comm.world_size)], "mean"))


def reduce_to_every_root(comm: Communicator) -> None:
    for root in range(comm.world_size):
        for dtype in (torch.float32, torch.complex64, torch.bool):
            for reduce in reductions_of(dtype):
                tensor = value(comm.rank, (3, 5), dtype)
                comm.reduce(tensor, root, reduce)
                expected = reduced([value(r, (3, 5), dtype) for r in range(comm.world_size)], reduce)
                same(tensor, expected if comm.rank == root else value(comm.rank, (3, 5), dtype))


def reduce_scatter_lists(comm: Communicator) -> None:
    world = range(comm.world_size)
    for sizes in ([4 for _ in world], list(world), [0 for _ in world]):
        for dtype in (torch.float32, torch.complex64, torch.int64):
            for reduce in reductions_of(dtype):
                output = torch.zeros(sizes[comm.rank], dtype=dtype)
                comm.reduce_scatter(output, [value(comm.rank + r, (sizes[r],), dtype) for r in world], reduce)
                mine = [value(r + comm.rank, (sizes[comm.rank],), dtype) for r in world]
                same(output, reduced(mine, reduce))


def reduce_scatter_flat(comm: Communicator) -> None:
    for size in (1, 5, 0):
        whole = value(comm.rank, (comm.world_size * size,))
        expected = reduced([value(r, (comm.world_size * size,)) for r in range(comm.world_size)], "mean")
        expected = expected[comm.rank * size : (comm.rank + 1) * size]
        output = torch.zeros(size)
        comm.reduce_scatter_tensor(output, whole, "mean")
        same(output, expected)
        part = whole[comm.rank * size : (comm.rank + 1) * size]
        comm.reduce_scatter_tensor(part, whole, "mean")
        same(part, expected)


# ---------------------------------------------------------------------- moving data


def broadcast_every_dtype_shape_and_root(comm: Communicator) -> None:
    for root in range(comm.world_size):
        for dtype in MOVED:
            tensor = value(comm.rank, dtype=dtype)
            comm.broadcast(tensor, root)
            same(tensor, value(root, dtype=dtype))
        for shape in SHAPES:
            tensor = strided(value(comm.rank, shape))
            comm.broadcast(tensor, root)
            same(tensor, value(root, shape))


def all_gather_lists(comm: Communicator) -> None:
    world = range(comm.world_size)
    for dtype in MOVED:
        for sizes in ([3 for _ in world], [2 * r for r in world], [abs(5 - r) for r in world], [0 for _ in world]):
            outputs = [torch.zeros(size, dtype=dtype) for size in sizes]
            comm.all_gather(outputs, value(comm.rank, (sizes[comm.rank],), dtype))
            for r, output in enumerate(outputs):
                same(output, value(r, (sizes[r],), dtype))


def all_gather_flat(comm: Communicator) -> None:
    for size in (1, 3, 0):
        for dtype in (torch.float32, torch.complex64, torch.bool, torch.uint16):
            expected = torch.cat([value(r, (size,), dtype) for r in range(comm.world_size)])
            output = torch.zeros(comm.world_size * size, dtype=dtype)
            comm.all_gather_into_tensor(output, value(comm.rank, (size,), dtype))
            same(output, expected)
            part = output.fill_(0)[comm.rank * size : (comm.rank + 1) * size]
            part.copy_(value(comm.rank, (size,), dtype))
            comm.all_gather_into_tensor(output, part)
            same(output, expected)


def gather_and_scatter(comm: Communicator) -> None:
    world = range(comm.world_size)
    for root in world:
        for dtype in (torch.float32, torch.int16, torch.complex64):
            for sizes in ([3 for _ in world], [r + 1 for r in world], list(world), [0 for _ in world]):
                mine = value(comm.rank, (sizes[comm.rank],), dtype)
                outputs = [torch.zeros(size, dtype=dtype) for size in sizes] if comm.rank == root else None
                comm.gather(mine, outputs, root)
                for r, output in enumerate(outputs or ()):
                    same(output, value(r, (sizes[r],), dtype))
                inputs = [value(r, (sizes[r],), dtype) for r in world] if comm.rank == root else None
                back = strided(torch.zeros_like(mine))
                comm.scatter(back, inputs, root)
                same(back, mine)


def all_to_all_uneven(comm: Communicator) -> None:
    world = range(comm.world_size)
    for size in (lambda a, b: 2, lambda a, b: a + 2 * b, lambda a, b: int(a == b), lambda a, b: 0):
        for dtype in (torch.float32, torch.bool, torch.int16):
            inputs = [value(comm.rank + 10 * r, (size(comm.rank, r),), dtype) for r in world]
            outputs = [torch.zeros(size(r, comm.rank), dtype=dtype) for r in world]
            comm.all_to_all(outputs, inputs)
            for r, output in enumerate(outputs):
                same(output, value(r + 10 * comm.rank, (size(r, comm.rank),), dtype))


# ---------------------------------------------------------------------- messages


def messages_around_the_ring(comm: Communicator) -> None:
    if comm.world_size == 1:
        return
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for dtype in MOVED:
        for shape in ((), (5,), (0,)):
            received = torch.zeros(shape, dtype=dtype)
            sending = comm.isend(value(comm.rank, shape, dtype), right)
            comm.recv(received, left)
            sending.wait()
            same(received, value(left, shape, dtype))


def messages_by_tag(comm: Communicator) -> None:
    """The tag decides which receive a message meets, the order among equal tags."""
    if comm.rank == 0 and comm.world_size > 1:
        works = [comm.isend(torch.tensor([number]), 1, tag=number % 2) for number in range(4)]
        for work in works:
            work.wait()
    elif comm.rank == 1:
        received = [strided(torch.zeros(1, dtype=torch.int64)) for _ in range(4)]
        works = [comm.irecv(received[number], 0, tag=number % 2) for number in (1, 3, 0, 2)]
        for work in works:
            work.wait()
        assert [int(tensor) for tensor in received] == [0, 1, 2, 3]


def messages_from_any_rank(comm: Communicator) -> None:
    if comm.rank == 0 and comm.world_size > 1:
        seen = set()
        for _ in range(comm.world_size - 1):
            tensor = torch.zeros(1)
            work = comm.recv(tensor, tag=3)
            assert work.source_rank() == tensor.item()
            seen.add(int(tensor))
        assert seen == set(range(1, comm.world_size))
    elif comm.rank:
        work = comm.send(torch.tensor([float(comm.rank)]), 0, tag=3)
        assert work.source_rank() is None


def batch_that_would_deadlock_one_by_one(comm: Communicator) -> None:
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    if not peers:
        return
    received = {rank: torch.zeros(1001) for rank in peers}
    sends = [comm.send_op(value(comm.rank, (1001,)), rank) for rank in peers]
    recvs = [comm.recv_op(received[rank], rank) for rank in peers]
    work = comm.batch_send_recv([*sends, *recvs], async_op=True)
    work.wait()
    assert work.is_done()
    for rank, tensor in received.items():
        same(tensor, value(rank, (1001,)))


# ---------------------------------------------------------------------- objects, groups, order


def objects_of_json(comm: Communicator) -> None:
    sent = {"rank": comm.rank, "list": [1, 2.5, None, "é" * comm.rank]}
    everyone = [{"rank": r, "list": [1, 2.5, None, "é" * r]} for r in range(comm.world_size)]
    assert comm.all_gather_object(sent) == everyone
    for root in range(comm.world_size):
        assert comm.broadcast_object(sent, root) == everyone[root]
        assert comm.gather_object(sent, root) == (everyone if comm.rank == root else None)


def objects_that_cannot_travel(comm: Communicator) -> None:
    """The rank that has it raises ConfigError, every other one CommError, and the next operation is right again."""
    last = comm.world_size - 1
    for bad, words in ((object(), "only JSON values"), ("x" * (1 << 20), "the limit is")):
        mine = bad if comm.rank == last else 1
        expected, words = (ConfigError, words) if comm.rank == last else (CommError, f"rank {last} had a value")
        for call in (comm.all_gather_object, comm.gather_object, lambda v: comm.broadcast_object(v, last)):
            with pytest.raises(expected, match=words):
                call(mine)
        assert comm.all_gather_object(comm.rank) == list(range(comm.world_size))


def split_into_groups(comm: Communicator) -> None:
    odd = comm.split(comm.rank % 2)
    assert odd is not None
    members = tuple(r for r in range(comm.world_size) if r % 2 == comm.rank % 2)
    assert (odd.global_ranks, odd.rank, odd.world_size) == (members, comm.rank // 2, len(members))
    assert odd.timeout_s == comm.timeout_s
    tensor = value(comm.rank)
    odd.all_reduce(tensor)
    same(tensor, reduced([value(r) for r in members], "sum"))
    nested = odd.split(0, key=-odd.rank)
    assert nested is not None
    assert nested.global_ranks == members[::-1]
    assert nested.all_gather_object(comm.rank) == list(members[::-1])
    if nested.world_size > 1:
        received = torch.zeros(1)
        peer = nested.world_size - 1 - nested.rank
        if peer != nested.rank:
            work = nested.isend(torch.tensor([float(comm.rank)]), peer)
            nested.recv(received, peer)
            work.wait()
            assert received.item() == nested.global_ranks[peer]
    for group in (nested, odd):
        group.close()
    tensor = value(comm.rank)
    comm.all_reduce(tensor)  # the parent goes on
    same(tensor, reduced([value(r) for r in range(comm.world_size)], "sum"))


def split_without_some(comm: Communicator) -> None:
    for repeat in range(2):  # the same groups again, some still open
        group = comm.split(None if comm.rank == 0 else 7, name=f"rest{repeat}")
        assert (group is None) == (comm.rank == 0)
        if group is not None:
            assert group.all_gather_object(comm.rank) == list(range(1, comm.world_size))
    with pytest.raises(ConfigError, match=r"rank 0 passed color=.red."):
        comm.split("red")  # type: ignore[arg-type]


def many_at_once(comm: Communicator) -> None:
    """Asynchronous operations end in any order, but meet in the order they were called."""
    tensors = [value(comm.rank + number, (100 + number,)) for number in range(20)]
    works = [comm.all_reduce(tensor, "mean", async_op=True) for tensor in tensors]
    late = torch.zeros(1)
    works.append(comm.broadcast(late.fill_(comm.rank), comm.world_size - 1, async_op=True))
    for work in reversed(works):
        work.wait()
        work.wait()
        assert work.is_done()
    for number, tensor in enumerate(tensors):
        shape = (100 + number,)
        same(tensor, reduced([value(r + number, shape) for r in range(comm.world_size)], "mean"))
    assert late.item() == comm.world_size - 1


def done_without_waiting(comm: Communicator) -> None:
    """`is_done` alone gets there: for a collective, a send, a receive."""
    works = [comm.all_reduce(torch.ones(3), async_op=True)]
    if comm.world_size > 1:
        works.append(comm.isend(torch.ones(3), (comm.rank + 1) % comm.world_size))
        works.append(comm.irecv(torch.ones(3), (comm.rank - 1) % comm.world_size))
    while not all(work.is_done() for work in works):
        pass
    for work in works:
        work.wait()


def waited_for_by_many_threads(comm: Communicator) -> None:
    """What is left to do at the end, a division or a copy back, is done once, and all return after it."""
    for make in (torch.clone, strided):
        for _ in range(5):
            tensor, seen = make(torch.full((3_000,), 2.0)), list[float]()
            work = comm.all_reduce(tensor, "mean", async_op=True)

            def wait(work: Work = work, last: Tensor = tensor[-1], seen: list[float] = seen) -> None:
                work.wait()
                seen.append(last.item())

            threads = [threading.Thread(target=wait) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert seen == [2.0] * 3
    assert getattr(comm.transport, "pending", 0) == 0, "each is counted once"


def barriers(comm: Communicator) -> None:
    for _ in range(3):
        comm.barrier()
    comm.barrier(async_op=True).wait()


# ---------------------------------------------------------------------- after the end


def closed(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    comm.barrier()
    group.close()
    group.close()
    for call in (group.barrier, lambda: group.send(torch.ones(1), 0), lambda: group.all_reduce(torch.ones(1))):
        with pytest.raises((TransportClosed, ConfigError), match=r"closed communicator|rank itself|ranks 0 to"):
            call()
    with pytest.raises(TransportClosed, match="closed communicator"):
        group.all_gather_object(1)


CASES: dict[str, Callable[[Communicator], None]] = {
    case.__name__: case
    for case in (
        all_reduce_every_dtype_and_reduction,
        all_reduce_every_shape,
        all_reduce_of_views,
        reduce_to_every_root,
        reduce_scatter_lists,
        reduce_scatter_flat,
        broadcast_every_dtype_shape_and_root,
        all_gather_lists,
        all_gather_flat,
        gather_and_scatter,
        all_to_all_uneven,
        messages_around_the_ring,
        messages_by_tag,
        messages_from_any_rank,
        batch_that_would_deadlock_one_by_one,
        objects_of_json,
        objects_that_cannot_travel,
        split_into_groups,
        split_without_some,
        many_at_once,
        done_without_waiting,
        waited_for_by_many_threads,
        barriers,
        wrong_arguments,
        arguments_of_other_types,
        closed,
    )
}


def run_all(comm: Communicator) -> list[str]:
    """Every case, one after the other on one communicator; the names of those that passed."""
    for case in CASES.values():
        case(comm)
    return list(CASES)
