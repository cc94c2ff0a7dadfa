"""What the launcher writes beside the records of the ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.ended import Ended
from lockstep.launch.launch_log import LaunchLog
from lockstep.observe.profile.window import LAUNCH


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LAUNCH).read_text().splitlines()]


def ended(rank: int, code: int, **about: Any) -> Ended:
    return Ended(rank, 100 + rank, code, about.pop("was_ended", False), None, "", at_s=float(rank), **about)


def fill(log: LaunchLog) -> None:
    log.begin()
    log.attempt("x/0", 3, Path("/flights"))
    log.ended("x/0", [ended(0, -9, was_ended=True), ended(1, 3), ended(2, -11)], "all_reduce and broadcast")
    log.attempt("x/1", 2, Path("/flights"))
    log.ended("x/1", [ended(0, 0), ended(1, 0)])
    log.over(0)


def test_starts_their_ends_and_their_causes(tmp_path: Path) -> None:
    command = ["lockstep", "run", "train.py", "--token", "s3cret"]
    fill(LaunchLog(tmp_path / "new" / "run", command=command, flags={"max_restarts": 1, "api_key": "s3cret"}))
    begun, first, found, failed, second, done, over = lines_of(tmp_path / "new" / "run")
    assert begun["command"] == [*command[:-1], "(not written down)"]
    assert begun["flags"] == {"max_restarts": 1, "api_key": "..."}
    assert begun["pid"] == os.getpid()
    assert (first["attempt"], first["world_size"], first["flights"]) == ("x/0", 3, "/flights")
    assert found["found"] == "all_reduce and broadcast"
    assert (failed["ended"], failed["code"]) == ("x/0", 3)
    assert failed["causes"] == ["rank 1 ended with exit code 3", "rank 2 was killed by SIGSEGV"]
    assert (second["attempt"], done["ended"], done["code"], done["causes"]) == ("x/1", "x/1", 0, [])
    assert (over["over"], over["code"]) == (begun["launch"], 0)
    times = [line["time_ns"] for line in (begun, first, found, failed, second, done, over)]
    assert times == sorted(times)


def test_ranks_that_were_ended_for_a_failure_on_another_machine_have_that_cause(tmp_path: Path) -> None:
    log = LaunchLog(tmp_path)
    log.ended("x/0", [ended(0, -9, was_ended=True)], elsewhere="rank 1 (pid 7, far) failed")
    log.ended("x/0", [ended(0, 3)], elsewhere="rank 1 (pid 7, far) failed")
    log.ended("x/0", [ended(0, 0)])
    told = [(line["code"], line["causes"]) for line in lines_of(tmp_path)]
    assert told == [(1, ["rank 1 (pid 7, far) failed"]), (3, ["rank 0 ended with exit code 3"]), (0, [])]


def test_folder_of_a_trainer_is_left_alone_until_a_rank_has_made_it(tmp_path: Path) -> None:
    older, log = tmp_path / "rank-0.jsonl", LaunchLog(tmp_path, is_ours=False)
    older.touch()
    os.utime(older, ns=(1, 1))
    log.begin()
    log.attempt("x/0", 1, Path("/flights"))
    log.flush()
    assert os.listdir(tmp_path) == ["rank-0.jsonl"]
    older.write_text("a rank is here")
    log.flush()
    assert [next(iter(line)) for line in lines_of(tmp_path)] == ["launch", "attempt"]
    older.unlink()
    log.over(1)
    assert len(lines_of(tmp_path)) == 3


def test_run_without_a_record_and_disk_that_takes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(LaunchLog())
    (tmp_path / "file").touch()
    fill(LaunchLog(tmp_path / "file"))
    why = f"{tmp_path}/file: File exists"
    assert capsys.readouterr().err == f"lockstep: what the launcher does is not recorded: {why}\n"
