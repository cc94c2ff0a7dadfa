"""Collectives made of messages, on ranks that are threads: results to the bit, and no deadlock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithm_cases import REFERENCES, check_moves, check_reductions, values
from comm_cases import same
from lockstep.comm.algorithms import chain
from lockstep.comm.algorithms.choice import ALGORITHMS
from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import COLLECTIVE_TAG, REDUCTIONS, CommOp, Kind, Reduction, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommError,
    ConfigError,
    PeerLost,
    TransportClosed,
    UnsupportedArgument,
)
from lockstep.observe.checking import CheckLayer
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
WORLDS = range(1, 10)


# ------------------------------------------------------------------ results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_every_reduction_of_every_dtype_to_the_bit(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        for number, dtype in enumerate((*FLOATS, *INTEGERS, torch.complex64)):
            reductions: tuple[Reduction, ...] = ("sum", "mean") if dtype.is_complex else REDUCTIONS
            for reduce in reductions:
                if reduce != "mean" or dtype not in INTEGERS:
                    check_reductions(comm, 2 * world_size + 1, dtype, reduce, root=number % world_size)

    run_threads(world_size, body)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_size(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        for numel in sorted({0, 1, world_size - 1, world_size, world_size + 1, 101}):
            check_reductions(comm, numel, torch.float32, "mean", root=numel % world_size)
            check_moves(comm, numel, torch.bfloat16, root=(numel + 1) % world_size)

    run_threads(world_size, body)


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(1, 9),
    numel=st.integers(0, 50),
    dtype=st.sampled_from((*FLOATS, *INTEGERS)),
    reduce=st.sampled_from(("sum", "min", "max", "product")),
    root=st.integers(0, 8),
)
def test_any_case(world_size: int, numel: int, dtype: torch.dtype, reduce: Reduction, root: int) -> None:
    def body(comm: Communicator) -> None:
        check_reductions(comm, numel, dtype, reduce, root % world_size)
        check_moves(comm, numel, dtype, root % world_size)

    run_threads(world_size, body)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.complex64, torch.int16, torch.float8_e4m3fn])
def test_whatever_is_moved_arrives(dtype: torch.dtype) -> None:
    def body(comm: Communicator) -> None:
        for root in range(comm.world_size):
            check_moves(comm, 7, dtype, root)

    run_threads(5, body)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_halving_gives_the_bits_of_the_transport(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        mine, own = (values(comm.rank, 37, torch.float32) for _ in range(2))
        comm.all_reduce(mine, algorithm="halving_doubling")
        comm.all_reduce(own)
        same(mine, own)

    run_threads(world_size, body)


def test_the_order_of_addition_matters_for_these_values() -> None:
    """Else the tests above would not see it."""
    every = [values(rank, 101, torch.bfloat16) for rank in range(5)]
    found = {tuple(reference(every, "sum").tolist()) for reference in REFERENCES.values()}
    assert len(found) == len(REFERENCES)


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
def test_not_a_number_and_infinity_reach_everybody(name: str) -> None:
    def body(comm: Communicator) -> None:
        for reduce in REDUCTIONS:
            tensor = torch.ones(6)
            tensor[comm.rank] = float("nan")
            tensor[5] = float("inf") if comm.rank == 1 else 2.0
            comm.all_reduce(tensor, reduce, algorithm=name)
            assert tensor.isnan().tolist() == [True] * 5 + [False]
            assert tensor[5].item() == (2.0 if reduce == "min" else float("inf"))

    run_threads(5, body)


def test_tensors_of_autograd_and_of_inference() -> None:
    def body(comm: Communicator) -> None:
        parameter = torch.nn.Parameter(torch.ones(5))
        with torch.inference_mode():
            inferred = torch.ones(5)
        for number, name in enumerate(ALGORITHMS["all_reduce"], 1):
            for tensor in (parameter, inferred):
                comm.all_reduce(tensor, algorithm=name)
                assert tensor.tolist() == [3.0**number] * 5
        assert parameter.requires_grad
        assert parameter.grad_fn is None

    run_threads(3, body)


def test_groups_of_some_ranks_at_once() -> None:
    def body(comm: Communicator) -> None:
        part = comm.split(comm.rank % 2, key=-comm.rank)
        assert part is not None
        check_reductions(part, 9, torch.float32, "sum", root=part.world_size - 1)
        check_moves(part, 9, torch.int64)
        check_reductions(comm, 9, torch.float32, "sum")

    run_threads(7, body)


def test_other_messages_stay_apart() -> None:
    """A receive from any rank, or from the neighbour, that was there before takes nothing of a collective's."""

    def body(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        from_any, from_left = torch.zeros(3), torch.zeros(3)
        waiting = [comm.irecv(from_left, left, tag=1), comm.irecv(from_any, tag=0)]
        check_reductions(comm, 3, torch.float32, "sum")
        check_moves(comm, 3, torch.float32)
        waiting += [comm.isend(torch.full((3,), 10.0 + comm.rank), right, tag) for tag in (0, 1)]
        for work in waiting:
            work.wait()
        assert from_any.tolist() == from_left.tolist() == [10.0 + left] * 3

    run_threads(3, body)


# ------------------------------------------------------------------ no deadlock


class NoBuffers(TransportLayer):
    """Every call blocks until all its messages have been received, as a stream of NCCL does."""

    def submit(self, op: CommOp) -> Work:
        work = self.inner.submit(op)
        if op.kind in ("send", "recv", "batch_send_recv"):
            work.wait()
        return work

    def over(self, inner: Transport) -> NoBuffers:
        return NoBuffers(inner)


def on_no_buffers(fn: Callable[[Communicator], object]) -> Callable[[Communicator], object]:
    return lambda comm: fn(Communicator(NoBuffers(comm.transport)))


@pytest.mark.parametrize("world_size", range(2, 10))
def test_no_deadlock_without_buffers(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        for root in (0, world_size - 1):
            check_reductions(comm, 2 * world_size + 1, torch.float32, "sum", root)
            check_moves(comm, 5, torch.float32, root)
            chain.broadcast(Wire(comm, "chain"), torch.ones(7), root, segment_bytes=8)

    run_threads(world_size, on_no_buffers(body))


def test_a_ring_of_single_sends_deadlocks_there() -> None:
    """The ring of the tutorials: else the layer would prove nothing."""

    def body(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        sending = comm.isend(torch.ones(3), right)
        comm.recv(torch.ones(3), left)
        sending.wait()

    run_threads(3, body, timeout_s=5)
    with pytest.raises(RankFailed, match="CollectiveTimeout"):
        run_threads(3, on_no_buffers(body), timeout_s=0.2)


# ------------------------------------------------------------------ what goes wrong


def test_an_unknown_name_lists_the_known_ones() -> None:
    def body(comm: Communicator) -> None:
        t, each = torch.ones(2), [torch.ones(2) for _ in range(2)]
        calls: dict[Kind, Callable[[str], Work]] = {
            "all_reduce": lambda name: comm.all_reduce(t, algorithm=name),
            "reduce": lambda name: comm.reduce(t, algorithm=name),
            "broadcast": lambda name: comm.broadcast(t, algorithm=name),
            "all_gather": lambda name: comm.all_gather(each, t, algorithm=name),
            "reduce_scatter": lambda name: comm.reduce_scatter(t, each, algorithm=name),
            "all_to_all": lambda name: comm.all_to_all(each, each, algorithm=name),
            "barrier": lambda name: comm.barrier(algorithm=name),
        }
        assert calls.keys() == ALGORITHMS.keys()
        for kind, call in calls.items():
            with pytest.raises(ConfigError, match=f"algorithm='rings': {kind} has {', '.join(ALGORITHMS[kind])}; None"):
                call("rings")
        comm.barrier()

    run_threads(2, body)


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(UnsupportedArgument, match="async_op=True is not supported: with algorithm="):
            comm.all_reduce(torch.ones(2), algorithm="ring", async_op=True)
        with pytest.raises(ConfigError, match=r"all_reduce of torch.float8_e4m3fn: the sum of this dtype cannot be"):
            comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn), algorithm="tree")
        with pytest.raises(ConfigError, match=r"the mean of torch.int64"):
            comm.all_reduce(torch.ones(2, dtype=torch.int64), "mean", algorithm="ring")
        with pytest.raises(ConfigError, match=f"tag={COLLECTIVE_TAG}: a tag is an int from 0 to"):
            comm.send(torch.ones(1), 1 - comm.rank, tag=COLLECTIVE_TAG)
        comm.barrier(algorithm="dissemination")
        comm.close()
        with pytest.raises(TransportClosed):
            comm.barrier(algorithm="dissemination")

    run_threads(2, body)


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
def test_a_rank_that_leaves_in_the_middle_ends_it_for_all(name: str) -> None:
    """Also for those that exchange nothing with it: else they would wait for a rank that has given up."""

    class Leaves(TransportLayer):
        def submit(self, op: CommOp) -> Work:
            if op.parts and "step 1" in op.parts[0].label:
                raise MemoryError("no room")
            return self.inner.submit(op)

        def over(self, inner: Transport) -> Leaves:
            return Leaves(inner)

    def body(comm: Communicator) -> str:
        ours = Communicator(Leaves(comm.transport)) if comm.rank == 0 else comm

        def train() -> None:
            for _ in range(3):
                ours.all_reduce(torch.ones(9), algorithm=name)

        with pytest.raises(CommError) as raised:
            train()
        if comm.rank == 0:
            with pytest.raises(CommError, match=f"all_reduce by {name} on rank 0: ended by MemoryError: no room"):
                ours.barrier()
        return type(raised.value).__name__

    assert run_threads(5, body, timeout_s=20) == ["CommError"] + ["PeerLost"] * 4


def test_a_rank_that_never_comes() -> None:
    """Nobody else waits longer than the limit, and one of them says for whom."""
    late = threading.Barrier(4)

    def body(comm: Communicator) -> BaseException | None:
        error = None
        if comm.rank != 2:
            with pytest.raises(CommError) as raised:
                comm.all_reduce(torch.ones(9), algorithm="ring", label="bucket0")
            error = raised.value
        late.wait(10)
        return error

    errors = run_threads(4, body, timeout_s=0.3)
    timeouts = [error for error in errors if isinstance(error, CollectiveTimeout)]
    assert any(error.missing == (2,) for error in timeouts)
    assert all("'bucket0: all_reduce by ring, step 0: sum of part" in str(error) for error in timeouts)
    assert all(isinstance(error, CollectiveTimeout | PeerLost) for error in errors if error is not None)


def test_other_sizes_on_other_ranks() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises((CollectiveMismatch, PeerLost)):
            comm.all_reduce(torch.ones(9 + 3 * comm.rank), algorithm="ring")

    run_threads(3, body, timeout_s=20)


def test_a_part_of_its_own_of_two_sizes() -> None:
    """One element would be copied into all of them."""

    def body(comm: Communicator) -> None:
        sizes = [1, 1]
        with pytest.raises((ConfigError, PeerLost)) as raised:
            comm.all_to_all(
                [torch.ones(3 if r == comm.rank == 1 else 1) for r in range(2)],
                [torch.ones(n) for n in sizes],
                algorithm="pairwise",
            )
        if comm.rank == 1:
            assert "input_list[1] has 1 elements, but its output_list[1] has 3" in str(raised.value)

    run_threads(2, body)


def test_another_algorithm_on_another_rank_is_a_mismatch() -> None:
    """A layer that compares collectives sees one, and which algorithm carries it out."""

    class Steps:
        step_before = 0
        recorder = SimpleNamespace(step=0)

    def body(comm: Communicator) -> None:
        checked = Communicator(CheckLayer(comm.transport, Steps()))
        checked.all_reduce(torch.ones(4), algorithm="tree")
        with pytest.raises(CollectiveMismatch, match=r"all_reduce float32 \[4\] sum by (ring|tree) at"):
            checked.all_reduce(torch.ones(4), algorithm="ring" if comm.rank else "tree")

    run_threads(3, body)
