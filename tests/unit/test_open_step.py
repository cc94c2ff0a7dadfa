"""The step that was not ended: from flight records to a line of the launcher to lanes."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import World
from reported_runs import add_launch, add_notes, began_ns

from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.profile.phases import BACKWARD, DATA, EXPOSED, FORWARD, OPTIMIZER, OTHER
from lockstep.observe.profile.run_record import Run
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.report import open_step
from lockstep.observe.report.document import document_of
from lockstep.observe.report.lanes import lanes_of
from lockstep.observe.report.open_step import Moment, OpenOp, moment_of, moments_in
from lockstep.observe.report.source import RunReader
from lockstep.observe.scene import FROM_CPP
from lockstep.observe.sights import FlightRecord, flight_path, from_record, status_of, waits_of
from lockstep.observe.status import RAISED, LastWords, Progress, Sight, Status

_TEXT = "all_reduce float32 [4] sum"


def rank_in(
    folder: Path, rank: int, collectives: int, *, is_open: bool, age_s: float = 0.0, **said: Any
) -> FlightRecorder:
    """A rank of three that has ended two steps and begun so many collectives in the third, the last maybe not ended."""
    recorder = FlightRecorder(flight_path(folder, rank), rank, 3)
    recorder.leave(recorder.enter(0, pack_words("world", "barrier", "t.py:1 f")))
    recorder.set_step(2)
    for seq in range(1, 1 + collectives):
        number = recorder.enter(seq, pack_words("world", _TEXT, f"t.py:{seq} f", "grads"))
        if seq < collectives or not is_open:
            recorder.leave(number)
    record = FlightRecord(recorder.path)
    waiting = tuple(one._replace(age_s=age_s) for one in waits_of([r for r in record.records() if not r.left_ns]))
    last = record.records()[-1]
    record.close()
    groups = {"world": Progress((0, 1, 2), 1 + collectives, ())}
    told = Status(rank, 3, os.getpid(), "h", step=2, groups=groups, waiting=waiting, last=last, **said)
    recorder.tell(told.to_json())
    return recorder


@pytest.mark.parametrize("lost", [False, True])
def test_who_is_on_another_machine_was_not_waited_for_by_who_has_left(tmp_path: Path, lost: bool) -> None:
    """The records of the others are not here. With an error that came of another the newest has not ended."""
    words = LastWords("PeerFailed", "rank 1 has gone", "t.py:2 f", is_consequence=True) if lost else None
    rank_in(tmp_path, 0, 2, is_open=False, words=words).close()
    (moment,) = moments_in([tmp_path])
    assert [list(op.absent) for op in moment.ops] == [[], [1, 2] if lost else []]
    assert ("waited for" in moment.says) == lost


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({}, "running"),
        (
            {"age_s": 9.0},
            "waits for rank 1: all_reduce at t.py:2 f (float32 [4] sum, 'grads')",
        ),
        (
            {"state": RAISED, "words": LastWords("PeerFailed", "rank 1", "t.py:2", is_consequence=True)},
            f"waited for rank 1: {_TEXT} at t.py:2 f; then PeerFailed",
        ),
        (
            {"state": RAISED, "words": LastWords("SystemExit", "1", "")},
            f"waited for rank 1: {_TEXT} at t.py:2 f; then SystemExit",
        ),
        ({"state": RAISED, "words": LastWords("ValueError", "no", "t.py:2")}, "raised at t.py:2: ValueError: no"),
    ],
)
def test_moment_has_the_operations_of_the_step_and_who_was_absent(
    tmp_path: Path, said: dict[str, Any], says: str
) -> None:
    recorders = [
        rank_in(tmp_path, 0, 2, is_open=True, **said),
        rank_in(tmp_path, 1, 1, is_open=False),
        rank_in(tmp_path, 2, 2, is_open=True, **said),
    ]
    moments = moments_in([tmp_path, tmp_path / "not there"])
    for recorder in recorders:
        recorder.close()
    assert [(each.rank, each.steps) for each in moments] == [(0, 2), (1, 2), (2, 2)]
    assert [[(op.seq, op.absent) for op in each.ops] for each in moments] == [
        [(1, []), (2, [1])],
        [(1, [])],
        [(1, []), (2, [1])],
    ]
    assert [op.left_ns > 0 for op in moments[0].ops] == [True, False]
    assert moments[0].says == says
    assert moments[1].says == "running"
    assert all(each.until_ns >= max(op.entered_ns for op in each.ops) for each in moments)
    gone = moments[1]._replace(says="killed, or gone without a word: at t.py:1 f")
    assert gone.told(was_ended=True).says == "ended because of another: at t.py:1 f"
    assert gone.told(was_ended=False) == gone
    assert [moment_of(each) for each in json.loads(json.dumps(moments))] == moments


def test_of_a_rank_that_was_ended_mute_it_is_said_whom_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its launcher, before it could say so: the operation has failed, and it stands where that is handled."""

    class Ended(open_step.Onlooker):
        def sights(self) -> dict[int, Sight]:
            return {rank: sight._replace(is_gone=True) for rank, sight in super().sights().items()}

    recorders = [rank_in(tmp_path, rank, 2 - (rank == 1), is_open=False, stack=("t.py:1 f",)) for rank in range(3)]
    monkeypatch.setattr(open_step, "Onlooker", Ended)
    survivor, killed, _ = moments_in([tmp_path])
    for recorder in recorders:
        recorder.close()
    waited = f"ended because of another, while it waited for rank 1: {_TEXT} at t.py:2 f"
    assert survivor.told(was_ended=True).says == waited
    assert killed.told(was_ended=False).says == "killed, or gone without a word: at t.py:1 f"


def test_moment_has_the_phases_of_that_step_to_the_wait_that_has_not_ended(tmp_path: Path) -> None:
    phases = ((DATA, 5), (FORWARD, 7))
    recorders = [
        rank_in(tmp_path, 0, 2, is_open=True, age_s=9.0, unmoved_s=9.0, phases=phases),
        rank_in(tmp_path, 1, 1, is_open=False, phases=phases),
    ]
    waiting, absent = moments_in([tmp_path])
    assert waiting.phases == [*phases, (EXPOSED, waiting.ops[1].entered_ns)]
    assert absent.phases == [*phases]
    assert [moment_of(each) for each in json.loads(json.dumps([waiting, absent]))] == [waiting, absent]
    assert moment_of(json.loads(json.dumps(absent[:-1]))).phases == [], "of a launcher that did not write them"
    record = FlightRecord(recorders[1].path)
    said = status_of(record.status())
    assert said is not None
    assert (from_record(record, said).phases, from_record(record, said).stood_step) == (phases, None)
    recorders[1].enter(2, pack_words("world", _TEXT, "t.py:2 f"))
    assert (from_record(record, said).phases, from_record(record, said).stood_step) == (phases, 2), "it has gone on"
    recorders[1].set_step(3)
    assert from_record(record, said).phases == (), "they are of the step before"
    assert (from_record(record, said).step, from_record(record, said).stood_step) == (3, 2)
    record.close()
    for recorder in recorders:
        recorder.close()


def test_another_thread_sees_the_phases_of_the_step_so_far() -> None:
    clock = StepClock()
    clock.close_reader = lambda: None
    clock.switch(BACKWARD)
    clock.step_done(1, 0)
    began_ns = time.monotonic_ns()
    while time.monotonic_ns() == began_ns:
        pass
    clock.switch(FORWARD)
    since_ns = time.monotonic_ns()
    while (until_ns := time.monotonic_ns()) == since_ns:
        pass
    clock.waited(7, since_ns, until_ns)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(clock.so_far, 8).result()
    assert [phase for phase, _ in seen] == [OTHER, FORWARD, EXPOSED, FORWARD]
    assert [at for _, at in seen] == sorted(at for _, at in seen)
    assert seen[2:] == [(EXPOSED, since_ns), (FORWARD, until_ns)]
    assert clock.so_far(1) == seen[:1]


def moments_of(run: Run, *, ended: int) -> list[Moment]:
    """Of the step after `ended` steps: rank 1 stays in it after a collective, rank 0 waits for it in the next one."""
    zero = run.ranks[0].starts[-1].clock_ns
    after = zero + 1000 * 1000 * 1000

    def op(seq: int, entered_ms: int, left_ms: int, *absent: int) -> OpenOp:
        left_ns = after + 10**6 * left_ms if left_ms else 0
        return OpenOp("world", seq, _TEXT, "t.py:1", "", after + 10**6 * entered_ms, left_ns, absent)

    return [
        Moment(0, ended, after + 10**9, "waits for rank 1", [op(90, 10, 20), op(91, 30, 500, 1)]),
        Moment(1, ended, after + 9 * 10**8, "does not move", [op(90, 15, 20)]),
    ]


def test_open_step_is_drawn_to_its_end_with_who_is_to_blame(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    lanes = lanes_of(run, run.ranks[0].starts[0].time_ns / 1e3, moments=moments_of(run, ended=6), culprits=[1])
    *others, lane = lanes["steps"]
    assert (lane["step"], lane["why"]) == (7, "open")
    assert others
    assert all(other["why"] != "open" and other["step"] <= 6 for other in others)
    waiting, late = lane["ranks"]
    assert [waiting["culprit"], late["culprit"]] == [False, True]
    assert [waiting["says"], late["says"]] == ["waits for rank 1", "does not move"]
    assert waiting["spans"] == [["open", waiting["began_us"], waiting["ended_us"]]]
    assert lane["ended_us"] - lane["began_us"] == waiting["ended_us"]
    assert waiting["ended_us"] == pytest.approx(late["ended_us"] + 100_000, abs=10_000), "whose clock began otherwise"
    _, key, entered, left, began, *waited = waiting["ops"][1]
    assert (left, began, waited) == (waiting["ended_us"], entered, [left - entered] * 2), "it never came about"
    assert waiting["ops"][0][4:] == [-1, 0, 0], "nobody knows whether the thread stood in it"
    shared, missed = lane["joins"]
    assert shared[:2] == [waiting["ops"][0][1], 1]
    assert missed == [key, 1, 0, 0, None]


def test_rank_that_is_a_step_behind_is_said_to_be(tmp_path: Path) -> None:
    """Its part in the last collective was done, so that the others ended that step without it."""
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    ahead, behind = moments_of(run, ended=6)
    lane = lanes_of(run, 0.0, moments=[ahead, behind._replace(steps=5)], culprits=[1])["steps"][-1]
    assert (lane["step"], [row["step"] for row in lane["ranks"]]) == (7, [7, 6])


@pytest.mark.parametrize(
    ("counted", "phases", "is_said"),
    [(1, [OTHER, DATA], True), (0, [OTHER, DATA], False), (1, [OTHER, FORWARD], False)],
)
def test_open_step_that_was_only_counted_is_said_to_be_one(
    tmp_path: Path, counted: int, phases: list[int], is_said: bool
) -> None:
    """Else a rank in its backward would be shown in "other", and nobody would know why."""
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    lines = run.ranks[0].lines
    rank = replace(run.ranks[0], lines=(*lines[:-1], replace(lines[-1], counted=counted)))
    moments = moments_of(run, ended=6)
    spans = [(phase, moments[0].until_ns - 10**8 * at) for at, phase in zip((5, 3), phases, strict=True)]
    moments[0] = moments[0]._replace(phases=spans)
    *_, lane = lanes_of(replace(run, ranks={**run.ranks, 0: rank}), 0.0, moments=moments)["steps"]
    assert (lane["why"], lane["counted"]) == ("open", is_said)


def test_phases_are_drawn_as_far_as_they_are_known(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    zero_ns = run.ranks[0].starts[-1].clock_ns + 1000 * 1000 * 1000
    phases = [(DATA, zero_ns + 2 * 10**6), (EXPOSED, zero_ns + 10 * 10**6)]
    first, second = moments_of(run, ended=6)
    first = first._replace(phases=phases)
    second = second._replace(phases=[(BACKWARD, 0), (OPTIMIZER, zero_ns)])
    lane = lanes_of(run, 0.0, moments=[first, second])["steps"][-1]
    assert not lane["estimated"]
    first_us, second_us = (row["began_us"] for row in lane["ranks"])
    (unknown, data, exposed), (backward, optimizer) = (row["spans"] for row in lane["ranks"])
    assert [unknown[0], data[0], exposed[0], backward[0], optimizer[0]] == [
        *("open", "data", "exposed"),
        *("backward", "optimizer"),
    ]
    assert (unknown[1], exposed[2]) == (first_us, lane["ranks"][0]["ended_us"])
    assert (unknown[2], data[2]) == (data[1], exposed[1]) == (data[1], data[1] + 8000)
    assert (backward[1], optimizer[2]) == (second_us, lane["ranks"][1]["ended_us"])
    lost = [each._replace(steps=9) for each in (first, second)]
    late = lanes_of(run, 0.0, moments=lost)["steps"][-1]
    assert [row["spans"][0][0] for row in late["ranks"]] == ["data", "backward"], "they are older than the operations"


def test_thread_stood_in_the_first_of_several_that_were_missed(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    first, second = moments_of(run, ended=6)
    later = first.ops[1]._replace(seq=92, entered_ns=first.ops[1].entered_ns + 10**6)
    lane = lanes_of(run, 0.0, moments=[first._replace(ops=[*first.ops, later]), second])["steps"][-1]
    row = lane["ranks"][0]
    assert [op[3] == row["ended_us"] for op in row["ops"]] == [False, True, True], "both were under way to the end"
    assert [op[5] > 0 for op in row["ops"]] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "stood_ms", "entered_ms"),
    [(FROM_CPP, 22, 22), (FROM_CPP, 15, 30), (FROM_CPP, 40, 30), (_TEXT, 22, 30)],
)
def test_what_torch_starts_late_by_its_word_is_drawn_from_where_the_thread_stood(
    tmp_path: Path, text: str, stood_ms: int, entered_ms: int
) -> None:
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    first, second = moments_of(run, ended=6)
    zero_ns = run.ranks[0].starts[-1].clock_ns + 1000 * 1000 * 1000
    phases = [(BACKWARD, zero_ns), (EXPOSED, zero_ns + stood_ms * 10**6), (OTHER, zero_ns + 600 * 10**6)]
    first = first._replace(phases=phases, ops=[first.ops[0], first.ops[1]._replace(text=text)])
    row = lanes_of(run, 0.0, moments=[first, second])["steps"][-1]["ranks"][0]
    ended, missed = row["ops"]
    assert missed[2] - ended[2] == 1000 * (entered_ms - 10)
    assert missed[4:] == [missed[2], *[row["ended_us"] - missed[2]] * 2]


def test_step_of_a_killed_rank_begins_with_what_it_did_where_its_last_lines_are_missing(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    lane = lanes_of(run, 0.0, moments=moments_of(run, ended=9))["steps"][-1]
    assert lane["step"] == 10
    assert [rank["ops"][0][2] - rank["began_us"] for rank in lane["ranks"]] == [0, 0]
    alone = lanes_of(run, 0.0, moments=moments_of(run, ended=9)[1:])["steps"][-1]
    assert [rank["rank"] for rank in alone["ranks"]] == [1]


def test_killed_rank_that_had_not_begun_the_step_stands_where_it_was_seen_last(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    alone = moments_of(run, ended=9)[1]._replace(ops=[])
    row, late = lanes_of(run, 0.0, moments=[moments_of(run, ended=9)[0], alone])["steps"][-1]["ranks"]
    assert row["began_us"] < late["began_us"] == late["ended_us"]
    assert late["ended_us"] <= row["ended_us"]


@pytest.mark.parametrize("lines", [0, 3])
def test_killed_rank_that_was_seen_last_before_the_others_began_the_step_died_within_it(
    tmp_path: Path, lines: int
) -> None:
    """Its pulse is a quarter of a second old, and so may its last lines be, or there are none."""
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    before, dead = moments_of(run, ended=6)
    dead = dead._replace(ops=[], until_ns=run.ranks[1].starts[-1].clock_ns + 2 * 10**6)
    kept = replace(run.ranks[1], lines=run.ranks[1].lines[:lines])
    run = replace(run, ranks={**run.ranks, 1: kept})
    row, late = lanes_of(run, 0.0, moments=[before, dead], culprits=[1])["steps"][-1]["ranks"]
    assert late["began_us"] == pytest.approx(row["began_us"], abs=10_000), "whose clock began otherwise"
    assert late["ended_us"] == row["ended_us"]
    assert late["spans"] == [["open", late["began_us"], late["ended_us"]]]


@pytest.mark.parametrize(("code", "culprits"), [(1, [True, False]), (130, [False, True])])
def test_launcher_tells_of_it_and_its_causes_or_what_was_found_name_the_culprit(
    tmp_path: Path, code: int, culprits: list[bool]
) -> None:
    run = World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    at_ns = began_ns(tmp_path)
    finding = {"kind": "hang", "culprits": [1], "text": "HANG", "is_certain": False, "key": "k"}
    add_notes(tmp_path, 0, ("finding", 10_000, finding))
    add_launch(
        tmp_path,
        {"launch": "x", "time_ns": at_ns - 1, "host": "h", "pid": 1},
        {"attempt": "a/0", "world_size": 2, "flights": str(tmp_path / "gone"), "time_ns": at_ns - 1},
    )
    document = document_of(RunReader(tmp_path).read(), "failed", 0)
    assert all(lane["why"] != "open" for lane in document["lanes"]["steps"])
    first, second = moments_of(run, ended=6)
    add_launch(
        tmp_path,
        {"left": "a/0", "ranks": [first], "time_ns": at_ns},
        {"left": "a/0", "ranks": [second], "time_ns": at_ns},  # another machine's
        {"ended": "a/0", "code": code, "causes": ["rank 0 failed at t.py:3: ValueError: no"], "time_ns": at_ns + 1},
        {"over": "x", "code": code, "time_ns": at_ns + 2},
    )
    lane = document_of(RunReader(tmp_path).read(), "failed", 0)["lanes"]["steps"][-1]
    assert (lane["why"], [rank["culprit"] for rank in lane["ranks"]]) == ("open", culprits)
