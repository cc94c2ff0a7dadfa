"""Ranks on several hosts, all as threads: the same bits as on one host for every placement, and every failure named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import comm_cases
import comm_cases_large
from host_ranks import on_hosts, run_on_hosts
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import HierarchicalTransport, hosts_of
from lockstep.comm.hosts import collectives, summing
from lockstep.comm.local_transport import LocalTransport
from lockstep.comm.op import REDUCTIONS, CommOp, Reduction, Work
from lockstep.comm.reduction import tree_reduce
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.comm.waiting import wait_until
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommError,
    ConfigError,
    PeerLost,
    SharedMemoryUnavailable,
    TransportClosed,
)
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

Call = Callable[[Communicator], object]

PLACEMENTS = (  # the host of each rank
    *([0], [0, 0], [0, 1], [0, 0, 1], [0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1], [0, 1, 2, 3]),
    *([0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 1, 2, 2, 1, 0]),
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, and every way of exchanging them, in operations of a few kilobytes."""
    monkeypatch.setattr(collectives, "BLOCK_BYTES", 400)
    monkeypatch.setattr(summing, "AT_ONCE_BYTES", 0)


def every(cases: Mapping[str, Call]) -> Call:
    """All but the one that looks without a pause: on threads it can keep the engine from the lock it looks under."""

    def run(comm: Communicator) -> None:
        for name, case in cases.items():
            if name != "done_without_waiting":
                case(comm)

    return run


@pytest.mark.parametrize("machines", PLACEMENTS, ids=str)
def test_every_case(machines: list[int]) -> None:
    run_on_hosts(machines, every(comm_cases.CASES))


@pytest.mark.parametrize("machines", [[0, 0, 1, 1], [0, 1, 0], [0, 1, 2]], ids=str)
def test_every_large_case(machines: list[int]) -> None:
    run_on_hosts(machines, every(comm_cases_large.CASES))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("machines", [[0, 0, 1, 1], [0, 1, 0], [0, 1, 2, 1]], ids=str)
def test_every_case_in_many_blocks(machines: list[int]) -> None:
    run_on_hosts(machines, every(comm_cases.CASES))


def test_done_without_waiting() -> None:
    def body(comm: Communicator) -> None:
        works = [comm.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        works.append(comm.all_to_all([torch.ones(1)] * 3, [torch.ones(1)] * 3, async_op=True))
        assert wait_until(lambda: all(work.is_done() for work in works), 20)

    run_on_hosts([0, 1, 1], body)


# ---------------------------------------------------------------------- bits


def values(rank: int, count: int, seed: int) -> Tensor:
    """Of very different sizes, so that another order of summation would show."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-4, 5, (count,), generator=generator)


def everything(comm: Communicator, count: int, reduce: Reduction, seed: int) -> list[Tensor]:
    """One of each collective on random numbers; what this rank has afterwards."""
    W, world = comm.world_size, range(comm.world_size)
    whole, root, spread = (values(comm.rank, count, seed + number) for number in range(3))
    comm.all_reduce(whole, reduce)
    comm.reduce(root, W - 1, reduce)
    comm.broadcast(spread, seed % W)
    even, uneven = torch.zeros(count), torch.zeros(count + comm.rank)
    comm.reduce_scatter_tensor(even, values(comm.rank, W * count, seed), reduce)
    comm.reduce_scatter(uneven, [values(comm.rank + W * r, count + r, seed) for r in world], reduce)
    flat, listed = torch.zeros(W * count), [torch.zeros(count + 2 * r) for r in world]
    comm.all_gather_into_tensor(flat, values(comm.rank, count, seed))
    comm.all_gather(listed, values(comm.rank, count + 2 * comm.rank, seed))
    return [whole, root, spread, even, uneven, flat, *listed]


@st.composite
def placements(draw: st.DrawFn) -> list[int]:
    owners = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    return sorted(owners) if draw(st.booleans()) else owners


@settings(max_examples=40, deadline=None)
@given(
    machines=placements(),
    count=st.integers(0, 70),
    reduce=st.sampled_from(REDUCTIONS),
    block_bytes=st.sampled_from([4, 64, 500, 4 << 20]),
    at_once_bytes=st.sampled_from([0, 200, 1 << 20]),
)
def test_the_same_bits_as_on_one_host(
    machines: list[int], count: int, reduce: Reduction, block_bytes: int, at_once_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "BLOCK_BYTES", block_bytes)
        patch.setattr(summing, "AT_ONCE_BYTES", at_once_bytes)
        results = run_on_hosts(machines, everything, count, reduce, 7)
    same_on_every_rank(results, run_threads(len(machines), everything, count, reduce, 7))


MANY = ([0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 2, 1, 1, 0])


@pytest.mark.parametrize("machines", MANY, ids=str)
def test_more_ranks(machines: list[int]) -> None:
    for count in (5, 60_000):
        expected = run_threads(len(machines), everything, count, "mean", 7)
        same_on_every_rank(run_on_hosts(machines, everything, count, "mean", 7), expected)


def same_on_every_rank(results: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        for left, right in zip(ours, theirs, strict=True):
            comm_cases.same(left, right)


@pytest.mark.parametrize("machines", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1, 2]], ids=str)
def test_large_tensors_of_real_blocks(machines: list[int]) -> None:
    count = 3 * collectives.BLOCK_BYTES // 4 + 5

    def total(comm: Communicator) -> Tensor:
        tensor = values(comm.rank, count, 1)
        comm.all_reduce(tensor, "mean")
        return tensor

    expected = tree_reduce([values(rank, count, 1) for rank in range(len(machines))], "mean")
    assert all(torch.equal(result, expected) for result in run_on_hosts(machines, total))


@pytest.mark.parametrize("machines", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1, 2, 2]], ids=str)
def test_extra_memory_does_not_grow_with_the_tensor(machines: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "BLOCK_BYTES", 1 << 16)

    def extra(comm: Communicator) -> int:
        transport = comm.transport
        assert isinstance(transport, HierarchicalTransport)
        part, whole = torch.ones(1 << 17), torch.ones(comm.world_size << 17)
        comm.all_reduce(part)
        comm.reduce_scatter_tensor(part, whole)
        comm.all_gather_into_tensor(whole, part)
        comm.broadcast(part)
        comm.reduce(part)
        return sum(buffer.nbytes for buffer in transport._links._buffers.values())

    assert max(run_on_hosts(machines, extra)) <= 16 << 16


def test_a_group_that_was_forgotten_leaves_no_thread() -> None:
    def body(comm: Communicator) -> None:
        on_hosts(comm, [0, 0, 1]).all_reduce(torch.ones(3), async_op=True).wait()
        comm.barrier()

    run_threads(3, body)


def test_inference_mode_and_back() -> None:
    """Only inference mode may write to its tensors, and nothing but it to those that it has made."""

    def body(comm: Communicator) -> None:
        for mode in (torch.inference_mode(), torch.inference_mode(False)):
            with mode:
                for async_op in (False, True):
                    tensor = torch.full((100,), float(comm.rank))
                    comm.all_reduce(tensor, async_op=async_op).wait()
                    assert tensor.eq(6).all()

    run_on_hosts([0, 1, 1, 0], body)


# ---------------------------------------------------------------------- groups


def test_hosts_in_the_order_of_their_first_ranks() -> None:
    assert hosts_of(["b", "a", "b"]) == ((0, 2), (1,))
    assert hosts_of(["a"]) == ((0,),)


def test_split_takes_what_fits_the_group() -> None:
    """On one host its own transport, across hosts again this one; and every sum is the tree's."""

    def body(comm: Communicator) -> list[str]:
        kinds = []
        for color, key in ((comm.rank // 3, None), (comm.rank % 3, None), (0, -comm.rank), (comm.rank % 2, None)):
            group = comm.split(color, key)
            assert group is not None
            tensor = values(comm.rank, 50, 0)
            group.all_reduce(tensor, "mean")
            assert torch.equal(tensor, tree_reduce([values(rank, 50, 0) for rank in group.global_ranks], "mean"))
            kinds.append(type(group.transport).__name__.removesuffix("Transport"))
            part = group.split(0 if group.rank else None)
            assert (part is None) == (group.rank == 0)
            if part is not None:
                assert part.all_gather_object(comm.rank) == list(group.global_ranks[1:])
        return kinds

    assert run_on_hosts([0, 0, 0, 1, 1, 1], body) == [["Local", "Hierarchical", "Hierarchical", "Hierarchical"]] * 6


def test_the_end_of_a_group_ends_its_parts() -> None:
    def body(comm: Communicator) -> None:
        hosts = on_hosts(comm, [0, 0, 1])
        part = hosts.split(0)
        assert part is not None
        part.all_reduce(torch.ones(3), async_op=True).wait()  # has a thread from here on
        comm.barrier()
        hosts.close()
        with pytest.raises(TransportClosed):
            part.transport.submit(CommOp(0, "barrier"))

    run_threads(3, body)


@pytest.mark.parametrize("broken", [0, 2])
def test_a_host_that_cannot_share_memory_is_told_to_all(broken: int) -> None:
    def body(comm: Communicator) -> None:
        def make(plain: Transport) -> Transport:
            if comm.rank == broken:
                raise SharedMemoryUnavailable("no room")
            return plain

        with pytest.raises(SharedMemoryUnavailable, match=f"rank {broken}: no room"):
            HierarchicalTransport.over(comm.transport, [0, 0, 1, 1], make)
        assert comm.all_gather_object(comm.rank) == [0, 1, 2, 3]  # what it was to stand on still does

    run_threads(4, body)


# ---------------------------------------------------------------------- failures

COLLECTIVES: dict[str, Call] = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(1000)),
    "all_reduce in the background": lambda comm: comm.all_reduce(torch.ones(1000), async_op=True).wait(),
    "reduce": lambda comm: comm.reduce(torch.ones(1000), 2),
    "reduce_scatter": lambda comm: comm.reduce_scatter_tensor(torch.ones(1000), torch.ones(1000 * comm.world_size)),
    "all_gather": lambda comm: comm.all_gather_into_tensor(torch.ones(1000 * comm.world_size), torch.ones(1000)),
    "broadcast": lambda comm: comm.broadcast(torch.ones(1000), 0),
    "barrier": lambda comm: comm.barrier(),
}


def thrice(call: Callable[[], object]) -> None:
    """Some rank may go through a first operation before it can know."""
    for _ in range(3):
        call()


def killed(machines: Sequence[int], dead: int, call: Call) -> dict[int, CommError]:
    """What each other rank raises where one has ended."""

    def body(comm: Communicator) -> CommError:
        if comm.rank == dead:
            raise RuntimeError("killed")
        with pytest.raises(CommError) as raised:
            thrice(lambda: call(comm))
        return raised.value

    with pytest.raises(RankFailed) as failed:
        run_on_hosts(machines, body)
    assert failed.value.errors.keys() == {dead}
    return failed.value.results


@pytest.mark.parametrize("call", COLLECTIVES.values(), ids=COLLECTIVES.keys())
@pytest.mark.parametrize("dead", [0, 1, 2, 3])
def test_a_rank_that_ended_is_named_on_every_host(dead: int, call: Call) -> None:
    for machines in ([0, 0, 1, 1], [0, 1, 0, 1]):
        leader = machines.index(machines[dead])
        for rank, error in killed(machines, dead, call).items():
            assert isinstance(error, PeerLost), error
            # in a broadcast only the root's host has a message in which to say who it is
            dumb = call is COLLECTIVES["broadcast"] and machines[dead] != 0 and machines[rank] != machines[dead]
            named = leader if dumb else dead
            assert error.rank == named, f"rank {rank}: {error}"
            assert f"on rank {rank} of 4: " in str(error)
            assert f"rank {named} is lost" in str(error)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("machines", [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [0, 1, 1, 2, 2, 2]], ids=str)
def test_no_rank_hangs_wherever_one_ends(machines: list[int]) -> None:
    for dead in range(6):
        for rank, error in killed(machines, dead, COLLECTIVES["all_reduce"]).items():
            assert isinstance(error, PeerLost), f"rank {rank}: {error}"


class Ends(TransportLayer):
    """Stands for a process that is killed at its collective with this number among the ranks of its host."""

    def __init__(self, inner: Transport, comm: Communicator, dead: int, step: int) -> None:
        super().__init__(inner)
        self.comm, self.dead, self.left = comm, dead, step

    def submit(self, op: CommOp) -> Work:
        self.left -= 1
        if self.comm.rank == self.dead and self.left < 0:
            transport = self.comm.transport
            assert isinstance(transport, LocalTransport)
            transport._group.world.rank_left(self.dead, RuntimeError("killed"))
            raise KeyboardInterrupt
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Ends:
        return Ends(inner, self.comm, self.dead, self.left)


def test_a_rank_that_ends_between_blocks() -> None:
    """At every step of a pipelined operation in turn."""

    def body(comm: Communicator, dead: int, step: int) -> CommError:
        def make(plain: Transport) -> Transport:
            fresh = plain.split([list(range(plain.world_size))])
            assert fresh is not None
            return Ends(fresh, comm, dead, step)

        with Communicator(HierarchicalTransport.over(comm.transport, [0, 0, 1, 1], make)) as hosts:
            with pytest.raises(KeyboardInterrupt if comm.rank == dead else CommError) as raised:
                thrice(lambda: hosts.all_reduce(torch.ones(100)))
            if comm.rank == dead:
                raise RuntimeError("killed")
            assert isinstance(raised.value, CommError)
            return raised.value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "BLOCK_BYTES", 96)
        patch.setattr(summing, "AT_ONCE_BYTES", 0)
        for step in range(12):
            for dead in (2, 3):
                with pytest.raises(RankFailed) as failed:
                    run_threads(4, body, dead, step)
                assert failed.value.errors.keys() == {dead}
                for rank, error in failed.value.results.items():
                    assert isinstance(error, PeerLost), f"rank {rank}, step {step}: {error}"
                    assert error.rank in (2, 3), f"rank {rank}, step {step}: {error}"


def test_ranks_that_do_not_come_are_named() -> None:
    for machines in ([0, 0, 1, 1], [0, 1, 0, 1]):
        for late in (0, 1, 3):
            done = threading.Barrier(4)

            def body(comm: Communicator, late: int = late, done: threading.Barrier = done) -> CommError | None:
                try:
                    if comm.rank == late:
                        return None
                    with pytest.raises(CollectiveTimeout) as raised:
                        comm.all_reduce(torch.ones(3))
                    return raised.value
                finally:
                    done.wait(10)

            named, first = set[tuple[int, ...]](), machines.index(machines[late])  # of the ranks of its host
            for rank, error in enumerate(run_on_hosts(machines, body, timeout_s=0.4)):
                if rank != late:
                    assert isinstance(error, CollectiveTimeout)
                    # whoever has begun earlier gives up earlier, when `first` still waits for it and has told nobody
                    is_early = error.missing == (first,) and "waits in" in str(error)
                    assert error.missing == (late,) or is_early, f"rank {rank}: {error}"
                    named.add(error.missing)
            assert (late,) in named


def test_after_a_failure_nothing_begins() -> None:
    def body(comm: Communicator) -> list[CommError]:
        if comm.rank == 3:
            raise RuntimeError("killed")
        works: list[Work] = [comm.all_reduce(torch.ones(5), async_op=True) for _ in range(4)]
        works.append(comm.barrier(async_op=True))
        errors = []
        for work in (*works, *works):
            with pytest.raises(PeerLost) as raised:
                work.wait()
            assert work.is_done()
            errors.append(raised.value)
        assert errors[: len(works)] == errors[len(works) :]  # the same error again
        return errors[: len(works)]

    with pytest.raises(RankFailed) as failed:
        run_on_hosts([0, 0, 1, 1], body)
    for first, *others in failed.value.results.values():
        assert first.rank == 3
        assert all(error.rank == 3 and "an earlier operation of this group failed" in str(error) for error in others)


@pytest.mark.parametrize("odd", [(0,), (1,), (3,), (0, 1), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "other",
    [
        lambda comm: comm.all_reduce(torch.ones(3), "max"),
        lambda comm: comm.all_reduce(torch.ones(3, dtype=torch.int32)),
        lambda comm: comm.all_reduce(torch.ones(4)),
        lambda comm: comm.broadcast(torch.ones(3), 2),
        lambda comm: comm.barrier(),
    ],
)
def test_ranks_that_call_something_else(odd: Sequence[int], other: Call) -> None:
    """Within a host its own transport finds it, between hosts the leaders' words do; and the others are told."""

    def body(comm: Communicator) -> None:
        with pytest.raises(CollectiveMismatch):
            (other if comm.rank in odd else lambda comm: comm.all_reduce(torch.ones(3)))(comm)

    run_on_hosts([0, 0, 1, 1], body)


def test_a_limit_of_one_wait() -> None:
    def body(comm: Communicator, meet: threading.Barrier) -> None:
        if comm.rank == 1:
            meet.wait(10)
            comm.all_reduce(torch.ones(3))
        else:
            work = comm.all_reduce(torch.ones(3), async_op=True)
            for limit_s in (0.1, None):
                with pytest.raises(CollectiveTimeout, match=r"within 0.1 s"):
                    work.wait(limit_s)
            meet.wait(10)
        meet.wait(10)

    run_on_hosts([0, 0, 1], body, threading.Barrier(3))


def test_a_dtype_that_cannot_be_added() -> None:
    """Refused on every rank before anything moves; the group goes on."""

    def body(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="convert it first"):
            comm.all_reduce(torch.ones(3).to(torch.float8_e4m3fn))
        comm.barrier()

    run_on_hosts([0, 1, 2, 2], body)


def test_a_leader_whose_part_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong where the sums are joined reaches every rank, in its own words."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    def body(comm: Communicator) -> None:
        with pytest.raises(CommError, match="out of memory"):
            comm.all_reduce(torch.ones(3))

    monkeypatch.setattr(summing, "join_subtrees", fail)
    run_on_hosts([0, 0, 1, 1], body)
