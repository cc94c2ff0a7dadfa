"""Collectives of C++ are entered once, whichever thread sees them first."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns

from lockstep.observe.flight import FlightRecord, FlightRecorder
from lockstep.observe.torch_flight_recorder import Entry
from lockstep.observe.torch_groups import WatchedGroup


class Group:
    """What is asked of torch's."""

    group_name = "0"


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
