"""Random programs of operations between ranks, and what every rank must hold after each of them.

A program is a list of steps that all ranks run in the same order. Every rank knows what every other one sends, so it
checks its own results against `tree_reduce` and plain copies, to the bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from comm_cases import reductions_of, same
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Reduction, Work
from lockstep.comm.reduction import tree_reduce

COUNTS = (0, 1, 5, 1023, 1025, 8193, 65_537, 131_072, 131_073, 270_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_list", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_list", "all_to_all", "barrier", "objects"),
)


class Step(NamedTuple):
    """One line of a program. What a kind does not need is ignored."""

    kind: str
    group: int  # which of the communicators that are open
    dtype: int
    count: int
    choice: int  # reduction, pattern of sizes or colors, tag
    root: int  # source of a message
    peer: int  # its destination
    places: int  # two bits for each rank: where its tensors lie
    is_async: bool


def program(seed: int, length: int) -> list[Step]:
    """`length` steps, a pure function of `seed`; a shorter program is the beginning of a longer one."""
    draw = random.Random(seed)
    kinds = (*COLLECTIVES, *["message"] * 4, "any", "wait", "wait", "all_reduce", "split", "close")
    return [
        Step(
            kind=draw.choice(kinds),
            group=draw.randrange(12),
            dtype=draw.randrange(len(DTYPES)),
            count=draw.randrange(len(COUNTS)),
            choice=draw.randrange(12),
            root=draw.randrange(12),
            peer=draw.randrange(12),
            places=draw.getrandbits(10),
            is_async=draw.random() < 0.5,
        )
        for _ in range(length)
    ]


programs = st.builds(program, st.integers(0, 2**32 - 1), st.integers(20, 60))


@functools.cache
def _numbers(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    length = max(COUNTS) + 1000
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, generator=generator, dtype=dtype)
    return torch.randint(-3, 4, (length,), generator=generator).to(dtype)


class Run:
    """One rank's run of a program."""

    def __init__(self, comm: Communicator) -> None:
        self.groups: list[Communicator | None] = [comm]  # as many on every rank; None: without this one
        self.works: list[tuple[Work, Callable[[], None]]] = []
        self.order = random.Random(comm.rank)
        self.number = 0
        self.checked = 0

    def run(self, program: list[Step]) -> int:
        """All of it; how many results were checked."""
        for number, step in enumerate(program):
            self.number = number
            group = self.groups[step.group % len(self.groups)]
            if step.kind == "close":
                self._close(step.group % len(self.groups))
            elif step.kind == "split":
                self._split(group, step)
            elif step.kind == "wait":
                self._wait(step.choice)
            elif group is not None:
                getattr(self, f"_{step.kind}")(group, step)
        self.order.shuffle(self.works)  # each rank in an order of its own
        while self.works:
            self._wait(0)
        while len(self.groups) > 1:
            self._close(1)
        return self.checked

    # ------------------------------------------------------------------ tensors

    def data(self, step: Step, rank: int, count: int, part: int = 0) -> Tensor:
        """What `rank` of the group holds in this step."""
        start = (61 * self.number + 17 * rank + 5 * part) % 997
        return _numbers(DTYPES[step.dtype])[start : start + count]

    def put(self, group: Communicator, step: Step, tensor: Tensor) -> Tensor:
        """A copy where this step wants it: anywhere, strided, in memory that all see, in the middle of such."""
        place = step.places >> 2 * group.rank & 3
        if place == 0:
            return tensor.clone()
        if place == 1:
            return torch.stack((tensor, tensor), dim=-1)[..., 0]
        extra = place - 2
        return group.empty(tensor.numel() + 2 * extra, tensor.dtype)[extra : extra + tensor.numel()].copy_(tensor)

    def room(self, group: Communicator, step: Step, count: int) -> Tensor:
        """Like `put`, for a result."""
        return self.put(group, step, torch.zeros(count, dtype=DTYPES[step.dtype]))

    def reduction(self, step: Step) -> Reduction:
        """One that this dtype has."""
        names = reductions_of(DTYPES[step.dtype])
        return names[step.choice % len(names)]

    def reduced(self, step: Step, tensors: list[Tensor]) -> Tensor:
        """What the ranks' tensors give together."""
        if not tensors[0].is_complex():
            return tree_reduce(tensors, self.reduction(step))
        return torch.view_as_complex(tree_reduce([torch.view_as_real(t) for t in tensors], self.reduction(step)))

    def expect(self, work: Work, *pairs: tuple[Tensor, Tensor]) -> None:
        """Remember what must be there once `work` has ended."""

        def check() -> None:
            for found, expected in pairs:
                same(found, expected)

        self.works.append((work, check))

    # ------------------------------------------------------------------ steps

    def _wait(self, choice: int) -> None:
        if self.works:
            work, check = self.works.pop(choice % len(self.works))
            work.wait()
            assert work.is_done()
            check()
            self.checked += 1

    def _split(self, group: Communicator | None, step: Step) -> None:
        if len(self.groups) == 4:
            return
        part = None
        if group is not None:
            color = (0, group.rank % 2, None if group.rank == step.root % group.world_size else 3)[step.choice % 3]
            part = group.split(color, key=-group.rank if step.choice % 2 else None)
        self.groups.append(part)

    def _close(self, index: int) -> None:
        while self.works:
            self._wait(0)
        if index > 0:
            group = self.groups.pop(index)
            if group is not None:
                group.close()

    def _barrier(self, group: Communicator, step: Step) -> None:
        self.expect(group.barrier(async_op=step.is_async))

    def _objects(self, group: Communicator, step: Step) -> None:
        mine = "x" * (COUNTS[step.count] % 5000 + group.rank)
        assert [len(text) - len(mine) for text in group.all_gather_object(mine)] == [
            rank - group.rank for rank in range(group.world_size)
        ]

    def _all_reduce(self, group: Communicator, step: Step) -> None:
        tensors = [self.data(step, rank, COUNTS[step.count]) for rank in range(group.world_size)]
        tensor = self.put(group, step, tensors[group.rank])
        work = group.all_reduce(tensor, self.reduction(step), async_op=step.is_async)
        self.expect(work, (tensor, self.reduced(step, tensors)))

    def _reduce(self, group: Communicator, step: Step) -> None:
        root = step.root % group.world_size
        tensors = [self.data(step, rank, COUNTS[step.count]) for rank in range(group.world_size)]
        tensor = self.put(group, step, tensors[group.rank])
        work = group.reduce(tensor, root, self.reduction(step), async_op=step.is_async)
        self.expect(work, (tensor, self.reduced(step, tensors) if group.rank == root else tensors[group.rank]))

    def _broadcast(self, group: Communicator, step: Step) -> None:
        root = step.root % group.world_size
        tensor = self.put(group, step, self.data(step, group.rank, COUNTS[step.count]))
        work = group.broadcast(tensor, root, async_op=step.is_async)
        self.expect(work, (tensor, self.data(step, root, COUNTS[step.count])))

    def _all_gather(self, group: Communicator, step: Step) -> None:
        count = COUNTS[step.count]
        output = self.room(group, step, count * group.world_size)
        mine = self.data(step, group.rank, count)
        tensor = self.put(group, step, mine)
        if step.choice % 2:  # in place
            tensor = output[group.rank * count : (group.rank + 1) * count].copy_(mine)
        work = group.all_gather_into_tensor(output, tensor, async_op=step.is_async)
        self.expect(work, (output, torch.cat([self.data(step, rank, count) for rank in range(group.world_size)])))

    def _uneven(self, step: Step, a: int, b: int = 0) -> int:
        return COUNTS[(step.count + a * (step.choice % 3) + b * (step.choice % 4)) % len(COUNTS)]

    def _all_gather_list(self, group: Communicator, step: Step) -> None:
        tensors = [self.data(step, rank, self._uneven(step, rank)) for rank in range(group.world_size)]
        outputs = [self.room(group, step, tensor.numel()) for tensor in tensors]
        work = group.all_gather(outputs, self.put(group, step, tensors[group.rank]), async_op=step.is_async)
        self.expect(work, *zip(outputs, tensors, strict=True))

    def _gather(self, group: Communicator, step: Step) -> None:
        root = step.root % group.world_size
        tensors = [self.data(step, rank, self._uneven(step, rank)) for rank in range(group.world_size)]
        outputs = [self.room(group, step, tensor.numel()) for tensor in tensors] if group.rank == root else None
        work = group.gather(self.put(group, step, tensors[group.rank]), outputs, root, async_op=step.is_async)
        self.expect(work, *zip(outputs or (), tensors, strict=group.rank == root))

    def _scatter(self, group: Communicator, step: Step) -> None:
        root = step.root % group.world_size
        tensors = [self.data(step, root, self._uneven(step, rank), rank) for rank in range(group.world_size)]
        inputs = [self.put(group, step, tensor) for tensor in tensors] if group.rank == root else None
        output = self.room(group, step, tensors[group.rank].numel())
        self.expect(group.scatter(output, inputs, root, async_op=step.is_async), (output, tensors[group.rank]))

    def _reduce_scatter(self, group: Communicator, step: Step) -> None:
        count = COUNTS[step.count] // group.world_size
        mine = slice(group.rank * count, (group.rank + 1) * count)
        wholes = [self.data(step, rank, count * group.world_size) for rank in range(group.world_size)]
        whole = self.put(group, step, wholes[group.rank])
        output = whole[mine] if step.choice % 2 else self.room(group, step, count)
        work = group.reduce_scatter_tensor(output, whole, self.reduction(step), async_op=step.is_async)
        self.expect(work, (output, self.reduced(step, wholes)[mine]))

    def _reduce_scatter_list(self, group: Communicator, step: Step) -> None:
        ranks = range(group.world_size)
        parts = [[self.data(step, r, self._uneven(step, target), target) for target in ranks] for r in ranks]
        inputs = [self.put(group, step, part) for part in parts[group.rank]]
        output = self.room(group, step, self._uneven(step, group.rank))
        work = group.reduce_scatter(output, inputs, self.reduction(step), async_op=step.is_async)
        self.expect(work, (output, self.reduced(step, [row[group.rank] for row in parts])))

    def _all_to_all(self, group: Communicator, step: Step) -> None:
        ranks = range(group.world_size)
        inputs = [
            self.put(group, step, self.data(step, group.rank, self._uneven(step, group.rank, target), target))
            for target in ranks
        ]
        expected = [self.data(step, r, self._uneven(step, r, group.rank), group.rank) for r in ranks]
        outputs = [self.room(group, step, tensor.numel()) for tensor in expected]
        work = group.all_to_all(outputs, inputs, async_op=step.is_async)
        self.expect(work, *zip(outputs, expected, strict=True))

    def _message(self, group: Communicator, step: Step) -> None:
        source, target = step.root % group.world_size, step.peer % group.world_size
        if source == target:
            return
        tag = step.choice % 3
        sent = self.data(step, source, COUNTS[step.count])
        if group.rank == source:
            send = group.isend if step.is_async else group.send
            self.expect(send(self.put(group, step, sent), target, tag))
        elif group.rank == target:
            received = self.room(group, step, sent.numel())
            recv = group.irecv if step.choice % 2 or step.is_async else group.recv
            self.expect(recv(received, source, tag), (received, sent))

    def _any(self, group: Communicator, step: Step) -> None:
        """One rank hears from all others, in whatever order they come."""
        target, tag, count = step.peer % group.world_size, 100 + self.number, COUNTS[step.count]
        if group.rank != target:
            send = group.isend if step.is_async else group.send
            self.expect(send(self.put(group, step, self.data(step, group.rank, count)), target, tag))
            return
        heard: set[int | None] = set()
        for _ in range(group.world_size - 1):
            received = self.room(group, step, count)
            source = group.recv(received, tag=tag).source_rank()
            assert source is not None
            same(received, self.data(step, source, count))
            heard.add(source)
        assert heard == set(range(group.world_size)) - {target}
