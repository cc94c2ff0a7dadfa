"""What a layer over the seam writes into the flight record: the same words on every rank, and an end for each."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import comm_cases
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CollectiveTimeout, ConfigError, PeerFailed, PeerLost
from lockstep.observe.recording import GuardLayer
from lockstep.observe.scene import Message, read_message
from lockstep.testing.worlds import run_threads
from recorded_ranks import Silent, Watcher

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")
HERE = "tests/sim/test_recording.py"


Body = Callable[[Communicator, Watcher], object]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[int, Body], list[Watcher]]]:
    """Runs a function on ranks whose operations are recorded; what was recorded, by rank."""
    made: list[Watcher] = []

    def run(world_size: int, body: Body) -> list[Watcher]:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        watchers = [Watcher(folder, rank, world_size) for rank in range(world_size)]
        made.extend(watchers)

        def on_rank(comm: Communicator) -> None:
            watcher = watchers[comm.rank]
            body(Communicator(GuardLayer(comm.transport, watcher)), watcher)

        run_threads(world_size, on_rank)
        return watchers

    yield run
    for watcher in made:
        watcher.give_back()


Watched = Callable[[int, Body], list[Watcher]]


def one_of_each(comm: Communicator, _: Watcher) -> None:
    size, rank = comm.world_size, comm.rank
    comm.barrier()
    comm.broadcast(torch.ones(2, 3), src=size - 1, label="init.weights")
    comm.reduce(torch.ones(5, dtype=torch.float64), dst=0, reduce="max")
    comm.all_reduce(torch.ones(4, 6)[:, ::2], "mean", async_op=True, label="bucket0").wait()
    comm.all_reduce(torch.ones(0))
    comm.all_reduce(torch.ones(()))
    comm.all_reduce(torch.ones(2, dtype=torch.complex64))
    comm.gather(torch.ones(1 + rank), [torch.ones(1 + r) for r in range(size)] if rank == 0 else None)
    comm.all_gather([torch.ones(r) for r in range(size)], torch.ones(rank))
    comm.all_gather([torch.ones(2, 2) for _ in range(size)], torch.ones(2, 2))
    comm.all_gather_into_tensor(torch.ones(4 * size), torch.ones(4))
    comm.scatter(torch.ones(1), [torch.ones(1)] * size if rank == size - 1 else None, src=size - 1)
    comm.reduce_scatter(torch.ones(rank), [torch.ones(r) for r in range(size)])
    comm.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size).bfloat16(), "sum")
    comm.all_to_all([torch.ones(2)] * size, [torch.ones(2)] * size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_collectives_have_the_same_words_on_all_ranks(watched: Watched, world_size: int) -> None:
    watchers = watched(world_size, one_of_each)
    for watcher in watchers:
        assert watcher.texts() == watchers[0].texts()
        assert not watcher.open()
        records = watcher.records()
        assert [record.seq for record in records] == list(range(15))
        assert all(record.site.startswith(f"{HERE}:") and record.site.endswith(" one_of_each") for record in records)
        assert [record.label for record in records if record.label] == ["init.weights", "bucket0"]
        assert [record.digest for record in records] == [record.digest for record in watchers[0].records()]
    last = world_size - 1
    uneven = [*range(world_size)] if world_size > 1 else "1 x [0]"
    assert watchers[0].texts() == [
        "barrier",
        f"broadcast float32 [2, 3] root={last}",
        "reduce float64 [5] max root=0",
        "all_reduce float32 [4, 3] mean",
        "all_reduce float32 [0] sum",
        "all_reduce float32 [] sum",
        "all_reduce float32 [2, 2] sum",
        "gather float32 root=0",
        f"all_gather float32 {uneven}",
        f"all_gather float32 {world_size} x [4]",
        f"all_gather float32 {world_size} x [4]",
        f"scatter float32 root={last}",
        f"reduce_scatter float32 sum {uneven}",
        f"reduce_scatter bfloat16 sum in float32 {world_size} x [2]",
        "all_to_all float32",
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_nothing_else_changes(watched: Watched, world_size: int) -> None:
    def body(comm: Communicator, _: Watcher) -> None:
        for case in comm_cases.CASES.values():
            case(comm)

    watchers = watched(world_size, body)
    for watcher in watchers:
        assert not watcher.open()
        assert [r.digest for r in watcher.records() if r.group == "world"][-1:] == [
            r.digest for r in watchers[0].records() if r.group == "world"
        ][-1:]


def test_the_lines_are_the_callers(watched: Watched) -> None:
    def body(comm: Communicator, _: Watcher) -> None:
        for _turn in range(3):
            comm.barrier()
        comm.barrier()

    for watcher in watched(2, body):
        lines = [
            int(record.site.split(":")[1].split()[0]) - body.__code__.co_firstlineno for record in watcher.records()
        ]
        assert lines == [2, 2, 2, 3]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages(watched: Watched, world_size: int) -> None:
    def body(comm: Communicator, watcher: Watcher) -> None:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        sending = comm.isend(torch.ones(4, 2).half(), right, tag=3)
        comm.recv(torch.ones(4, 2).half(), left, tag=3)
        sending.wait()
        pair = [comm.send_op(torch.ones(1), right), comm.recv_op(torch.ones(1), left)]
        both = comm.batch_send_recv(pair, async_op=True)
        assert watcher.open() == [f"send float32 [1] to rank {right} tag 0", f"recv float32 [1] from rank {left} tag 0"]
        both.wait()
        if comm.rank == 0:
            work = comm.irecv(torch.ones(2))
            work.wait()
            assert work.source_rank() == 1
        if comm.rank == 1:
            comm.send(torch.ones(2), 0)
        comm.barrier()

    for rank, watcher in enumerate(watched(world_size, body)):
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        last = {0: ["recv float32 [2] from rank any tag 0"], 1: ["send float32 [2] to rank 0 tag 0"]}
        assert watcher.texts() == [
            f"send float16 [4, 2] to rank {right} tag 3",
            f"recv float16 [4, 2] from rank {left} tag 3",
            f"send float32 [1] to rank {right} tag 0",
            f"recv float32 [1] from rank {left} tag 0",
            *last.get(rank, []),
            "barrier",
        ]
        begun: Counter[Message | None] = Counter()
        for record in watcher.records():
            if record.is_message:  # numbered among those of its kind, peer and tag, as it pairs
                assert record.seq == begun[read_message(record.text)]
                begun[read_message(record.text)] += 1
        assert watcher.records()[-1].seq == 0  # of the barrier: collectives are counted apart
        assert not watcher.open()


def test_messages_name_ranks_of_the_job(watched: Watched) -> None:
    def body(comm: Communicator, _: Watcher) -> None:
        part = comm.split(0 if comm.rank in (1, 2) else None)
        if part is not None and part.rank == 0:
            part.send(torch.ones(1), 1)
        elif part is not None:
            part.recv(torch.ones(1), 0)

    watchers = watched(3, body)
    assert watchers[1].texts("ranks 1,2") == ["send float32 [1] to rank 2 tag 0"]
    assert watchers[2].texts("ranks 1,2") == ["recv float32 [1] from rank 1 tag 0"]


def gathered(comm: Communicator, count: int) -> None:
    comm.all_gather([torch.ones(count)] * 2, torch.ones(count))


def scattered(comm: Communicator, count: int) -> None:
    comm.reduce_scatter_tensor(torch.ones(count), torch.ones(2 * count))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.all_reduce(torch.ones(4))),
        (lambda c: c.all_reduce(torch.ones(2, 3)), lambda c: c.all_reduce(torch.ones(3, 2))),
        (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.all_reduce(torch.ones(3, dtype=torch.int32))),
        (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.all_reduce(torch.ones(3), "max")),
        (lambda c: c.all_reduce(torch.ones(3).half()), lambda c: c.all_reduce(torch.ones(3).bfloat16())),
        (lambda c: c.broadcast(torch.ones(10)), lambda c: c.broadcast(torch.ones(20))),
        (lambda c: c.broadcast(torch.ones(3), 0), lambda c: c.broadcast(torch.ones(3), 1)),
        (lambda c: gathered(c, 4), lambda c: gathered(c, 6)),
        (lambda c: scattered(c, 2), lambda c: scattered(c, 3)),
        (lambda c: c.all_reduce(torch.ones(3)), lambda c: c.barrier()),
    ],
)
def test_what_must_not_differ_differs_in_the_words(tmp_path: Path, first: Callable, second: Callable) -> None:
    """Rows 4 to 11 of what goes wrong in silence."""
    watcher = Watcher(tmp_path, 0, 2)
    comm = Communicator(GuardLayer(Silent(2), watcher))
    for call in (first, second, first):
        call(comm)
    one, other, again = watcher.texts()
    assert one == again != other
    watcher.give_back()


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[Communicator, Watcher, Silent]]:
    watcher, transport = Watcher(tmp_path, 0, 2), Silent(2)
    yield Communicator(GuardLayer(transport, watcher, owns_guard=True)), watcher, transport
    watcher.give_back()


Bench = tuple[Communicator, Watcher, Silent]


def test_an_operation_ends_with_its_wait_in_any_order(silent: Bench) -> None:
    comm, watcher, _ = silent
    works = [comm.all_reduce(torch.ones(n), async_op=True) for n in (1, 2, 3)]
    assert watcher.open() == [f"all_reduce float32 [{n}] sum" for n in (1, 2, 3)]
    works[2].wait()
    works[0].wait()
    assert watcher.open() == ["all_reduce float32 [2] sum"]
    works[1].wait()
    ends = [record.left_ns for record in watcher.records()]
    works[1].wait()  # again: nothing is written
    assert [record.left_ns for record in watcher.records()] == ends
    assert ends[2] <= ends[0] <= ends[1]


def test_an_operation_ends_when_it_is_seen_to_be_done_or_is_dropped(silent: Bench) -> None:
    comm, watcher, transport = silent
    strided = torch.ones(4, 4)[:, ::2]
    polled, dropped = comm.barrier(async_op=True), comm.all_reduce(strided, async_op=True)
    assert not polled.is_done()
    assert len(watcher.open()) == 2
    transport.works[0].done = True
    assert polled.is_done()
    assert len(watcher.open()) == 1
    del dropped
    gc.collect()
    assert not watcher.open()


def test_a_work_that_outlives_the_record(silent: Bench) -> None:
    comm, watcher, _ = silent
    work, dropped = comm.barrier(async_op=True), comm.barrier(async_op=True)
    watcher.recorder.close()
    work.wait()
    del dropped
    comm.barrier()  # of a group that was not closed with the others


def test_an_operation_that_could_not_begin_has_ended(silent: Bench) -> None:
    comm, watcher, transport = silent
    transport.refuses = ConfigError("not on this device")
    with pytest.raises(ConfigError):
        comm.all_reduce(torch.ones(1))
    with pytest.raises(ConfigError):
        comm.batch_send_recv([comm.send_op(torch.ones(1), 1), comm.recv_op(torch.ones(1), 1)])
    assert len(watcher.records()) == 3
    assert not watcher.open()


def test_errors_are_told_with_the_last_words_of_the_peer(silent: Bench) -> None:
    comm, watcher, transport = silent
    work = comm.barrier(async_op=True)
    own = transport.works[0].error = PeerLost("connection closed", 1)
    for _ in range(2):
        with pytest.raises(PeerFailed, match=r"rank 1 failed at train\.py:31") as raised:
            work.wait()
        assert raised.value.__cause__ is own
    assert watcher.asked == [own]  # once: it may take a second
    assert not watcher.open()


def test_what_is_waited_for_at_once_fails_in_the_same_way(silent: Bench) -> None:
    comm, watcher, transport = silent
    for error, told in ((PeerLost("connection closed", 1), PeerFailed), (KeyboardInterrupt(), KeyboardInterrupt)):
        transport.error = error
        with pytest.raises(told):
            comm.all_reduce(torch.ones(1))
        assert not watcher.open()
    assert len(watcher.asked) == 1


def test_the_line_is_right_however_the_layer_is_reached(silent: Bench) -> None:
    comm, watcher, _ = silent
    tensor = torch.ones(1)
    reduce = CommOp(0, "all_reduce", (tensor,), (tensor,), reduce="sum", async_op=False)
    for _ in range(2):
        comm.transport.submit(CommOp(0, "barrier", async_op=False))
        comm.transport.submit(reduce)
        comm.transport.submit(reduce)
        comm.send(tensor, 1)
        comm.barrier()
        comm.all_reduce(tensor)
        comm.all_reduce(tensor)
    lines = [int(record.site.rpartition(":")[2].split()[0]) for record in watcher.records()]
    assert lines == 2 * list(range(lines[0], lines[0] + 7))


def test_other_errors_stay_what_they_are(silent: Bench) -> None:
    comm, watcher, transport = silent
    late = comm.barrier(async_op=True)
    own = transport.works[0].error = CollectiveTimeout("late")
    with pytest.raises(CollectiveTimeout) as raised:
        late.wait()
    assert raised.value is own
    assert raised.value.__cause__ is None
    stopped = comm.barrier(async_op=True)
    transport.works[1].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stopped.wait()
    assert not watcher.open()


def test_the_guard_hears_how_this_rank_left_before_the_others_lose_it(tmp_path: Path) -> None:
    watcher = Watcher(tmp_path, 0, 1)
    order: list[str] = []

    class Closing(TransportLayer):
        def over(self, inner: Transport) -> Closing:
            return Closing(inner)

        def close(self) -> None:
            order.append(f"closed after {len(watcher.ends)} words, {watcher.closed} closings")

    error = ValueError("bad batch")
    with (
        pytest.raises(ValueError, match="bad batch"),
        Communicator(GuardLayer(Closing(Silent(1)), watcher, owns_guard=True)),
    ):
        raise error
    assert (watcher.ends, watcher.finished) == ([error], 0)
    assert order == ["closed after 1 words, 0 closings"]
    assert watcher.closed == 1
    other = Watcher(tmp_path, 1, 2)
    Communicator(GuardLayer(Closing(Silent(1)), other)).close()
    assert (other.ends, other.closed) == ([], 0)
    for each in (watcher, other):
        each.give_back()


def test_sub_groups_have_one_name_on_all_their_ranks(watched: Watched) -> None:
    """Also where some ranks were in other groups before, and where the same ranks form a group again."""

    def body(comm: Communicator, watcher: Watcher) -> None:
        even = comm.split(comm.rank % 2)
        first = comm.split(0 if comm.rank < 3 else None)
        again = comm.split(0 if comm.rank < 3 else 1)
        backwards = comm.split(0, key=-comm.rank)
        assert even is not None
        assert again is not None
        assert backwards is not None
        nested = again.split(0)
        assert nested is not None
        for group in (even, again, nested, backwards):
            group.all_reduce(torch.ones(2))
        if first is not None:
            first.barrier()

    watchers = watched(5, body)
    groups: dict[str, tuple[int, ...]] = {}
    for watcher in watchers:
        for name, ranks in watcher.groups.items():
            assert groups.setdefault(name, ranks) == ranks
    assert groups == {
        "world": (0, 1, 2, 3, 4),
        "ranks 0-4:2": (0, 2, 4),
        "ranks 1,3": (1, 3),
        "ranks 0-2": (0, 1, 2),
        "ranks 0-2 #2": (0, 1, 2),
        "ranks 3,4": (3, 4),
        "ranks 4,3,2,1,0": (4, 3, 2, 1, 0),
        "ranks 0-2 #3": (0, 1, 2),
        "ranks 3,4 #2": (3, 4),
    }
    for name, ranks in groups.items():
        assert {rank for rank in range(5) if name in watchers[rank].groups} == set(ranks)
        texts = [watchers[rank].texts(name) for rank in ranks]
        assert texts == texts[:1] * len(ranks)
        assert texts[0]


def test_words_are_kept_but_not_without_end(silent: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    comm, watcher, _ = silent
    monkeypatch.setattr("lockstep.observe.line_words._KEPT", 8)
    layer = comm.transport
    assert isinstance(layer, GuardLayer)
    for n in range(40):
        comm.all_reduce(torch.ones(n))
        comm.all_reduce(torch.ones(3), label=f"step {n}")
        assert max(len(layer._of_lines), len(layer._words.of_sites)) <= 8
    assert watcher.texts()[::2] == [f"all_reduce float32 [{n}] sum" for n in range(40)]


def test_several_threads_and_groups_at_once(watched: Watched) -> None:
    """Each thread has a group of its own, as a rank with pipelines has."""

    def body(comm: Communicator, watcher: Watcher) -> None:
        groups = [comm.split(0) for _ in range(3)]

        def work(group: Communicator) -> None:
            for n in range(50):
                group.all_reduce(torch.ones(1 + n), async_op=n % 2 == 0).wait()

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    for watcher in watched(2, body):
        for name in ("ranks 0,1", "ranks 0,1 #2", "ranks 0,1 #3"):
            assert watcher.texts(name) == [f"all_reduce float32 [{1 + n}] sum" for n in range(50)]
        assert not watcher.open()
        assert len({record.number for record in watcher.records()}) == len(watcher.records())


def test_parts_of_two_layers_have_names_of_their_own(watched: Watched) -> None:
    """Over one group there may be several, as that of `init` and that of a model: their parts are not one group."""

    def body(comm: Communicator, watcher: Watcher) -> None:
        inner = comm.transport
        assert isinstance(inner, GuardLayer)
        other = Communicator(GuardLayer(inner.inner, inner.guard, name="another"))
        comm.split(0).all_reduce(torch.ones(1))
        other.split(0).all_reduce(torch.ones(2))

    for watcher in watched(2, body):
        assert watcher.texts("ranks 0,1") == ["all_reduce float32 [1] sum"]
        assert watcher.texts("ranks 0,1 #2") == ["all_reduce float32 [2] sum"]
