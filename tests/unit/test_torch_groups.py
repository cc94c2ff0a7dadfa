"""Collectives of C++ are entered once, whichever thread sees them first."""

from __future__ import annotations

from pathlib import Path

from lockstep.observe.flight import FlightRecord, FlightRecorder
from lockstep.observe.torch_groups import WatchedGroup


class Group:
    """What is asked of torch's."""

    group_name = "0"


def test_a_number_that_is_out_of_date_enters_nothing_twice(tmp_path: Path) -> None:
    """The guard's thread has read torch's number; before it enters it, the rank's own thread does, and more."""
    recorder = FlightRecorder(tmp_path / "flight", 0, 2)
    record = FlightRecord(recorder.path)
    group = Group()
    watched = WatchedGroup(group, "WORLD", (0, 1), recorder, "cpu:gloo")
    watched.catch_up(7, "train.py:3 train")
    recorder.set_step(1)
    watched.catch_up(6, "train.py:2 train", {6: "all_reduce[4]"}, if_idle=True)
    watched.catch_up(8, "train.py:3 train")
    assert [(one.seq, one.step) for one in record.records()] == [*((seq, 0) for seq in range(7)), (7, 1)]
    watched.settle(7)
    assert [bool(one.left_ns) for one in record.records()] == [True] * 7 + [False]
    record.close()
    recorder.close()
