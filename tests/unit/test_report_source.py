"""Reading a run's folder as it grows, finding it, and what its launcher and processes say of how it stands."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from profiled_worlds import World
from reported_runs import add_launch, began_ns

from lockstep.comm.waiting import wait_until
from lockstep.errors import ConfigError
from lockstep.observe.profile.run_record import Start, start_line
from lockstep.observe.report.run_rows import is_alive, status_of
from lockstep.observe.report.source import Launch, RunReader, find_run, places_of, record_in

_WORLD = World(work_us=lambda rank, step: 1000, steps=10)
_LAUNCHED = {"launch": "a", "command": ["train.py"], "time_ns": 10, "pid": 1, "host": "elsewhere"}
_BEGUN = {"attempt": "a/0", "world_size": 2, "time_ns": 20}
_ENDED = {"ended": "a/0", "code": 1, "causes": ["rank 1 failed"], "time_ns": 30}


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("chunk", [1, 37, 4096])
def test_reading_in_pieces_gives_what_reading_at_once_gives(tmp_path: Path, chunk: int) -> None:
    whole = _WORLD.run(tmp_path / "whole").folder
    part = tmp_path / "part"
    part.mkdir()
    reader, text = RunReader(part), (whole / "rank-0.jsonl").read_bytes()
    text = text[: 300 * chunk]
    for at in range(0, len(text), chunk):
        with (part / "rank-0.jsonl").open("ab") as file:
            file.write(text[at : at + chunk])
        reader.read()
    found = reader.read()
    assert found.run.ranks == RunReader(part).read().run.ranks
    assert reader.size == len(text) - len(text.rpartition(b"\n")[2])
    assert not found.problems


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    _WORLD.run(tmp_path)
    reader = RunReader(tmp_path)
    reader.read()
    before = reader.size
    reader.read()
    assert reader.size == before


def test_broken_record_is_said_and_keeps_what_came_before(tmp_path: Path) -> None:
    _WORLD.run(tmp_path)
    with (tmp_path / "rank-1.jsonl").open("a") as file:
        file.write('{"step":11,"ops":7}\n{"step":12}\n')
    (tmp_path / "rank-x.jsonl").write_text("no record\n")
    add_launch(tmp_path, _BEGUN)
    reader = RunReader(tmp_path)
    source = reader.read()
    assert len(source.problems) == 2
    assert any(problem.startswith("rank-1.jsonl: line ") for problem in source.problems)
    assert any(problem.startswith("launch.jsonl: ") for problem in source.problems)
    assert len(source.run.ranks[1].lines) == 10
    assert reader.read().problems == source.problems


def test_another_run_in_the_same_place_is_noticed(tmp_path: Path) -> None:
    _WORLD.run(tmp_path)
    reader = RunReader(tmp_path)
    reader.read()
    (tmp_path / "rank-0.jsonl").write_text("")
    assert reader.read().problems == ("rank-0.jsonl: another run has taken its place",)


def test_launchers_lines(tmp_path: Path) -> None:
    add_launch(tmp_path, _LAUNCHED, {**_BEGUN, "flights": "x"}, _BEGUN, _ENDED, {"found": "lockstep: they differ"})
    add_launch(tmp_path, {"attempt": "a/1", "world_size": 1, "time_ns": 40}, {"news": 1})
    launch = RunReader(tmp_path).read().launch
    assert launch is not None
    assert [(a.name, a.world_size, a.code, a.causes) for a in launch.attempts] == [
        ("a/0", 2, 1, ("rank 1 failed",)),
        ("a/1", 1, None, ()),
    ]
    assert launch.found == ("lockstep: they differ",)
    assert launch.code is None
    add_launch(
        tmp_path, {"over": "a", "code": 75, "time_ns": 50}, {**_LAUNCHED, "launch": "b", "time_ns": 60, "pid": 2}
    )
    again = RunReader(tmp_path).read().launch
    assert again is not None
    assert (again.began_ns, again.pid, again.code, len(again.attempts)) == (10, 2, None, 2)


def test_record_that_lies_elsewhere_is_followed_unless_it_is_of_another_run(tmp_path: Path) -> None:
    run, launched = tmp_path / "out" / "profile", tmp_path / "launched"
    _WORLD.run(run)
    launched.mkdir()
    before = began_ns(run) - 10**9
    add_launch(launched, {**_LAUNCHED, "time_ns": before}, _BEGUN, {"record": str(tmp_path / "out")})
    source = RunReader(launched).read()
    assert [len(record.lines) for record in source.run.ranks.values()] == [10, 10]
    assert (source.folder, source.run.folder) == (launched, run)
    assert (places_of(launched)[0], places_of(run)[0]) == (run, run)
    assert source.launch is not None
    assert [attempt.name for attempt in source.launch.attempts] == ["a/0"]
    add_launch(launched, {"over": "a", "code": 0, "time_ns": before + 1})
    assert not RunReader(launched).read().run.ranks, "they began when this run was over"


# ------------------------------------------------------------------ finding


def test_folders_that_are_no_run_are_refused_with_what_to_type(tmp_path: Path) -> None:
    place = tmp_path / "one" / "two"
    place.mkdir(parents=True)
    (place / "file").write_text("")
    for name, how in (("", "holds no record of a run"), ("none", "does not exist"), ("no/ne", "does not exist")):
        with pytest.raises(ConfigError, match=f"{how}: give the folder that `lockstep run`.* in runs/$"):
            find_run(place / name, place)
    with pytest.raises(ConfigError, match="is no folder: give the folder"):
        find_run(place / "file", place)
    with pytest.raises(ConfigError, match="`lockstep run` makes one"):
        find_run(None, place / "runs")


@pytest.mark.parametrize("name", ["runs", "runs/typo", "elsewhere", "runs/5/none"])
def test_runs_nearby_are_named_the_newest_first(tmp_path: Path, name: str) -> None:
    for number in range(5):
        path = tmp_path / "runs" / str(number) / "profile" / "launch.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("")
        os.utime(path, (10**9 + number, 10**9 + number))
    (tmp_path / "runs" / "5").mkdir()
    runs = tmp_path / "runs"
    with pytest.raises(ConfigError) as refused:
        find_run(tmp_path / name, runs)
    assert str(refused.value).endswith(f"; the newest nearby: {runs / '4'}, {runs / '3'}, {runs / '2'}, ...")


def test_newest_run_is_taken(tmp_path: Path) -> None:
    for age, name in enumerate(("new/profile", "old", "older")):
        (tmp_path / name).mkdir(parents=True)
        path = tmp_path / name / "launch.jsonl"
        path.write_text("")
        os.utime(path, (10**9 - age, 10**9 - age))
    (tmp_path / "notes.txt").write_text("")
    assert find_run(None, tmp_path) == tmp_path / "new"
    assert find_run(tmp_path / "old", tmp_path) == tmp_path / "old"
    assert record_in(tmp_path / "new") == tmp_path / "new" / "profile"


# ------------------------------------------------------------------ how it stands


def status_with(tmp_path: Path, *lines: dict[str, object]) -> str:
    (tmp_path / "launch.jsonl").unlink(missing_ok=True)
    add_launch(tmp_path, *lines)
    return status_of(RunReader(tmp_path).read())


@pytest.mark.parametrize(
    ("code", "status"), [(0, "finished"), (75, "stopped"), (130, "stopped"), (1, "failed"), (-9, "failed")]
)
def test_exit_code_says_how_it_ended(tmp_path: Path, code: int, status: str) -> None:
    assert status_with(tmp_path, _LAUNCHED, {"over": "a", "code": code, "time_ns": 5}) == status


def test_without_an_end_the_processes_say_it(tmp_path: Path) -> None:
    host, now = socket.gethostname(), time.time_ns()
    mine = {**_LAUNCHED, "host": host, "pid": os.getpid(), "time_ns": now}
    assert status_with(tmp_path, mine) == "running"
    assert status_with(tmp_path, {**mine, "time_ns": 10**18}) == "failed"  # this process was not there then
    assert status_with(tmp_path, {**mine, "pid": 1 << 30}) == "failed"
    assert status_with(tmp_path, _LAUNCHED) == "running"  # elsewhere, and the file is new
    os.utime(tmp_path / "launch.jsonl", (10**9, 10**9))
    assert status_of(RunReader(tmp_path).read()) == "failed"
    (tmp_path / "launch.jsonl").unlink()
    (tmp_path / "rank-0.jsonl").write_text(start_line(Start(0, 1, "a", os.getpid(), host, now, 0)))
    assert status_of(RunReader(tmp_path).read()) == "running"
    (tmp_path / "rank-0.jsonl").write_text(start_line(Start(0, 1, "a", 1 << 30, host, now, 0)))
    assert status_of(RunReader(tmp_path).read()) == "unknown"
    assert Launch(1, 2, "h").code is None


def test_process_that_has_ended_does_not_live_on_as_a_zombie() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        began_s = time.time()
        assert is_alive(process.pid, began_s)
        assert not is_alive(process.pid, began_s - 1000)
        assert process.stdin is not None
        process.stdin.close()
        assert wait_until(lambda: not is_alive(process.pid, began_s), 20)
