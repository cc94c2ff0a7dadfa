"""Collectives of C++ are entered once, whichever thread sees them first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.sights import FlightRecord
from lockstep.observe.torch_flight_recorder import Entry
from lockstep.observe.torch_groups import TorchGroups, WatchedGroup


class Group:
    """What is asked of torch's."""

    group_name = "0"

    def name(self) -> str:
        return "gloo"

    def _get_sequence_number_for_group(self) -> int:
        return 0


class Uncounted(Group):
    """Of a backend that does not number what it starts."""

    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("ProcessGroup theirs does not yet support sequence numbers.")


class Told:
    """A guard that lets `meanwhile` happen in another thread whenever it is told of a group, and waits for it."""

    rank, world_size = 0, 2

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder
        self.told: list[tuple[str, tuple[int, ...]]] = []
        self.meanwhile: Callable[[], object] = list

    def group(self, name: str, ranks: Sequence[int]) -> None:
        self.told.append((name, tuple(ranks)))
        other = threading.Thread(target=self.meanwhile)
        other.start()
        other.join(10.0)
        assert not other.is_alive(), f"nobody else goes on while the guard is told of {name}"


def entry(number: int, began_ns: int) -> Entry:
    return Entry("0", ("_dump_fr_trace_json", 0), number, has_ended=False, text="all_reduce[4]", began_ns=began_ns)


def test_what_is_seen_late_began_when_torch_says(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    record = FlightRecord(recorder.path)
    group = Group()
    watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo")
    seen_ns = monotonic_ns()
    watched.catch_up(2, "train.py:2 train", {2: entry(2, seen_ns - 10**9)}, if_idle=True)
    unknown, known = record.records()
    assert (unknown.label, known.label, known.entered_ns) == ("", "all_reduce[4]", seen_ns - 10**9)
    assert unknown.entered_ns >= seen_ns
    record.close()
    recorder.close()


def test_a_number_that_is_out_of_date_enters_nothing_twice(tmp_path: Path) -> None:
    """The guard's thread has read torch's number; before it enters it, the rank's own thread does, and more."""
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    record = FlightRecord(recorder.path)
    group = Group()
    watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo")
    watched.catch_up(7, "train.py:3 train")
    recorder.set_step(1)
    watched.catch_up(6, "train.py:2 train", {6: entry(6, 1)}, if_idle=True)
    watched.catch_up(8, "train.py:3 train")
    assert [(one.seq, one.step) for one in record.records()] == [*((seq, 0) for seq in range(7)), (7, 1)]
    watched.settle(7)
    assert [bool(one.left_ns) for one in record.records()] == [True] * 7 + [False]
    record.close()
    recorder.close()


def test_what_a_thread_has_said_that_it_starts_is_the_same_whoever_enters_it(tmp_path: Path) -> None:
    """As a functional collective that does not come back, for it connects the ranks first: another rank's did."""
    all_reduce, group, digests = ("allreduce", 1, torch.float32, (4,), 0, None, 0), Group(), []
    for is_late in (False, True):
        recorder = FlightRecorder(tmp_path / f"flight {is_late}", 0, 2)
        record = FlightRecord(recorder.path)
        watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo")
        watched.starts(all_reduce, "train.py:5 train")
        assert watched.started(0) is None  # it was only traced
        watched.starts(all_reduce, "train.py:5 train")
        if is_late:
            watched.catch_up(1, "train.py:2 train", {1: entry(1, 1)}, if_idle=True)
        number = watched.started(1)
        (found,) = record.records()
        assert (found.number, found.site, found.text) == (number, "train.py:5 train", "all_reduce float32 [4] sum")
        watched.catch_up(2, "train.py:6 train")
        watched.settle(1)
        assert [bool(one.left_ns) for one in record.records()] == [True, False]
        digests.append([one.digest for one in record.records()])
        record.close()
        recorder.close()
    assert digests[0] == digests[1]


def test_what_is_left_and_what_is_seen_late_is_entered_once_by_whichever_thread(tmp_path: Path) -> None:
    """The rank's own thread ends steps and calls from Python, while the guard's sees what it stands in."""
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    record = FlightRecord(recorder.path)
    group, steps, done = Group(), 300, threading.Event()
    watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo")
    words = pack_words("0 [0, 1]", "barrier", "train.py:4 train")
    newest = [0]

    def look() -> None:
        recorder.count_this_thread()
        while not done.is_set():
            number = newest[0]
            watched.catch_up(number, "train.py:2 train", {number: entry(number, 1)}, if_idle=True)
            recorder.take_up()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    for step in range(steps):
        newest[0] += 2
        recorder.left.append(partial(watched.catch_up, newest[0], "train.py:3 train", step=step, now_ns=monotonic_ns()))
        recorder.set_step(step + 1)
        if step % 7 == 0:
            recorder.enter(step, words, is_message=True)
    done.set()
    thread.join(60)
    assert not thread.is_alive()  # each waits for what the other has
    recorder.take_up()
    found = [(one.seq, one.step) for one in record.records() if not one.is_message]
    assert found == [(seq, seq // 2) for seq in range(2 * steps)]
    record.close()
    recorder.close()


def test_nobody_has_to_wait_for_a_group_of_which_the_guard_is_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at the ranks keeps the guard from being told of one, and asks for all groups, new ones as well."""
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    guard = Told(recorder)
    one, two = Group(), Group()
    world = SimpleNamespace(
        pg_map={one: 0, two: 0}, pg_group_ranks={one: [0, 1], two: [1, 0]}, pg_backend_config={}, default_pg=one
    )
    monkeypatch.setattr("torch.distributed.distributed_c10d._world", world)
    monkeypatch.setattr("lockstep.observe.torch_groups.is_the_job", lambda guard: True)
    groups = TorchGroups(cast("Any", guard))
    groups._world, groups.plain, groups.listed = world, Group, world.pg_map
    seen_by_another: list[object] = []

    def meanwhile() -> None:
        guard.meanwhile = list
        seen_by_another.extend((groups.followed.get(id(one)), groups.known(one), groups.known(two)))

    guard.meanwhile = meanwhile
    watched = groups.known(one)
    assert watched is not None
    early, *others = seen_by_another
    assert early is None, "followed before the guard has been told of it"
    assert others == [watched, groups.known(two)]
    assert guard.told == [("WORLD", (0, 1)), ("WORLD", (0, 1)), ("0 [1, 0]", (1, 0))]
    recorder.close()


def test_a_group_that_torch_does_not_number_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    guard = Told(recorder)
    group = Uncounted()
    world = SimpleNamespace(pg_map={group: 0}, pg_group_ranks={group: [0, 1]}, pg_backend_config={}, default_pg=group)
    monkeypatch.setattr("torch.distributed.distributed_c10d._world", world)
    monkeypatch.setattr("lockstep.observe.torch_groups.is_the_job", lambda guard: True)
    groups = TorchGroups(cast("Any", guard))
    groups._world, groups.plain, groups.listed = world, Uncounted, world.pg_map
    assert (groups.known(group), groups.all(), guard.told) == (None, [], [])
    recorder.close()
