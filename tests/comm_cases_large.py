"""More of what every transport must do: large tensors, memory of `comm.empty`, many things under way at once.

Sizes lie around the borders of the shared-memory transport: 4 KiB (a letter), 32 KiB (each rank sums for itself), 256
KiB (a piece of the belt), 512 KiB (half a slot). The numbers are those of `comm_cases`, so any order of a sum is exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from comm_cases import reduced, same, strided, value
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Reduction, Work

KIB = 1024
BORDERS = (4 * KIB, 32 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB)


def counts(dtype: torch.dtype, *borders: int) -> list[int]:
    """Numbers of elements just below, at and above these numbers of bytes."""
    return [border // dtype.itemsize + off for border in borders for off in (-1, 0, 1)]


def near_and_far(comm: Communicator) -> list[Callable[[Tensor], Tensor]]:
    """Where a tensor may lie: anywhere; in `comm.empty` memory; there on some ranks only; in the middle of it."""

    def inside(tensor: Tensor) -> Tensor:
        return comm.empty(tensor.numel(), tensor.dtype).copy_(tensor)

    def within(tensor: Tensor) -> Tensor:
        whole = comm.empty(tensor.numel() + 7, tensor.dtype)
        return whole[3 : 3 + tensor.numel()].copy_(tensor)

    return [torch.clone, inside, inside if comm.rank % 2 else torch.clone, within]


def world(comm: Communicator, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What every rank holds."""
    return [value(rank, (count,), dtype) for rank in range(comm.world_size)]


# ---------------------------------------------------------------------- reductions


def all_reduce_around_every_border(comm: Communicator) -> None:
    for dtype, reduce in ((torch.float32, "mean"), (torch.float64, "sum"), (torch.int8, "max")):
        for count in counts(dtype, 32 * KIB, 512 * KIB, 1024 * KIB):
            tensors = world(comm, count, dtype)
            expected = reduced(tensors, reduce)
            for place in near_and_far(comm):
                tensor = place(tensors[comm.rank])
                comm.all_reduce(tensor, reduce)
                same(tensor, expected)


def all_reduce_of_few_elements_for_each_rank(comm: Communicator) -> None:
    """Parts of ranks that are smaller than a cache line, or empty."""
    for count in (1, comm.world_size, 64 * comm.world_size - 1, 64 * comm.world_size, 64 * comm.world_size + 1, 9000):
        for dtype in (torch.bool, torch.complex128):
            tensors = world(comm, count, dtype)
            for place in near_and_far(comm):
                tensor = place(tensors[comm.rank])
                comm.all_reduce(tensor)
                same(tensor, reduced(tensors, "sum"))


def large_views(comm: Communicator) -> None:
    """Tensors that are no plain piece of memory, some of them in memory that all see."""
    shape = (700, 300)
    tensors = [value(rank, shape) for rank in range(comm.world_size)]
    inside = comm.empty(700 * 300).view(shape).copy_(tensors[comm.rank])
    for tensor in (tensors[comm.rank].clone().t(), inside.t(), strided(tensors[comm.rank]).t()):
        comm.all_reduce(tensor)
        same(tensor, reduced(tensors, "sum").t())
    every_other = comm.empty(400_000)[::2].copy_(value(comm.rank, (200_000,)))
    comm.broadcast(every_other, comm.world_size - 1)
    same(every_other, value(comm.world_size - 1, (200_000,)))


def reduce_large(comm: Communicator) -> None:
    for root in {0, comm.world_size - 1}:
        for count in (*counts(torch.float32, 512 * KIB), 300_001):
            tensors = world(comm, count)
            expected = reduced(tensors, "mean")
            for place in near_and_far(comm):
                tensor = place(tensors[comm.rank])
                comm.reduce(tensor, root, "mean")
                same(tensor, expected if comm.rank == root else tensors[comm.rank])


def reduce_scatter_large(comm: Communicator) -> None:
    W, rank = comm.world_size, comm.rank
    for count in (*counts(torch.float32, 512 * KIB // W), 50_021, 200_003):
        wholes = world(comm, W * count)
        mine = slice(rank * count, (rank + 1) * count)
        expected = reduced([whole[mine] for whole in wholes], "sum")
        for place in near_and_far(comm):
            for out in near_and_far(comm)[:2]:
                output, whole = out(torch.zeros(count)), place(wholes[rank])
                comm.reduce_scatter_tensor(output, whole)
                same(output, expected)
                same(whole, wholes[rank])
            whole = place(wholes[rank])
            comm.reduce_scatter_tensor(whole[mine], whole)  # into its own part
            same(whole[mine], expected)
    sizes = [90_001 * (r % 3) + r for r in range(W)]
    inputs = [[value(r + target, (sizes[target],)) for target in range(W)] for r in range(W)]
    output = torch.zeros(sizes[rank])
    comm.reduce_scatter(output, inputs[rank], "mean")
    same(output, reduced([row[rank] for row in inputs], "mean"))


# ---------------------------------------------------------------------- moving data


def broadcast_around_every_border(comm: Communicator) -> None:
    for root in {0, comm.world_size - 1}:
        for count in counts(torch.int16, *BORDERS):
            expected = value(root, (count,), torch.int16)
            for place in near_and_far(comm):
                tensor = place(value(comm.rank, (count,), torch.int16))
                comm.broadcast(tensor, root)
                same(tensor, expected)


def all_gather_large(comm: Communicator) -> None:
    W, rank = comm.world_size, comm.rank
    for count in (*counts(torch.float32, 512 * KIB), 300_007):
        tensors = world(comm, count)
        for place in near_and_far(comm):
            for out in near_and_far(comm)[:2]:
                output = out(torch.zeros(W * count))
                comm.all_gather_into_tensor(output, place(tensors[rank]))
                same(output, torch.cat(tensors))
            output = place(torch.zeros(W * count))
            part = output[rank * count : (rank + 1) * count].copy_(tensors[rank])
            comm.all_gather_into_tensor(output, part)
            same(output, torch.cat(tensors))


def uneven(number: int, rank: int) -> int:
    """Sizes of which some are empty, some small, some of several chunks."""
    return (0, 5, 131_073, 300_001, 131_072, 1023)[(number + rank) % 6]


def all_gather_uneven(comm: Communicator) -> None:
    for number in range(6):
        tensors = [value(r, (uneven(number, r),)) for r in range(comm.world_size)]
        for place in near_and_far(comm):
            outputs = [place(torch.zeros_like(tensor)) for tensor in tensors]
            comm.all_gather(outputs, place(tensors[comm.rank]))
            for output, tensor in zip(outputs, tensors, strict=True):
                same(output, tensor)


def gather_and_scatter_uneven(comm: Communicator) -> None:
    for number in range(6):
        root = number % comm.world_size
        tensors = [value(r, (uneven(number, r),), torch.uint8) for r in range(comm.world_size)]
        for place in near_and_far(comm):
            outputs = [place(torch.zeros_like(tensor)) for tensor in tensors] if comm.rank == root else None
            comm.gather(place(tensors[comm.rank]), outputs, root)
            for output, tensor in zip(outputs or (), tensors, strict=comm.rank == root):
                same(output, tensor)
            back = place(torch.zeros_like(tensors[comm.rank]))
            comm.scatter(back, [place(tensor) for tensor in tensors] if comm.rank == root else None, root)
            same(back, tensors[comm.rank])


def all_to_all_large(comm: Communicator) -> None:
    ranks = range(comm.world_size)
    for number in range(3):
        for place in near_and_far(comm):
            inputs = [place(value(comm.rank + 10 * r, (uneven(number, comm.rank + 2 * r),))) for r in ranks]
            outputs = [place(torch.zeros(uneven(number, r + 2 * comm.rank))) for r in ranks]
            comm.all_to_all(outputs, inputs)
            for r, output in enumerate(outputs):
                same(output, value(r + 10 * comm.rank, (uneven(number, r + 2 * comm.rank),)))


def memory_of_the_communicator(comm: Communicator) -> None:
    """`comm.empty` gives tensors like any others."""
    for dtype in (torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn):
        for count in (0, 1, 1000):
            tensor = comm.empty(count, dtype)
            assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (count,), True)
            assert tensor.device == comm.device
            assert not tensor.requires_grad
    parameter = torch.nn.Parameter(comm.empty(6).copy_(torch.arange(6.0)).view(2, 3))
    (parameter * parameter).sum().backward()
    assert parameter.grad is not None
    same(parameter.grad, 2 * parameter.detach())
    storage = comm.empty(10).fill_(1)[3:5]
    kept = [comm.empty(10).fill_(number) for number in range(5)]
    assert [float(tensor.sum()) for tensor in kept] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert storage.tolist() == [1.0, 1.0]  # a view keeps the memory


def under_inference_mode(comm: Communicator) -> None:
    """What ran first under inference mode does not change what runs later, and the other way round."""
    for count in (5, 20_000, 300_000):
        expected = reduced(world(comm, count), "sum")
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                for place in near_and_far(comm):
                    tensor = place(value(comm.rank, (count,)))
                    comm.all_reduce(tensor)
                    works = [comm.all_reduce(place(value(comm.rank, (count,))), async_op=True) for _ in range(2)]
                    output = torch.zeros(count * comm.world_size)
                    comm.all_gather_into_tensor(output, tensor)
                    for work in works:
                        work.wait()
                    same(tensor.clone(), expected.clone())


# ---------------------------------------------------------------------- messages


def large_messages(comm: Communicator) -> None:
    if comm.world_size == 1:
        return
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for count in (*counts(torch.float32, *BORDERS), 700_003):
        for place in near_and_far(comm):
            received = place(torch.zeros(count))
            sending = comm.isend(place(value(comm.rank, (count,))), right)
            comm.recv(received, left)
            sending.wait()
            same(received, value(left, (count,)))


def many_messages_under_way(comm: Communicator) -> None:
    """More messages than any transport has room for at once, taken last first; small and large."""
    if comm.rank == 0 and comm.world_size > 1:
        works = [comm.isend(value(tag, (10 + 5000 * (tag % 3),)), 1, tag=tag) for tag in range(50)]
        for work in works:
            work.wait()
    elif comm.rank == 1:
        for tag in reversed(range(50)):
            tensor = torch.zeros(10 + 5000 * (tag % 3))
            comm.recv(tensor, 0, tag=tag)
            same(tensor, value(tag, tuple(tensor.shape)))


def messages_in_both_directions(comm: Communicator) -> None:
    """Everybody sends everybody a lot before anybody receives."""
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    sizes = (3, 1024, 1025, 70_000, 200_000, 0)
    works: list[Work] = []
    for number, size in enumerate(sizes):
        works += [comm.isend(value(comm.rank + number, (size,)), peer, tag=7) for peer in peers]
    received = {(peer, number): torch.zeros(size) for peer in peers for number, size in enumerate(sizes)}
    for (peer, _), tensor in received.items():
        works.append(comm.irecv(tensor, peer, tag=7))
    for work in reversed(works):
        work.wait()
    for (peer, number), tensor in received.items():
        same(tensor, value(peer + number, (sizes[number],)))


def a_message_that_is_received_last(comm: Communicator) -> None:
    """Large and small messages that nobody awaits yet are in nobody's way."""
    if comm.rank > 1 or comm.world_size == 1:
        return
    peer = 1 - comm.rank
    unread = [comm.isend(value(7, (size,)), peer, tag=1) for size in (300_000, 3)]
    for round_ in range(20):
        sending = comm.isend(value(round_, (2000 * round_,)), peer, tag=2)
        tensor = torch.zeros(2000 * round_)
        comm.recv(tensor, peer, tag=2)
        sending.wait()
        same(tensor, value(round_, (2000 * round_,)))
    for size in (300_000, 3):
        tensor = torch.zeros(size)
        comm.recv(tensor, peer, tag=1)
        same(tensor, value(7, (size,)))
    for work in unread:
        work.wait()


def messages_from_any_rank_beside_others(comm: Communicator) -> None:
    if comm.rank:
        for number in range(6):
            comm.send(torch.tensor([float(comm.rank)] * (1 + 3000 * number)), 0, tag=number % 2)
        return
    seen = []
    for number in range(6):
        for _ in range(comm.world_size - 1):
            tensor = torch.zeros(1 + 3000 * number)
            work = comm.recv(tensor, tag=number % 2)
            source = work.source_rank()
            assert tensor.eq(source).all()
            seen.append((number, source))
    assert sorted(seen) == [(number, rank) for number in range(6) for rank in range(1, comm.world_size)]


# ---------------------------------------------------------------------- several things at once


def messages_beside_collectives(comm: Communicator) -> None:
    """Each goes on while the other waits."""
    W, rank = comm.world_size, comm.rank
    for count in (10, 200_000):
        received = [torch.zeros(count) for _ in range(W)]
        works = [comm.irecv(received[peer], peer, tag=4) for peer in range(W) if peer != rank]
        tensor = value(rank, (count,))
        reducing = comm.all_reduce(tensor, async_op=True)
        works += [comm.isend(value(rank, (count,)), peer, tag=4) for peer in range(W) if peer != rank]
        gathered = torch.zeros(W * count)
        comm.all_gather_into_tensor(gathered, value(rank, (count,)))
        for work in works:
            work.wait()
        reducing.wait()
        same(tensor, reduced(world(comm, count), "sum"))
        same(gathered, torch.cat(world(comm, count)))
        for peer in range(W):
            same(received[peer], value(peer, (count,)) if peer != rank else torch.zeros(count))


def the_first_of_two_is_waited_for(comm: Communicator) -> None:
    """An operation that has ended keeps nobody waiting for later ones, which here need a message first."""
    W, rank = comm.world_size, comm.rank
    if W == 1:
        return
    for _ in range(3):
        first, second, word = value(rank), value(rank, (9,)), torch.zeros(1)
        if rank == 0:
            works = [comm.all_reduce(tensor, async_op=True) for tensor in (first, second)]
            for _ in range(20):  # meanwhile the operations have begun
                comm.send(word, W - 1, tag=1)
                comm.recv(word, W - 1, tag=1)
            comm.send(word, W - 1, tag=2)
            works[0].wait()
            comm.send(word, W - 1, tag=3)
            works[1].wait()
        else:
            if rank == W - 1:
                for _ in range(20):
                    comm.recv(word, 0, tag=1)
                    comm.send(word, 0, tag=1)
                comm.recv(word, 0, tag=2)
            comm.all_reduce(first)
            if rank == W - 1:
                comm.recv(word, 0, tag=3)
            comm.all_reduce(second)
        same(first, reduced(world(comm, 7), "sum"))
        same(second, reduced(world(comm, 9), "sum"))


def blocking_between_asynchronous(comm: Communicator) -> None:
    W, rank = comm.world_size, comm.rank
    works: list[Work] = []
    checks: list[tuple[Tensor, Tensor]] = []
    for number in range(30):
        count = (7, 9000, 140_000)[number % 3] + number
        reduce: Reduction = ("sum", "mean", "max")[number % 3]
        place = near_and_far(comm)[number % 4]
        tensor = place(value(rank + number, (count,)))
        expected = reduced([value(r + number, (count,)) for r in range(W)], reduce)
        if number % 5 == 3:
            tensor, expected = place(value(rank, (count,))), value(number % W, (count,))
            works.append(comm.broadcast(tensor, number % W, async_op=number % 2 == 0))
        else:
            works.append(comm.all_reduce(tensor, reduce, async_op=number % 4 != 0))
        checks.append((tensor, expected))
        if number % 7 == 6:
            works[number // 2].wait()
            same(*checks[number // 2])
    same_twice = value(rank)
    twice = [comm.all_reduce(same_twice, "max", async_op=True) for _ in range(2)]  # one after the other, on one tensor
    for work in (*works[::-1], *twice):
        work.wait()
    for tensor, expected in checks:
        same(tensor, expected)
    same(same_twice, reduced(world(comm, 7), "max"))


def several_groups_in_any_order(comm: Communicator) -> None:
    """Ranks use their groups in different order; each group's own order is what counts."""
    rank = comm.rank
    parts = [comm.split(0), comm.split(rank % 2), comm.split(rank // 2), comm.split(0, key=-rank)]
    groups = [group for group in parts if group is not None]
    order = groups[rank % 4 :] + groups[: rank % 4]
    for count in (5, 30_000, 200_000):
        tensors = {id(group): order[0].empty(count).copy_(value(rank, (count,))) for group in order}
        works = [group.all_reduce(tensors[id(group)], async_op=True) for group in order]
        works += [group.barrier(async_op=True) for group in reversed(order)]
        for work in works:
            work.wait()
        for group in groups:
            same(tensors[id(group)], reduced([value(r, (count,)) for r in group.global_ranks], "sum"))
    for group in order:
        group.close()


def threads_with_a_group_each(comm: Communicator) -> None:
    W, rank = comm.world_size, comm.rank
    groups = [group for group in (comm.split(0, name=f"thread{number}") for number in range(3)) if group is not None]
    errors: list[BaseException] = []

    def body(number: int) -> None:
        group = groups[number]
        try:
            for round_ in range(10):
                count = 10 ** (1 + (round_ + number) % 5)
                tensor = group.empty(count).copy_(value(rank + round_, (count,)))
                group.all_reduce(tensor)
                same(tensor, reduced([value(r + round_, (count,)) for r in range(W)], "sum"))
                if W > 1:
                    sending = group.isend(tensor, (rank + 1) % W)
                    received = torch.zeros(count)
                    group.recv(received, (rank - 1) % W)
                    sending.wait()
                    same(received, tensor)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for group in groups:
        group.close()


def two_threads_wait_for_messages(comm: Communicator) -> None:
    """The one whose message comes last needs what the other does after its own."""
    if comm.rank > 1 or comm.world_size == 1:
        return
    for _ in range(3):
        word = torch.zeros(1)
        if comm.rank == 1:
            comm.recv(word, 0, tag=0)
            comm.send(word, 0, tag=2)
            comm.recv(word, 0, tag=3)
            comm.send(word.fill_(5), 0, tag=1)
            continue
        last = torch.zeros(1)
        works = [comm.irecv(last, 1, tag=1), comm.irecv(word, 1, tag=2)]
        waiting = threading.Thread(target=works[0].wait)
        waiting.start()
        comm.send(torch.ones(1), 1, tag=0)
        works[1].wait()
        comm.send(word, 1, tag=3)
        waiting.join()
        assert last.item() == 5


CASES: dict[str, Callable[[Communicator], None]] = {
    case.__name__: case
    for case in (
        all_reduce_around_every_border,
        all_reduce_of_few_elements_for_each_rank,
        large_views,
        reduce_large,
        reduce_scatter_large,
        broadcast_around_every_border,
        all_gather_large,
        all_gather_uneven,
        gather_and_scatter_uneven,
        all_to_all_large,
        memory_of_the_communicator,
        under_inference_mode,
        large_messages,
        many_messages_under_way,
        messages_in_both_directions,
        a_message_that_is_received_last,
        messages_from_any_rank_beside_others,
        messages_beside_collectives,
        the_first_of_two_is_waited_for,
        blocking_between_asynchronous,
        several_groups_in_any_order,
        threads_with_a_group_each,
        two_threads_wait_for_messages,
    )
}
