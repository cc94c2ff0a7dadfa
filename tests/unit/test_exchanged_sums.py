"""A reduce-scatter from exchanges: the bits of the tree on any number of ranks, in memory that is used again."""

from __future__ import annotations

import itertools
from functools import partial
from typing import final

import pytest
import torch
from torch import Tensor

from lockstep.comm import exchanged_sums
from lockstep.comm.exchanged_sums import ExchangedSums
from lockstep.comm.op import CommOp, Work
from lockstep.comm.reduction import tree_reduce
from lockstep.errors import PeerLost

MIB = 1 << 20


@final
class Exchange(Work):
    """One rank's side of an exchange; the test says when its data has come."""

    def __init__(self, target: Tensor, source: Tensor, coming: list[int], going: list[int]) -> None:
        self.target, self.source = target, source
        self.coming, self.going = target.split(coming), source.split(going)
        self.done = self.lost = False

    def wait(self, timeout_s: float | None = None) -> None:
        if self.lost:
            raise PeerLost("rank 1 is gone", 1)
        assert self.done, "the test would hang"

    def is_done(self) -> bool:
        return self.done or self.lost


class Net:
    """Ranks in one thread: what each has started, in order."""

    def __init__(self, world_size: int) -> None:
        self.sums = [ExchangedSums(rank, world_size) for rank in range(world_size)]
        self.exchanges: list[list[Exchange]] = [[] for _ in range(world_size)]

    def start(self, rank: int, op: CommOp) -> Work:
        return self.sums[rank].start(op, partial(self._exchange, rank))

    def _exchange(self, rank: int, target: Tensor, source: Tensor, coming: list[int], going: list[int]) -> Work:
        self.exchanges[rank].append(Exchange(target, source, coming, going))
        return self.exchanges[rank][-1]

    def deliver(self) -> None:
        """Let everything come that is under way."""
        for sides in zip(*self.exchanges, strict=True):
            for here, there in itertools.product(range(len(sides)), repeat=2):
                assert sides[here].coming[there].shape == sides[there].going[here].shape
                sides[here].coming[there].copy_(sides[there].going[here])
            for side in sides:
                side.done = True


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


@pytest.mark.parametrize("small_bytes", [0, MIB])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_bits_of_the_tree(world_size: int, small_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanged_sums, "_SMALL_BYTES", small_bytes)
    even, uneven = [103] * world_size, [40 * rank for rank in range(world_size)]
    cases = [(torch.float32, torch.float32, even), (torch.bfloat16, torch.float32, even)]
    cases += [(torch.float64, torch.float64, uneven), (torch.bool, torch.bool, uneven)]
    net = Net(world_size)
    for dtype, wide, sizes in cases:
        wholes = [numbers(rank, sum(sizes), dtype) for rank in range(world_size)]
        expected = tree_reduce([whole.to(wide) for whole in wholes], "sum").split(sizes)
        results, works = [], []
        for rank, whole in enumerate(wholes):
            in_place = dtype == wide and sizes is even
            inputs = tuple(whole.split(sizes)) if sizes is uneven else (whole,)
            results.append(whole.split(sizes)[rank] if in_place else torch.empty(sizes[rank], dtype=wide))
            works.append(net.start(rank, CommOp(0, "reduce_scatter", inputs, (results[-1],), reduce="sum")))
        net.deliver()
        for work, result, known in zip(works, results, expected, strict=True):
            for _ in range(2):
                work.wait()
            assert torch.equal(result, known)


def scattered(count: int) -> CommOp:
    return CommOp(0, "reduce_scatter", (torch.ones(count),), (torch.zeros(count // 2),), reduce="sum")


def test_what_has_come_is_added_before_more_memory_is_taken() -> None:
    net = Net(2)
    first, second = scattered(64), scattered(64)
    works = [net.start(rank, first if rank == 0 else scattered(64)) for rank in range(2)]
    works += [net.start(rank, second if rank == 0 else scattered(64)) for rank in range(2)]
    one, two = (exchange.target.data_ptr() for exchange in net.exchanges[0])
    assert one != two
    assert torch.equal(first.outputs[0], torch.zeros(32))
    net.deliver()
    works += [net.start(rank, scattered(64)) for rank in range(2)]
    assert torch.equal(first.outputs[0], torch.full((32,), 2.0))  # nobody has waited yet
    assert net.exchanges[0][2].target.data_ptr() in (one, two)
    works[0].wait()
    assert torch.equal(first.outputs[0], torch.full((32,), 2.0))


def test_a_lost_rank_is_told_to_who_waits_and_not_to_the_next() -> None:
    net = Net(2)
    op = scattered(64)
    work = net.start(0, op)
    net.exchanges[0][0].lost = True
    net.start(0, scattered(64))
    for _ in range(2):
        with pytest.raises(PeerLost):
            work.wait()
    assert torch.equal(op.outputs[0], torch.zeros(32))
    lost, after = (exchange.target.data_ptr() for exchange in net.exchanges[0])
    assert lost != after, "the backend may still write where it has failed"


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanged_sums, "_KEPT_BYTES", 1000)
    net = Net(2)
    counts = (200, 300, 400)  # 400, 600 and 800 bytes come
    works = [net.start(rank, scattered(count)) for count in counts for rank in range(2)]
    net.deliver()
    for sums in net.sums:
        sums._add_what_has_come()
        assert [kept.nbytes for kept in sums._kept._free] == [400]
    assert all(work.is_done() for work in works)


def test_what_cannot_be_added_for_the_next_is_added_by_its_own_wait() -> None:
    """Tensors of inference mode may be written in that mode only, and the next operation may begin outside of it."""
    net = Net(2)
    with torch.inference_mode():
        op = scattered(64)
        works = [net.start(rank, op if rank == 0 else scattered(64)) for rank in range(2)]
        net.deliver()
    net.start(0, scattered(64))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inference"):
            works[0].wait()
    with torch.inference_mode():
        works[0].wait()
        assert torch.equal(op.outputs[0], torch.full((32,), 2.0))
