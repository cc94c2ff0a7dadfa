"""What a collective made of messages sends, counted at the seam: the closed forms of its cost, to the byte."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import algorithm_costs as cost
from algorithm_costs import Cost, Traffic
from lockstep.comm.algorithms import chain, halving, naive, ring, tree
from lockstep.comm.algorithms.choice import ALGORITHMS
from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import COLLECTIVE_TAG, CommOp, Reduction, Work, describe
from lockstep.comm.reduction import combine
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.testing.worlds import run_threads

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

GOLDEN = Path(__file__).parents[1] / "golden" / "algorithms.txt"
WORLDS = range(1, 10)


class Batch(NamedTuple):
    """One step of a rank: (peer, bytes) of what it sends, and of what it receives."""

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


class Counting(TransportLayer):
    """Writes down every message that passes, and refuses a message that is in no batch."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.events: list[Batch | int] = []  # an int: so many bytes were reduced

    def submit(self, op: CommOp) -> Work:
        if op.algorithm is None:
            assert op.kind == "batch_send_recv"
            assert all(part.tag == COLLECTIVE_TAG for part in op.parts)
            self.events.append(Batch(*(tuple(moved(op, kind)) for kind in ("send", "recv"))))
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Counting:
        return Counting(inner)

    def traffic(self) -> Traffic:
        batches = [event for event in self.events if isinstance(event, Batch)]
        sends = [nbytes for batch in batches for _, nbytes in batch.sends]
        receives = [nbytes for batch in batches for _, nbytes in batch.receives]
        reduced = sum(event for event in self.events if isinstance(event, int))
        return Traffic(len(batches), len(sends), len(receives), sum(sends), sum(receives), reduced)


def moved(op: CommOp, kind: str) -> Iterator[tuple[int, int]]:
    for part in op.parts:
        if part.kind == kind:
            assert part.peer is not None
            yield part.peer, part.nbytes


class Costed(NamedTuple):
    """A collective, and what it must cost."""

    call: Callable[[Communicator], object]
    cost: Cost


def counted(world_size: int, cases: Mapping[str, Costed]) -> dict[str, tuple[Counting, ...]]:
    """Run all cases; what each rank did in each."""
    mine = threading.local()

    def counting(left: Tensor, right: Tensor, reduce: Reduction, out: Tensor) -> None:
        mine.events.append(out.nbytes)
        combine(left, right, reduce, out)

    def body(comm: Communicator) -> list[Counting]:
        layers = []
        for case in cases.values():
            layers.append(Counting(comm.transport))
            mine.events = layers[-1].events
            case.call(Communicator(layers[-1]))
        return layers

    with pytest.MonkeyPatch.context() as patch:
        for module in (ring, halving, tree, naive):
            patch.setattr(module, "combine", counting)
        by_rank = run_threads(world_size, body, timeout_s=10)
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))


def costed(world_size: int, numel: int, dtype: torch.dtype, root: int, more: int = 1) -> dict[str, Costed]:
    """Every algorithm on a tensor of this size; where every rank has a part, the next has so many elements `more`."""
    size, W = dtype.itemsize, world_size
    sizes = [numel + more * rank for rank in range(W)]
    parts = [n * size for n in sizes]
    segment = 3 * size

    def new(n: int = numel) -> Tensor:
        return torch.zeros(n, dtype=dtype)

    def by_chain(comm: Communicator) -> None:
        chain.broadcast(Wire(comm, "chain"), new(), root, segment)

    found = {
        f"all_reduce {name}": Costed(
            lambda comm, name=name: comm.all_reduce(new(), algorithm=name),
            getattr(cost, f"{name}_all_reduce")(W, numel, size),
        )
        for name in ALGORITHMS["all_reduce"]
    }
    for name in ALGORITHMS["reduce"]:
        found[f"reduce {name}"] = Costed(
            lambda comm, name=name: comm.reduce(new(), root, algorithm=name),
            getattr(cost, f"{name}_reduce")(W, numel * size, root),
        )
    for name in ALGORITHMS["broadcast"]:
        found[f"broadcast {name}"] = Costed(
            lambda comm, name=name: comm.broadcast(new(), root, algorithm=name),
            getattr(cost, f"{name}_broadcast")(W, numel * size, root),
        )
    return found | {
        "broadcast chain of short segments": Costed(by_chain, cost.chain_broadcast(W, numel * size, root, segment)),
        "all_gather ring": Costed(
            lambda comm: comm.all_gather([new(n) for n in sizes], new(sizes[comm.rank]), algorithm="ring"),
            cost.ring_all_gather(parts),
        ),
        "reduce_scatter ring": Costed(
            lambda comm: comm.reduce_scatter(new(sizes[comm.rank]), [new(n) for n in sizes], algorithm="ring"),
            cost.ring_reduce_scatter(parts),
        ),
        "all_to_all pairwise": Costed(
            lambda comm: comm.all_to_all(
                [new(n + 2 * more * comm.rank) for n in sizes],
                [new(sizes[comm.rank] + 2 * more * r) for r in range(W)],
                algorithm="pairwise",
            ),
            cost.pairwise_all_to_all([[(numel + more * (a + 2 * b)) * size for b in range(W)] for a in range(W)]),
        ),
        "barrier dissemination": Costed(
            lambda comm: comm.barrier(algorithm="dissemination"), cost.dissemination_barrier(W)
        ),
    }


def test_every_algorithm_has_a_cost_that_is_tested() -> None:
    named = {f"{kind} {name}" for kind, names in ALGORITHMS.items() for name in names}
    assert named == costed(3, 4, torch.float32, 0).keys() - {"broadcast chain of short segments"}


@settings(max_examples=30, deadline=None)
@given(
    world_size=st.integers(1, 9),
    numel=st.one_of(st.integers(0, 40), st.sampled_from([64, 99, 720])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    root=st.integers(0, 8),
)
def test_the_traffic_is_the_formula_s(world_size: int, numel: int, dtype: torch.dtype, root: int) -> None:
    cases = costed(world_size, numel, dtype, root % world_size)
    for name, ranks in counted(world_size, cases).items():
        assert tuple(rank.traffic() for rank in ranks) == cases[name].cost.ranks, name


ALPHA, BETA, GAMMA = 1000, 3, 1  # whole numbers: sums are exact


def replayed(ranks: Sequence[Sequence[Batch | int]]) -> float:
    """When the last rank ends, on the terms of NCCL, if a message takes alpha + beta * bytes.

    A batch is one kernel: its messages go on together, each from when both of its ends are there, and nothing later of
    its rank begins before all have ended. There are no tags: the n-th send from a to b meets b's n-th receive from a,
    and both have one size. What a rank does next depends on nothing but its rank, so this order stands for every other.
    """
    begun: list[dict[tuple[int, int, int], float]] = [{}, {}]  # (from, to, n) -> when the send, the receive was
    sizes: dict[tuple[int, int, int], int] = {}
    count: list[Counter[tuple[int, int]]] = [Counter(), Counter()]
    todo = [list(events) for events in ranks]
    now = [0.0] * len(ranks)
    under_way: dict[int, list[tuple[tuple[int, int, int], int]]] = {}  # rank -> the messages of its step
    while any(todo) or under_way:
        for rank, events in enumerate(todo):
            while rank not in under_way and events:
                event = events.pop(0)
                if isinstance(event, int):
                    now[rank] += event * GAMMA
                    continue
                under_way[rank] = []
                for side, messages in enumerate(event):
                    for peer, nbytes in messages:
                        pair = (rank, peer) if side == 0 else (peer, rank)
                        key = (*pair, count[side][pair])
                        count[side][pair] += 1
                        begun[side][key] = now[rank]
                        assert sizes.setdefault(key, nbytes) == nbytes, "two sizes of one message"
                        under_way[rank].append((key, nbytes))
        ended = [
            rank for rank, messages in under_way.items() if all(k in begun[0] and k in begun[1] for k, _ in messages)
        ]
        assert ended or not under_way, "a deadlock"
        for rank in ended:
            messages = under_way.pop(rank)
            now[rank] = max(max(begun[0][key], begun[1][key]) + ALPHA + BETA * nbytes for key, nbytes in messages)
    return max(now)


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_time_is_the_formula_s(world_size: int) -> None:
    """Exactly, where every part is as large as any other: 2520 is a multiple of every world size here."""
    for numel, more in ((2520, 0), (0, 0), (37, 1)):
        cases = costed(world_size, numel, torch.float32, 1 % world_size, more)
        for name, ranks in counted(world_size, cases).items():
            took, formula = replayed([rank.events for rank in ranks]), cases[name].cost.path.time_s(ALPHA, BETA, GAMMA)
            assert took <= formula if more else took == formula, name


def shift(*messages: Sequence[str]) -> list[list[Batch | int]]:
    """Three ranks round a ring, each with these batches: "s" sends to the right, "r" receives from the left."""
    return [
        [Batch((((rank + 1) % 3, 4),) * ("s" in batch), (((rank - 1) % 3, 4),) * ("r" in batch)) for batch in messages]
        for rank in range(3)
    ]


def test_the_replay_finds_deadlocks_and_messages_that_do_not_fit() -> None:
    """Else it would prove nothing."""
    assert replayed(shift("sr", "sr")) == 2 * (ALPHA + 4 * BETA)
    with pytest.raises(AssertionError, match="a deadlock"):
        replayed(shift("s", "r"))
    short = [[Batch(((1, 8),), ())], [Batch((), ((0, 4),))]]
    with pytest.raises(AssertionError, match="two sizes"):
        replayed(short)
    with pytest.raises(AssertionError, match="a deadlock"):
        replayed([[Batch(((1, 4),), ())], []])


# ------------------------------------------------------------------ who says what to whom


class Recorder(TransportLayer):
    """Writes down what passes: the collective, then its messages."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.lines: list[str] = []

    def submit(self, op: CommOp) -> Work:
        self.lines += [f"  {describe(part)}" for part in op.parts] or [describe(op)]
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Recorder:
        return Recorder(inner)


def script(comm: Communicator) -> list[str]:
    recorder = Recorder(comm.transport)
    ours, W, rank = Communicator(recorder), comm.world_size, comm.rank
    for name in ALGORITHMS["all_reduce"]:
        ours.all_reduce(torch.ones(10), "mean", algorithm=name, label="gradient")
    for name in ALGORITHMS["broadcast"]:
        ours.broadcast(torch.ones(3), 1, algorithm=name)
    for name in ALGORITHMS["reduce"]:
        ours.reduce(torch.ones(3), 1, algorithm=name)
    ours.all_gather_into_tensor(torch.ones(2 * W), torch.ones(2), algorithm="ring")
    ours.reduce_scatter([torch.ones(r) for r in range(W)][rank], [torch.ones(r) for r in range(W)], algorithm="ring")
    ours.all_to_all([torch.ones(2)] * W, [torch.ones(2)] * W, algorithm="pairwise")
    ours.barrier(algorithm="dissemination")
    return recorder.lines


def test_the_messages_are_the_golden_ones(request: pytest.FixtureRequest) -> None:
    """`pytest tests/sim/test_algorithm_traffic.py --rewrite-golden` writes them anew; then look at the diff."""
    text = "".join(
        f"rank {rank}\n" + "".join(f"  {line}\n" for line in lines) for rank, lines in enumerate(run_threads(3, script))
    )
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
