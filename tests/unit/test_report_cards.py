"""What is said of a run first: the most severe, once, with whose fault it is and what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import World
from reported_runs import add_launch, add_notes, append_attempt, began_ns

from lockstep.cli.report import describe
from lockstep.launch.launch_log import LaunchLog
from lockstep.observe.report.document import document_of
from lockstep.observe.report.run_rows import Status
from lockstep.observe.report.source import RunReader
from lockstep.observe.wording import Finding, Kind

_EVEN = World(work_us=lambda rank, step: 5000, moves_us=100, steps=10)
_HANG = (
    "lockstep: HANG: rank 1 does not arrive\n  Culprit: rank 1 (host h, pid 3)\n  rank 0 waits in barrier #3\n"
    "Likely fix: call it on all ranks\nEvidence: runs/x"
)


def cards(folder: Path, status: Status = "finished") -> list[dict[str, Any]]:
    return document_of(RunReader(folder).read(), status, 0)["cards"]


def say(
    folder: Path,
    rank: int,
    at_us: int,
    kind: Kind = "hang",
    key: str = "k",
    is_certain: bool = True,
    done: int | None = None,
) -> None:
    finding = Finding(kind, (1,), _HANG, is_certain, key, done)
    add_notes(folder, rank, ("finding", at_us, json.loads(finding.to_json())))


def test_even_run_has_nothing_to_say(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    only = cards(tmp_path)
    assert [(card["severity"], card["title"]) for card in only] == [("good", "Nothing stands out")]
    assert only[0]["text"].startswith("15.3 ms per step")
    add_notes(tmp_path, 0, ("replicas", 10_000, {"step": 8, "equal": True, "digest": "ab", "what": "parameters"}))
    titles = [card["title"] for card in cards(tmp_path)]
    assert titles == ["Nothing stands out", "The ranks held one model through step 8"]


def test_nothing_is_said_of_a_run_of_which_too_little_is_known(tmp_path: Path) -> None:
    replace(_EVEN, steps=3).run(tmp_path)
    assert cards(tmp_path, "running") == []


def test_finding_is_said_once_with_its_step_and_its_fix(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    for rank in (0, 1):
        say(tmp_path, rank, 4 * 15_300 + 100)
    card, *_ = cards(tmp_path, "running")
    assert (card["severity"], card["title"], card["ranks"]) == ("error", "HANG: rank 1 does not arrive", [1])
    assert card["step"] == 5
    assert card["lever"] == "call it on all ranks"
    assert card["text"] == "  Culprit: rank 1 (host h, pid 3)\n  rank 0 waits in barrier #3\nEvidence: runs/x"
    assert sum("HANG" in each["title"] for each in cards(tmp_path)) == 1
    lanes = document_of(RunReader(tmp_path).read(), "running", 0)["lanes"]["steps"]
    assert [lane["step"] for lane in lanes if lane["why"] == "finding"] == [5]


def test_finding_about_an_earlier_step_leads_there(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    say(tmp_path, 0, 9 * 15_300 + 100, "mismatch", done=2)
    assert cards(tmp_path)[0]["step"] == 3
    lanes = document_of(RunReader(tmp_path).read(), "running", 0)["lanes"]["steps"]
    assert [lane["step"] for lane in lanes if lane["why"] == "finding"] == [3]


@pytest.mark.parametrize(
    ("kind", "is_certain", "severity"),
    [("waiting", False, "note"), ("data", False, "warning"), ("mismatch", True, "error"), ("waiting", True, "error")],
)
def test_severity_of_a_finding(tmp_path: Path, kind: Kind, is_certain: bool, severity: str) -> None:
    _EVEN.run(tmp_path)
    say(tmp_path, 0, 10, kind, is_certain=is_certain)
    found = next(card for card in cards(tmp_path) if "HANG" in card["title"])
    assert (found["severity"], found["step"]) == (severity, None)


@pytest.mark.parametrize(
    ("code", "severities"), [(1, ["error", "error"]), (130, ["error", "note"]), (0, ["warning", "error"])]
)
def test_hang_that_was_the_end_is_an_error_and_what_ctrl_c_raised_is_none(
    tmp_path: Path, code: int, severities: list[str]
) -> None:
    _EVEN.run(tmp_path)
    say(tmp_path, 0, 10, "hang", "first", is_certain=False)
    say(tmp_path, 0, 20, "raised", "then")
    launched = {"launch": "a", "command": [], "time_ns": 1, "pid": 1, "host": "h"}
    begun = {"attempt": "a/0", "world_size": 2, "time_ns": 2}
    add_launch(tmp_path, launched, begun, {"over": "a", "code": code, "time_ns": 10**19})
    assert sorted(card["severity"] for card in cards(tmp_path) if "HANG" in card["title"]) == sorted(severities)


def test_finding_that_a_restart_has_overcome_is_no_error_any_more(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    say(tmp_path, 0, 10)
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": 1, "pid": 1, "host": "h"},
        {"attempt": "a/0", "world_size": 2, "time_ns": 2},
    )
    assert cards(tmp_path)[0]["severity"] == "error"
    add_launch(tmp_path, {"attempt": "a/1", "world_size": 2, "time_ns": 10**19})
    assert [card["severity"] for card in cards(tmp_path) if "HANG" in card["title"]] == ["warning"]


def test_step_that_was_done_again_is_not_shown_for_what_was_found_in_it_before(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    say(tmp_path, 0, 9 * 15_300 + 100, done=2)
    began = began_ns(tmp_path)
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": began, "pid": 1, "host": "h"},
        {"attempt": "a/0", "world_size": 2, "time_ns": began},
        {"left": "a/0", "ranks": [[0, 12, began, "raised", []], [1, 11, began, "waits", []]]},
        {"ended": "a/0", "code": 1, "causes": ["rank 0 failed"], "time_ns": began + 9},
        {"attempt": "a/1", "world_size": 2, "time_ns": began + 10**12},
    )
    later = tmp_path / "later"
    replace(_EVEN, steps=4).run(later)
    for rank in (0, 1):
        append_attempt(tmp_path, rank, later, "a/1")
    document = document_of(RunReader(tmp_path).read(), "finished", 0)
    assert [card["step"] for card in document["cards"] if "HANG" in card["title"]] == [None]
    assert not [lane for lane in document["lanes"]["steps"] if lane["why"] == "finding"]
    first, second = document["run"]["attempts"]
    assert (first["last_step"], first["reached"]) == (None, 12)
    assert (second["last_step"], second["reached"]) == (4, 0)


def test_causes_of_the_end_and_what_was_found_after_it(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    began = began_ns(tmp_path)
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": began, "pid": 1 << 30, "host": "h"},
        {"attempt": "a/0", "world_size": 2, "time_ns": began},
        {"found": "lockstep: MISMATCH: all_reduce and barrier\n  rank 0: train.py:3"},
        {"ended": "a/0", "code": 1, "causes": ["rank 1 failed at train.py:9", "rank 0 saw it"], "time_ns": began + 9},
    )
    first, second, *_ = cards(tmp_path, "failed")
    assert first["ranks"] == [1]
    assert (first["title"], first["text"]) == ("The run failed: rank 1 failed at train.py:9", "rank 0 saw it")
    assert (second["title"], second["text"]) == ("MISMATCH: all_reduce and barrier", "  rank 0: train.py:3")
    assert {card["severity"] for card in (first, second)} == {"error"}
    stopped = cards(tmp_path, "stopped")
    assert "The run was stopped before its end" in [card["title"] for card in stopped]


def test_what_was_found_on_another_machine(tmp_path: Path) -> None:
    """One card with the end that came of it, as there; where a rank of this machine has said it, that is the one."""
    _EVEN.run(tmp_path)
    began, log = began_ns(tmp_path), LaunchLog(tmp_path)
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": began, "pid": 1 << 30, "host": "h"},
        {"attempt": "a/0", "world_size": 2, "time_ns": began},
        {"ended": "a/0", "code": 1, "causes": ["rank 1 was killed"], "time_ns": began + 9},
    )
    found = json.loads(Finding("gone", (1,), _HANG, True, "k", 4).to_json())
    log.found_elsewhere("a/0", found, "far")
    first, *others = cards(tmp_path, "failed")
    assert (first["title"], first["severity"], first["ranks"], first["step"]) == (
        "HANG: rank 1 does not arrive",
        "error",
        [1],
        5,
    )
    assert "Evidence, on far: runs/x" in first["text"]
    assert not any("killed" in card["title"] for card in others)
    say(tmp_path, 0, 100, "gone")
    assert [card["title"] for card in cards(tmp_path, "failed")].count(first["title"]) == 1
    assert "on far" not in cards(tmp_path, "failed")[0]["text"]


@pytest.mark.parametrize(
    ("cause", "is_one"),
    [
        ("rank 1 failed at train.py:9: ValueError: no", True),
        ("rank 0 failed at train.py:3: PeerFailed: HANG: rank 1 does not arrive", True),
        ("rank 0 failed at train.py:5: KeyError: 'other'", False),
    ],
)
def test_finding_and_the_end_that_it_led_to_are_one_card(tmp_path: Path, cause: str, is_one: bool) -> None:
    _EVEN.run(tmp_path)
    say(tmp_path, 0, 10, "raised")
    began = began_ns(tmp_path)
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": began, "pid": 1 << 30, "host": "h"},
        {"attempt": "a/0", "world_size": 2, "time_ns": began},
        {"ended": "a/0", "code": 1, "causes": [cause, "rank 0 saw it"], "time_ns": began + 9},
    )
    errors = [card for card in cards(tmp_path, "failed") if card["severity"] == "error"]
    assert len(errors) == 1 if is_one else 2
    assert (f"The run failed: {cause}\nrank 0 saw it" in errors[0]["text"]) is is_one
    assert errors[0]["lever"] == "call it on all ranks"


def test_what_was_found_again_after_a_restart_is_of_the_newest_start(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    say(tmp_path, 0, 10, "raised")
    began, later = began_ns(tmp_path), tmp_path / "later"
    _EVEN.run(later)
    say(later, 1, 10, "raised")
    for rank in (0, 1):
        append_attempt(tmp_path, rank, later, "a/1")
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": began, "pid": 1 << 30, "host": "h"},
        {"attempt": "a/0", "world_size": 2, "time_ns": began},
        {"attempt": "a/1", "world_size": 2, "time_ns": began + 10**12},
    )
    assert [card["severity"] for card in cards(tmp_path, "failed") if "HANG" in card["title"]] == ["error"]


def test_launcher_that_ended_alone_is_an_error_too(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    add_launch(tmp_path, {"launch": "a", "command": [], "time_ns": 1, "pid": 1 << 30, "host": "h"})
    assert cards(tmp_path, "failed")[0]["title"].startswith("The launcher has ended without a word")
    add_launch(tmp_path, {"over": "a", "code": 3, "time_ns": 2})
    assert cards(tmp_path, "failed")[0]["title"] == "The run failed with exit code 3"
    assert cards(tmp_path, "running")[0]["severity"] != "error"


def test_ranks_that_are_not_alike_are_named(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 5000, moves_us=100, steps=10, world_size=3).run(tmp_path)
    for rank in range(3):
        add_notes(tmp_path, rank, ("facts", 0, {"torch": "2.13.0" if rank != 1 else "2.12.0", "python": "3.11"}))
    unlike = [card for card in cards(tmp_path) if "differ in" in card["title"]]
    assert [(card["title"], card["ranks"]) for card in unlike] == [("The ranks differ in torch", [1])]
    assert unlike[0]["text"] == "ranks 0,2: 2.13.0\nrank 1: 2.12.0"


def test_what_costs_time_has_a_lever_and_whose_fault_it_is(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000, data_us=lambda rank, step: 9000 * rank, steps=12).run(tmp_path)
    card, *_ = cards(tmp_path)
    assert card["severity"] == "warning"
    assert card["title"].startswith("Rank 1 is late: the others lose ")
    assert card["ranks"] == [1]
    assert "in its loader that the others do not: add --profile" in card["lever"]


def test_command_prints_the_first_of_many_and_how_many_more(tmp_path: Path) -> None:
    _EVEN.run(tmp_path)
    for number in range(9):
        say(tmp_path, 0, 10, key=str(number))
    lines = list(describe(document_of(RunReader(tmp_path).read(), "failed", 0)))
    assert lines[0].startswith(f"run      {tmp_path.name}: failed, 2 ranks, 10 steps, ")
    assert lines[1] == "error    HANG: rank 1 does not arrive"
    assert lines[2] == "           Culprit: rank 1 (host h, pid 3)"
    assert lines[5] == "         to change that: call it on all ranks"
    assert lines[-1] == "... and 3 more in the report"
