"""The guard's record of stock torch programs: complete and equal on all ranks, and the programs' bits stay the same."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from backend_groups import default_group, same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveTimeout, CommError
from lockstep.observe.flight import FlightRecorder, Record, pack_words
from lockstep.observe.motion import Motion
from lockstep.observe.scene import FROM_CPP
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import FlightRecord
from lockstep.observe.step_ends import Started
from lockstep.observe.stream_ends import StreamEnds
from lockstep.observe.torch_watch import attach
from lockstep.testing.worlds import run_processes


class Listener:
    """What is used of a guard, without one."""

    def __init__(self, folder: str, rank: int, world_size: int) -> None:
        self.recorder = FlightRecorder(f"{folder}/flight-{rank}", rank, world_size)
        self.record = FlightRecord(self.recorder.path)
        self.rank, self.world_size = rank, world_size
        self.settings = GuardSettings()
        self.groups: dict[str, tuple[int, ...]] = {}
        self.before_look: list[Callable[[], None]] = []
        self.aborts: list[Callable[[CommError], None]] = []
        self.before_destroy: list[Callable[[object], None]] = []
        self.finding = None
        self.seen: list[BaseException] = []
        self.causes = SimpleNamespace(failed_at="")
        self.step_ends = SimpleNamespace(operations=0)
        self.motion, self.stream_ends = Motion(threading.get_ident()), StreamEnds(self.recorder)

    def group(self, name: str, ranks: Sequence[int]) -> None:
        self.groups[name] = tuple(ranks)

    def enter(self, group: str, seq: int, text: str, site: str) -> int:
        return self.recorder.enter(seq, pack_words(group, text, site))

    def leave(self, number: int) -> None:
        self.recorder.leave(number)

    def step_done(self, started: Sequence[Started] = ()) -> None:
        for watched, number, site in started:
            watched.catch_up(number, site)
        self.step_ends.operations = self.recorder.started
        self.recorder.set_step(self.recorder.step + 1)

    def saw(self, error: BaseException) -> None:
        self.seen.append(error)

    def give_up(self, error: BaseException) -> None:
        for call in self.aborts:
            call(CommError(str(error)))

    def drain(self) -> None:
        pass

    def raise_if_found(self) -> None:
        pass

    def look(self) -> list[Record]:
        for call in self.before_look:
            call()
        return self.record.records()

    def close(self) -> None:
        self.record.close()
        self.recorder.close()


@contextlib.contextmanager
def listening(folder: str, rank: int, world_size: int) -> Iterator[Listener]:
    """A guard that sees what torch does, and whose record is read in the end."""
    before = {name: vars(dist.ProcessGroup)[name] for name in vars(dist.ProcessGroup)}
    listener = Listener(folder, rank, world_size)
    detach = attach(listener)  # pyright: ignore[reportArgumentType]
    assert listener.motion.queued() == {}  # no group works on a GPU
    try:
        yield listener
    finally:
        detach()
        listener.close()
    assert {name: vars(dist.ProcessGroup)[name] for name in vars(dist.ProcessGroup)} == before


def watched(
    rank: int, world_size: int, folder: str, case: Callable[[], Any], backend: str
) -> tuple[list[Record], int, dict[str, tuple[int, ...]]]:
    """(the records of `case`, torch's own count of the default group, the groups); unwatched, its results are equal."""
    torch.manual_seed(rank)
    with default_group(backend, folder, rank, world_size, "plain"):
        plain = case()
    torch.manual_seed(rank)
    with listening(folder, rank, world_size) as listener, default_group(backend, folder, rank, world_size, "watched"):
        same(plain, case())
        dist.barrier()
        assert wait_until(lambda: all(record.left_ns for record in listener.look()), 10)
        return listener.look(), dist.group.WORLD._get_sequence_number_for_group(), listener.groups


def records_of(case: Callable[[], Any], tmp_path: Path, world_size: int, backend: str = "gloo") -> list[list[Record]]:
    """Per rank. Every group has the same collectives on all its ranks, all of them, in the same steps."""
    folder = tmp_path / case.__name__
    folder.mkdir()
    results = run_processes(world_size, watched, world_size, str(folder), case, backend, connect=False)
    for records, _, _ in results:
        assert [r.group for r in records[:1]] == ["init_process_group"]
        del records[0]
    by_group: dict[str, list[tuple[Any, ...]]] = {}
    for records, _, groups in results:
        assert {record.group for record in records} <= groups.keys()
        for name in groups:
            mine = [r for r in records if r.group == name and not r.is_message]
            assert [r.seq for r in mine] == list(range(len(mine)))
            by_group.setdefault(name, []).append(tuple((r.text, r.site, r.step, r.digest) for r in mine))
    for name, histories in by_group.items():
        assert len(set(histories)) == 1, name
        assert len(histories) == len(results[0][2].get(name, histories))
    return [records for records, _, _ in results]


def texts(records: Sequence[Record], group: str = "WORLD") -> list[str]:
    return [record.text for record in records if record.group == group]


# ------------------------------------------------------------------ calls from Python


def every_call() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    one = torch.full((2, 3), rank + 1.0)
    parts = [torch.empty(2, 3) for _ in range(size)]
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    dist.all_reduce(one.clone().long(), op=dist.ReduceOp.BAND)
    dist.broadcast(one, size - 1)
    dist.reduce(one, 0)
    dist.all_gather(parts, one)
    dist.gather(one, parts if rank == 0 else None)
    dist.scatter(one, parts if rank == 1 else None, src=1)
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    out = torch.empty(2 * size, 3)
    dist.all_gather_into_tensor(out, one)
    dist.reduce_scatter_tensor(one, out)
    dist.reduce_scatter(one, parts)
    dist.barrier()
    dist.monitored_barrier()
    things: list[Any] = [None] * size
    dist.all_gather_object(things, "x" * rank)
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(out)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (one, parts[0])]
    for work in works:
        work.wait()
    dist.group.WORLD.allreduce(out, op=dist.ReduceOp.MIN).wait()
    return [one, out, *parts]


CALLED = [
    "all_reduce float32 [2, 3] max",
    "all_reduce int64 [2, 3] band",
    "broadcast float32 [2, 3] root={last}",
    "reduce float32 [2, 3] sum root=0",
    "all_gather float32 [2, 3]",
    "gather float32 [2, 3] root=0",
    "scatter float32 [2, 3] root=1",
    "all_to_all float32",
    "all_gather float32 [2, 3]",
    "reduce_scatter float32 [2, 3] sum",
    "reduce_scatter float32 [2, 3] sum",
    "barrier",
    "monitored_barrier",
    "all_gather int64 [1]",
    "all_gather uint8 {object}",
    "all_reduce_coalesced float32 [2, 3] of 2 tensors sum",
    "all_reduce float32 [2, 3] sum",
    "all_reduce float32 [2, 3] sum",
    "all_reduce float32 {out} min",
    "barrier",
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_call_is_entered_once(tmp_path: Path, world_size: int) -> None:
    per_rank = records_of(every_call, tmp_path, world_size)
    found = texts(per_rank[0])
    expected = [text.format(last=world_size - 1, object=found[14][17:], out=[2 * world_size, 3]) for text in CALLED]
    assert found == expected
    lines = every_call.__code__.co_firstlineno
    for record in per_rank[0][:-1]:
        file, _, where = record.site.rpartition("/")[2].partition(":")
        line, _, function = where.partition(" ")
        assert (file, function) in (("test_torch_watch.py", "every_call"), ("test_torch_watch.py", "<listcomp>"))
        assert lines < int(line) < lines + 40


def test_a_group_whose_default_torch_has_forgotten_is_followed(tmp_path: Path) -> None:
    """torch gives a group of "cpu:gloo" no default backend once any backend is registered, as ours is."""
    for records in records_of(past_the_calls, tmp_path, 2, "cpu:gloo"):
        assert texts(records) == ["all_reduce float32 [3] sum", "barrier"]


def groups_and_messages() -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.full((5,), float(rank))
    ends = dist.new_group([0, size - 1])
    mine = [dist.new_group([member]) for member in range(size)][rank]
    if rank in (0, size - 1):
        dist.broadcast(tensor, size - 1, group=ends)
    dist.all_reduce(tensor, group=mine)
    came = torch.empty(5)
    right, left = (rank + 1) % size, (rank - 1) % size
    work = dist.isend(tensor, right, tag=3)
    dist.recv(came, left, tag=3)
    work.wait()
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, came, right), dist.P2POp(dist.irecv, tensor, left)]):
        request.wait()
    dist.destroy_process_group(ends)
    again = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        dist.all_reduce(tensor, group=again)
    return [tensor, came]


def test_groups_have_one_name_and_messages_name_ranks_of_the_job(tmp_path: Path) -> None:
    per_rank = records_of(groups_and_messages, tmp_path, 3)
    assert texts(per_rank[0], "1 [0, 2]") == ["broadcast float32 [5] root=2"]
    assert not texts(per_rank[1], "1 [0, 2]")
    assert texts(per_rank[1], "new_group") == [
        f"new_group {ranks}" for ranks in ("[0, 2]", "[0]", "[1]", "[2]", "[0, 2]")
    ]
    messages = [[record.text for record in records if record.is_message] for records in per_rank]
    assert messages[2] == [
        "send float32 [5] to rank 0 tag 3",
        "recv float32 [5] from rank 1 tag 3",
        "send float32 [5] to rank 0 tag 0",
        "recv float32 [5] from rank 1 tag 0",
    ]
    assert [record.seq for record in per_rank[2] if record.is_message] == [0, 0, 0, 0]  # each of another tag or peer


# ------------------------------------------------------------------ calls from C++


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3))


def bits(module: nn.Module) -> str:
    values = [param.to_local() if hasattr(param, "to_local") else param for param in module.parameters()]
    return hashlib.sha256(b"".join(v.detach().contiguous().numpy().tobytes() for v in values)).hexdigest()


def ddp() -> str:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.0004)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    side = nn.Linear(2, 2)  # what one rank trains for itself
    own = torch.optim.SGD(side.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(torch.randn(4, 6)).sum().backward()
        wrapped(torch.randn(4, 6)).sum().backward()
        if dist.get_rank() == 0:
            side(torch.ones(2)).sum().backward()
            own.step()
        optimizer.step()
    return bits(wrapped)


def fsdp() -> str:
    sharded = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (sharded[0], sharded[2], sharded):  # pyright: ignore[reportIndexIssue]
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        sharded(torch.randn(4, 6)).sum().backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
    return bits(sharded)


def functional_collectives() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Shard(0)])
    total = (whole * 2).sum().full_tensor()
    moved = whole.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local()
    added = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    return [total, moved, added + 1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_cpp_starts_is_counted(tmp_path: Path, world_size: int) -> None:
    for case, steps in ((ddp, 3), (fsdp, 3), (functional_collectives, 0)):
        folder = tmp_path / case.__name__
        folder.mkdir()
        results = run_processes(world_size, watched, world_size, str(folder), case, "gloo", connect=False)
        histories = [[(r.seq, r.text, r.step, r.digest) for r in records] for records, _, _ in results]
        for (records, torch_count, _), history in zip(results, histories, strict=True):
            assert history == histories[0], case.__name__
            assert sum(record.group == "WORLD" for record in records) == torch_count
            assert max(record.step for record in records) == steps
            assert (FROM_CPP in texts(records)) == (case is not functional_collectives)


def test_calls_to_the_backend_lockstep_are_entered_above_our_transport(tmp_path: Path) -> None:
    per_rank = records_of(ddp, tmp_path, 2, "lockstep")
    for records in per_rank:
        assert {record.group for record in records} == {"lockstep 0"}
        assert "all_reduce float32 [243] sum" in texts(records, "lockstep 0")  # all gradients, from DDP's C++
        assert all(record.site.startswith("tests/process/test_torch_watch.py:") for record in records)
        assert {record.step for record in records} == {0, 1, 2, 3}


def test_our_own_transport_is_let_through(tmp_path: Path) -> None:
    for records in records_of(past_the_calls, tmp_path, 2):
        assert texts(records) == ["all_reduce float32 [3] sum", "barrier"]


def past_the_calls() -> Tensor:
    transport = TorchTransport.over()
    from lockstep.comm.communicator import Communicator

    tensor = torch.ones(3)
    Communicator(transport).all_reduce(tensor)
    dist.all_reduce(tensor)
    Communicator(transport).all_reduce(tensor)
    return tensor


# ------------------------------------------------------------------ what does not end


def stand_in_backward(rank: int, folder: str) -> str:
    """Rank 1 leaves out the last backward; rank 0 waits for it in DDP's C++, until it is broken off."""
    said = Path(folder) / "said"
    with listening(folder, rank, 2) as listener, default_group("gloo", folder, rank, 2):
        wrapped = DistributedDataParallel(model())
        for _ in range(2):  # after the first it makes its buckets anew, with a broadcast
            wrapped(torch.randn(4, 6)).sum().backward()
        if rank == 1:
            assert wait_until(said.exists, 30)
            return ""
        assert wait_until(lambda: all(record.left_ns for record in listener.look()), 30)
        found: list[Record] = []

        def watch() -> None:
            def stands() -> bool:
                found[:] = [record for record in listener.look() if not record.left_ns]
                return bool(found)

            wait_until(stands, 30)
            for abort in (*listener.aborts, *listener.aborts):
                abort(CollectiveTimeout("found"))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            with pytest.raises(RuntimeError, match=r"closed|closure|timeout"):
                wrapped(torch.randn(4, 6)).sum().backward()
        finally:
            thread.join()
            said.touch()
        (record,) = found
        assert record.text == FROM_CPP
        return f"{record.label} at {record.site}"


def test_a_hang_within_cpp_is_seen_and_can_be_ended(tmp_path: Path) -> None:
    seen, _ = run_processes(2, stand_in_backward, str(tmp_path), connect=False)
    label, _, site = seen.partition(" at ")
    assert label == "all_reduce float32[243]"
    assert site.endswith(" stand_in_backward")


def forget_a_work(rank: int, folder: str) -> None:
    with listening(folder, rank, 2) as listener, default_group("gloo", folder, rank, 2):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, async_op=True)
        work = dist.all_reduce(tensor, async_op=True)
        assert wait_until(lambda: all(record.left_ns for record in listener.look()), 30)
        assert work.is_completed()
        assert len(listener.look()) == 3  # with init_process_group


def be_refused(rank: int, folder: str) -> None:
    with listening(folder, rank, 2) as listener, default_group("gloo", folder, rank, 2):
        with pytest.raises(RuntimeError, match=r"(?i)scalar type") as raised:
            dist.all_reduce(torch.ones(2, dtype=torch.int16))
        assert listener.seen == [raised.value]
        assert all(record.left_ns for record in listener.look())


def test_a_guard_sees_the_error_of_an_operation(tmp_path: Path) -> None:
    run_processes(2, be_refused, str(tmp_path), connect=False)


def test_what_nobody_waits_for_ends_too(tmp_path: Path) -> None:
    run_processes(2, forget_a_work, str(tmp_path), connect=False)


def world_of_its_own(rank: int, folder: str) -> int:
    with listening(folder, rank, 2) as listener, default_group("gloo", folder, 0, 1, f"alone-{rank}"):
        dist.all_reduce(torch.ones(2))
        dist.new_group([0])
        return len(listener.look())


def test_a_world_of_other_ranks_is_left_alone(tmp_path: Path) -> None:
    assert run_processes(2, world_of_its_own, str(tmp_path), connect=False) == [0, 0]


def end_a_group_before_its_reducer(rank: int, folder: str) -> None:
    with listening(folder, rank, 2):
        with default_group("gloo", folder, rank, 2):
            wrapped = DistributedDataParallel(model())
            wrapped(torch.randn(4, 6)).sum().backward()
            group = weakref.ref(dist.group.WORLD)
        reducer = wrapped.reducer
        del wrapped
        gc.collect()
        assert group() is not None  # else the reducer ends it with the interpreter locked, and may do so for good
        del reducer
        assert group() is None


def test_a_group_ends_after_the_reducer_that_uses_it(tmp_path: Path) -> None:
    run_processes(2, end_a_group_before_its_reducer, str(tmp_path), connect=False)


class Delegating(dist.ProcessGroup):
    """A user's own group, which leaves most calls to torch."""

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return "mine"


def call_a_subclass(rank: int, folder: str) -> str:
    with listening(folder, rank, 2):
        group = Delegating(0, 1)
        with pytest.raises(RuntimeError, match="backend"):
            group.allreduce([torch.ones(2)])
        return group.barrier()


def test_a_users_own_class_of_groups_works_as_before(tmp_path: Path) -> None:
    assert run_processes(2, call_a_subclass, str(tmp_path), connect=False) == ["mine", "mine"]
