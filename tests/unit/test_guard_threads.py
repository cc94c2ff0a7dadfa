"""What the guard shares between threads: another one, or a finalizer, comes in at the very moment that did harm."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import distributed_c10d

from lockstep.observe import account as account_module
from lockstep.observe import flight
from lockstep.observe.account import JOIN, Account
from lockstep.observe.facts import Facts
from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.guard import Guard
from lockstep.observe.in_flight import Flight, InFlight
from lockstep.observe.motion import Stand
from lockstep.observe.patches import SharedPatches
from lockstep.observe.profile.phases import OTHER, Step, worked_out
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.writer import RunWriter
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import FlightRecord
from lockstep.observe.status import FINISHED, RUNNING, LastWords
from lockstep.observe.torch_groups import TorchGroups, WatchedGroup, is_the_job
from lockstep.observe.torch_training import TrainingWatch
from lockstep.observe.torch_under_way import UnderWay


class Group:
    """What is asked of torch's."""

    group_name = "0"

    def name(self) -> str:
        return "gloo"

    def _get_sequence_number_for_group(self) -> int:
        return 0


class Then:
    """Has `call` happen when it is asked for, once."""

    def __init__(self, call: Callable[[], object], answer: Any = None) -> None:
        self.calls, self.answer = [call], answer

    def __call__(self) -> Any:
        if self.calls:
            self.calls.pop()()
        return self.answer


def in_time(call: Callable[[], object]) -> None:
    """Nobody has to wait for `call`."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), "it stands still"


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[FlightRecorder]:
    made = FlightRecorder(tmp_path / "flight", 0, 2)
    yield made
    made.close()


def watched_by(recorder: FlightRecorder, group: Group) -> WatchedGroup:
    return WatchedGroup(group, "WORLD", (0, 1), recorder, "cuda:nccl")


def test_what_is_under_way_may_end_while_the_oldest_is_looked_for(recorder: FlightRecorder) -> None:
    account = Account(recorder)

    class Known:
        @property
        def entered_ns(self) -> int:
            account._under_way.pop(1, None)
            return 7

    account._under_way = cast("Any", {number: Known() for number in range(3)})
    assert account.oldest_ns == 7
    assert list(account._under_way) == [0, 2]
    account.close()


def test_a_finalizer_may_tell_something_while_something_is_told() -> None:
    facts = Facts()

    class Topic(str):
        __slots__ = ()

        def __hash__(self) -> int:
            within()
            return str.__hash__(self)

    within = Then(lambda: facts.tell("save", "a.pt", 4))
    in_time(lambda: facts.tell(Topic("sync world/2"), 3, [1]))
    assert facts.said() == {"save": {"a.pt": 4}, "sync world/2": {"3": [1]}}


def test_operations_of_other_threads_may_end_while_one_begins() -> None:
    flights, tensor = InFlight(), torch.ones(3)

    class Work:
        def is_completed(self) -> bool:
            return True

    def others() -> None:
        flights._flights.pop(2)
        flights._flights.update({number: flight(Then(list, "alive"), f"{number}") for number in (3, 4)})

    def flight(asked: Callable[[], Any], what: str) -> Flight:
        return Flight(cast("Any", asked), cast("Any", None), 9, 0, what)

    flights._flights = {1: flight(Then(others), "first"), 2: flight(Then(list), "second")}
    work = Work()
    flights.started(work, tensor, "of this thread")
    assert [one.what for one in flights._flights.values()] == ["3", "4", "of this thread"]


def test_a_group_that_is_dropped_waits_for_nobody(recorder: FlightRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may drop it in any thread, whatever that one has locked, and whatever others have."""
    group, told = Group(), list[str]()
    guard = SimpleNamespace(recorder=recorder, group=lambda name, ranks: told.append(name))
    world = SimpleNamespace(pg_map={group: 0}, pg_group_ranks={group: {0: 0, 1: 1}}, pg_backend_config={}, default_pg=0)
    monkeypatch.setattr("lockstep.observe.torch_groups.is_the_job", lambda guard: True)
    groups = TorchGroups(cast("Any", guard))
    groups._world, groups.plain, groups.listed = world, Group, world.pg_map
    watched = groups.known(group)
    assert watched is not None
    watched.catch_up(2, "train.py:3 train")
    record = FlightRecord(recorder.path)
    for kept in (world.pg_map, world.pg_group_ranks):
        kept.clear()
    held = [group]
    del group
    with watched._lock, groups._adopting, recorder._taking:
        in_time(held.clear)
    assert not groups.followed
    recorder.take_up()
    assert [bool(one.left_ns) for one in record.records()] == [True, True]
    record.close()


def test_a_group_that_another_thread_destroys_meanwhile_is_followed_all_the_same(
    recorder: FlightRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group()

    class Passing(dict[Group, dict[int, int]]):
        def get(self, key: Group, default: Any = None) -> Any:
            return self.pop(key, default)

    guard = SimpleNamespace(recorder=recorder, group=lambda name, ranks: None)
    world = SimpleNamespace(
        pg_map={group: 0}, pg_group_ranks=Passing({group: {0: 0, 1: 1}}), pg_backend_config={}, default_pg=0
    )
    monkeypatch.setattr("lockstep.observe.torch_groups.is_the_job", lambda guard: True)
    groups = TorchGroups(cast("Any", guard))
    groups._world, groups.plain, groups.listed = world, Group, world.pg_map
    watched = groups.known(group)
    assert watched is not None
    assert watched.ranks == (0, 1)


@pytest.mark.parametrize("ranks", [(1, 2), (0, 2), None])
def test_the_world_may_end_while_it_is_asked_whose_it_is(
    ranks: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = None if ranks is None else SimpleNamespace(rank=lambda: ranks[0], size=lambda: ranks[1])

    class Ending:
        """torch's, which is asked for its default group, and has none from then on."""

        asked = 0

        @property
        def default_pg(self) -> Any:
            self.asked += 1
            return world if self.asked == 1 else None

    monkeypatch.setattr(distributed_c10d, "_world", Ending())
    assert is_the_job(cast("Any", SimpleNamespace(rank=1, world_size=2))) is (ranks == (1, 2))


def test_operations_that_begin_while_one_has_ended_are_not_lost(recorder: FlightRecorder) -> None:
    group = Group()
    watched = watched_by(recorder, group)
    record = FlightRecord(recorder.path)
    numbers = [recorder.enter(seq, pack_words("WORLD", "barrier", "train.py:4")) for seq in range(4)]

    class Pending(tuple[int, int]):
        __slots__ = ()

        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                within()
            return tuple.__getitem__(self, index)

    within = Then(lambda: watched.pending.append((4, numbers[3])))
    watched.pending = deque([Pending((1, numbers[0])), (2, numbers[1]), (3, numbers[2])])
    watched.stood(numbers[1], 1)
    watched.settle(math.inf)
    assert all(one.left_ns for one in record.records())
    record.close()


def writing(folder: Path) -> tuple[RunWriter, StepClock]:
    clock = StepClock()
    writer = RunWriter(folder, clock, rank=0, world_size=1, attempt="a/0")
    clock.steps.append(worked_out(Step(1, 0, 6, 0, 0, (0, 0), [], [(OTHER, 0)])))
    return writer, clock


def test_a_look_that_was_about_to_begin_when_the_record_was_closed_writes_nothing(tmp_path: Path) -> None:
    writer, clock = writing(tmp_path)
    writer.close()
    before = writer.path.read_bytes()
    clock.steps.append(worked_out(Step(2, 6, 12, 0, 0, (0, 0), [], [(OTHER, 6)])))
    writer.look()
    assert writer.path.read_bytes() == before


def test_a_forked_process_closes_a_record_that_was_just_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = writing(tmp_path)
    with writer._lock, monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        in_time(writer.close)
    assert not list(tmp_path.iterdir())


def test_a_forked_process_sees_nothing_for_its_parent() -> None:
    class Seen(SharedPatches):
        def _end(self) -> None:
            self.is_on = False

        def _begin(self) -> None:
            self.is_on = True
            self._patches.add(lambda: undone.append(1))

    undone = list[int]()
    seen = Seen()
    detach = seen.attach()
    seen.attach()
    pid = os.fork()
    if not pid:
        is_over = undone == [1] and not seen.is_on
        detach()  # what the parent's parts do at their end
        seen.attach()
        os._exit(0 if is_over and seen.is_on else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert seen.is_on
    assert undone == []


def test_what_two_threads_are_at_is_over_when_both_are_through(recorder: FlightRecorder) -> None:
    guard = Guard(recorder, cast("Any", SimpleNamespace(records_of=list, close=list)), GuardSettings())

    def activity() -> str:
        return guard._account.status(1.0).activity

    assert not guard._account.status(1.0).joins
    with contextlib.ExitStack() as mine, contextlib.ExitStack() as others:
        mine.enter_context(guard.activity("checkpoint"))
        others.enter_context(guard.activity("evaluate"))
        mine.close()
        assert activity() == "evaluate"
        mine.enter_context(guard.activity(JOIN))
        assert activity() == "evaluate", "to join is no work"
        others.enter_context(guard.activity("checkpoint"))
        assert guard._account.status(1.0).joins
        guard.step_done()  # within `join` of one thread, whatever another one does
        assert guard.recorder.step == 0
    assert activity() == ""
    guard.step_done()
    assert guard.recorder.step == 1
    guard.close()


def test_what_is_taken_up_is_done_once_though_a_signal_handler_enters_something_meanwhile(
    recorder: FlightRecorder,
) -> None:
    done = list[str]()
    words = pack_words("0 [0]", "barrier", "train.py:4")

    def first() -> None:
        done.append("first")
        if len(done) == 1:  # the handler
            recorder.leave(recorder.enter(0, words))

    recorder.left += [first, partial(done.append, "second"), partial(done.append, "third")]
    recorder.enter(1, words)
    assert done == ["first", "second", "third"]
    assert recorder.started == 2


def test_another_thread_may_be_entering_something_when_the_record_is_closed(
    recorder: FlightRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = flight._write_record

    def closing(*fields: Any) -> None:
        recorder.close()
        write(*fields)

    words = pack_words("WORLD", "barrier", "train.py:4")
    with monkeypatch.context() as patch:
        patch.setattr(flight, "_write_record", closing)
        enter = getattr(FlightRecorder.enter, "__wrapped__", FlightRecorder.enter)  # in C nobody can come between
        number = enter(recorder, 0, words)
    recorder.leave(number)
    recorder.set_step(3)
    assert recorder.enter(1, words) == number + 1


def test_a_work_that_takes_the_place_of_one_that_is_gone_is_followed(recorder: FlightRecorder) -> None:
    """Nobody has waited for the old one; the new one begins just when the guard's thread lets go of that."""
    watched, words = watched_by(recorder, Group()), pack_words("WORLD", "barrier", "train.py:4")
    record = FlightRecord(recorder.path)
    gone, new = ((recorder.enter(seq, words), watched, lambda: None, 0) for seq in range(2))

    class Open(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            found = super().get(key, default)
            begun()
            return found

        def pop(self, key: int, default: Any = None) -> Any:
            begun()
            return super().pop(key, default)

    begun = Then(lambda: opened.update({5: new}))
    opened = Open({5: gone})
    watch = cast("Any", SimpleNamespace(open=opened, _awaited={}, _recorder=recorder))
    UnderWay._leave_unawaited(watch, cast("Any", SimpleNamespace(ended=lambda name: None)), 5, cast("Any", gone))
    assert dict(opened) == {5: new}
    assert not record.records()[1].left_ns
    record.close()


def test_another_thread_may_make_a_model_while_one_is_looked_at() -> None:
    models = dict[int, Any]()

    def version() -> list[int]:
        models[len(models)] = SimpleNamespace(version=list, stamps=None)
        return [1]

    models.update({number: SimpleNamespace(version=version, stamps=(0, 0)) for number in range(2)})
    watch = SimpleNamespace(
        _guard=SimpleNamespace(recorder=SimpleNamespace(step=1)), _step=1, _stamped=set[int](), _models=models,
        _count_on=lambda: None,
    )  # fmt: skip
    TrainingWatch.stepped(cast("Any", watch), Group(), False)
    assert [model.stamps for model in models.values()][:2] == [(0, (1, [1]))] * 2


def test_a_rank_is_told_to_have_finished_with_where_it_did_or_not_yet(
    recorder: FlightRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard's thread looks while the line is looked for, for which files are read."""
    account = Account(recorder)
    told: list[Any] = []

    def line_of(error: BaseException) -> str:
        told.append(account.brief())
        return "train.py:14"

    monkeypatch.setattr(account_module, "users_line", line_of)
    account.end(SystemExit(0))
    told.append(account.brief())
    account.close()
    assert [(one.state, one.words) for one in told] == [(RUNNING, None), (FINISHED, LastWords("", "", "train.py:14"))]


@pytest.mark.parametrize("site", ["train.py:5 train", "train.py:9 train"])
def test_a_thread_has_moved_once_the_operation_that_it_stood_in_has_ended(recorder: FlightRecorder, site: str) -> None:
    """Though it is at that line still: the others waited for one that saved a checkpoint."""
    account = Account(recorder)
    number = recorder.enter(0, pack_words("world", "barrier", site))
    account.catch_up()
    account.motion.has_begun, account.motion.stand = False, Stand(("train.py:5 train",), "", 40.0)
    recorder.leave(number)
    account.catch_up()
    assert account.motion.has_begun == (site == "train.py:5 train")
    account.close()
