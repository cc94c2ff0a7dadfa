"""Ranks as threads: the same bits on every run, and every missing, lost or contradicting rank is named."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.communicator import Communicator
from lockstep.comm.local_transport import LocalWorld
from lockstep.comm.reduction import tree_reduce
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost
from lockstep.testing import worlds
from lockstep.testing.failures import RankFailed, RankTimeout
from lockstep.testing.worlds import run_threads

Call = Callable[[Communicator], object]


def random_values(rank: int, count: int = 1001) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_reductions_are_the_fixed_tree_on_every_rank(world_size: int) -> None:
    def reduce_everywhere(comm: Communicator) -> list[torch.Tensor]:
        whole = random_values(comm.rank)
        comm.all_reduce(whole, "mean")
        root = random_values(comm.rank)
        comm.reduce(root, world_size - 1, "mean")
        part = torch.zeros(1001)
        comm.reduce_scatter(part, [random_values(comm.rank)] * world_size, "mean")
        return [whole, part, root if comm.rank == world_size - 1 else whole]

    expected = tree_reduce([random_values(rank) for rank in range(world_size)], "mean")
    for results in run_threads(world_size, reduce_everywhere):
        assert all(torch.equal(result, expected) for result in results)


def test_tree_order_is_pairs_of_neighbours() -> None:
    a, b, c, d, e = (random_values(rank) for rank in range(5))
    assert torch.equal(tree_reduce([a, b, c, d, e], "sum"), ((a + b) + (c + d)) + e)
    assert torch.equal(tree_reduce([a, b, c], "mean"), ((a + b) + c) / 3)


@given(st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_tree_of_subtrees_is_the_tree(seed: int, world_size: int) -> None:
    """What makes 1, 2 and 4 ranks equal: ranks may each sum their own leaves first."""
    leaves = [random_values(100 * seed + leaf, 33) for leaf in range(8)]
    share = 8 // world_size
    partial = [tree_reduce(leaves[rank * share : (rank + 1) * share], "sum") for rank in range(world_size)]
    assert torch.equal(tree_reduce(partial, "sum"), tree_reduce(leaves, "sum"))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda comm: comm.broadcast(torch.ones(3), 1), "broadcast float32 [3] root=1"),
        (lambda comm: comm.all_reduce(torch.ones(4)), r"all_reduce float32 [4] sum"),
        (lambda comm: comm.all_reduce(torch.ones(3), "max"), r"all_reduce float32 [3] max"),
        (lambda comm: comm.all_reduce(torch.ones(3).double()), r"all_reduce float64 [3] sum"),
        (lambda comm: comm.all_reduce(torch.ones(3, 1)), r"all_reduce float32 [3, 1] sum"),
        (lambda comm: comm.barrier(label="epoch end"), "barrier (seq 0, 'epoch end', 0 bytes)"),
    ],
)
def test_a_mismatch_is_told_to_every_rank(odd: Call, words: str) -> None:
    def body(comm: Communicator) -> None:
        call = odd if comm.rank == 1 else (lambda comm: comm.all_reduce(torch.ones(3)))
        with pytest.raises(CollectiveMismatch) as raised:
            call(comm)
        text = str(raised.value)
        assert f"rank 1: {words}" in text
        assert "all_reduce float32 [3] sum (seq 0, 12 bytes)" in text
        assert "rank 0: " in text or "rank 2: " in text

    run_threads(3, body)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: comm.broadcast(torch.ones(3), comm.rank), "root=1"),
        (lambda comm: comm.all_gather([torch.ones(comm.rank + 1)] * 2, torch.ones(comm.rank + 1)), "has room for"),
        (lambda comm: comm.all_gather_into_tensor(torch.ones(2 + 2 * comm.rank), torch.ones(1 + comm.rank)), "room"),
        (lambda comm: comm.reduce_scatter(torch.ones(1 + comm.rank), [torch.ones(1 + comm.rank)] * 2), "another size"),
        (
            lambda comm: comm.all_to_all([torch.ones(1)] * 2, [torch.ones(1 + comm.rank), torch.ones(1)]),
            "rank 0 has room for 1",
        ),
        (lambda comm: comm.gather(torch.ones(2 - comm.rank), [torch.ones(2)] * 2 if comm.rank == 0 else None), "room"),
        (
            lambda comm: comm.scatter(torch.ones(1 + comm.rank), [torch.ones(1)] * 2 if comm.rank == 0 else None),
            "rank 1 has room for 2 x torch.float32 from rank 0, which gives 1",
        ),
        (
            lambda comm: (
                comm.send(torch.ones(2), 1) if comm.rank == 0 else comm.recv(torch.ones(2, dtype=torch.int32), 0)
            ),
            "room for 2 x torch.int32",
        ),
    ],
)
def test_sizes_and_roots_that_do_not_fit(call: Call, words: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match=words):
            call(comm)
        comm.barrier()  # the world is usable after it

    run_threads(2, body)


def test_a_missing_rank_is_named_with_what_the_others_wait_in() -> None:
    release = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            assert release.wait(10)
            with pytest.raises(CollectiveTimeout):
                comm.all_reduce(torch.ones(3))
            return
        with pytest.raises(CollectiveTimeout) as raised:
            comm.all_reduce(torch.ones(3), async_op=True).wait(0.1 if comm.rank == 0 else None)
        release.set()
        assert raised.value.missing == (2,)
        assert "all_reduce float32 [3] sum (seq 0, 12 bytes): rank 2 did not come within 0.1 s" in str(raised.value)
        assert "rank 2 waits in nothing" in str(raised.value)

    run_threads(3, body)


def test_ranks_that_wait_for_each_other_elsewhere() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises((CollectiveTimeout, PeerLost)) as raised:
            comm.recv(torch.ones(1), 1 - comm.rank, tag=comm.rank)
        if isinstance(raised.value, CollectiveTimeout):
            assert raised.value.missing == (1 - comm.rank,)
            assert f"rank {1 - comm.rank} waits in recv float32" in str(raised.value)
        else:
            assert raised.value.rank == 1 - comm.rank

    run_threads(2, body, timeout_s=0.2)


@pytest.mark.parametrize(
    "wait",
    [
        lambda comm: comm.barrier(),
        lambda comm: comm.recv(torch.ones(1), 1),
        lambda comm: comm.send(torch.ones(1), 1),
        lambda comm: comm.all_reduce(torch.ones(1)),
    ],
)
def test_a_rank_that_raised_is_known_at_once(wait: Call) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("out of data")
        wait(comm)

    with pytest.raises(RankFailed, match=r"rank 1 of 3 in .*body: ValueError: out of data") as raised:
        run_threads(3, body, timeout_s=50)
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, ValueError)
    for rank in (0, 2):
        error = raised.value.errors[rank].exception
        assert isinstance(error, PeerLost)
        assert error.rank == 1 or rank == 2  # rank 2 may have lost rank 0 first
    assert 'raise ValueError("out of data")' in str(raised.value)
    assert "then rank 0: PeerLost" in str(raised.value)


def test_a_rank_that_closed_or_returned_is_known_at_once() -> None:
    seen = threading.Event()

    def body(comm: Communicator) -> None:
        group = comm.split(0)
        assert group is not None
        if comm.rank == 0:
            group.close()
            assert seen.wait(10)
            return
        with pytest.raises(PeerLost, match="rank 0 has closed this communicator"):
            group.barrier()
        seen.set()
        with pytest.raises(PeerLost, match="rank 0 has returned"):
            comm.recv(torch.ones(1))

    run_threads(2, body)


def test_a_failed_operation_touches_no_buffer_later() -> None:
    late = threading.Event()

    def body(comm: Communicator) -> list[float]:
        tensor = torch.full((3,), float(comm.rank))
        if comm.rank == 1:
            assert late.wait(10)
        with pytest.raises(CollectiveTimeout):
            comm.all_reduce(tensor, async_op=True).wait(0.05 if comm.rank == 0 else None)
        late.set()
        return tensor.tolist()

    assert run_threads(2, body) == [[0.0] * 3, [1.0] * 3]


def test_an_error_is_raised_again_by_a_second_wait() -> None:
    def body(comm: Communicator) -> None:
        work = comm.irecv(torch.ones(1), 1 - comm.rank)
        assert not work.is_done()
        comm.barrier()  # who has gone by now is an error at once
        errors = []
        for _ in range(2):
            with pytest.raises(CommError) as raised:
                work.wait(0.01)
            errors.append(raised.value)
        assert errors[0] is errors[1]
        assert work.is_done()

    run_threads(2, body)


def test_backward_in_threads_runs_hooks_on_the_rank_s_own_thread() -> None:
    def body(comm: Communicator) -> tuple[list[float], bool]:
        weight = torch.nn.Parameter(torch.ones(4))
        works, threads = [], set()

        def hook(parameter: torch.Tensor) -> None:
            threads.add(threading.get_ident())
            assert parameter.grad is not None
            works.append(comm.all_reduce(parameter.grad, "mean", async_op=True))

        weight.register_post_accumulate_grad_hook(hook)
        (weight * (comm.rank + 1)).sum().backward()
        for work in works:
            work.wait()
        assert weight.grad is not None
        return weight.grad.tolist(), threads == {threading.get_ident()}

    assert run_threads(3, body) == [([2.0] * 4, True)] * 3


def test_a_thread_that_never_returns_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "GRACE_S", 0.0)
    stop = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            stop.wait(30)

    with pytest.raises(RankTimeout, match=r"rank\(s\) 1 did not finish within 0.2 s") as raised:
        run_threads(2, body, timeout_s=0.2)
    assert raised.value.missing == (1,)
    assert "stop.wait(30)" in str(raised.value)
    stop.set()


def test_a_failure_is_told_though_another_rank_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "GRACE_S", 0.0)
    stop = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            stop.wait(30)
        raise ValueError("rank 0 fails")

    with pytest.raises(RankFailed, match=r"rank 0 of 2 in .*ValueError: rank 0 fails") as raised:
        run_threads(2, body)
    assert "then rank 1: Hang: did not finish" in str(raised.value)
    stop.set()


def test_splits_that_differ_between_ranks_are_refused() -> None:
    world = LocalWorld(2)
    assert world.transports[0].split([[0, 1]]) is not None
    with pytest.raises(CollectiveMismatch, match="every rank must pass the same groups"):
        world.transports[1].split([[1, 0]])
