"""Which of several ended processes was the cause, and how that is said."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.agent import Ended, describe, first_failure
from lockstep.launch.worker import (
    ERROR_FILE,
    Failure,
    StopRequest,
    describe_failure,
    read_failure,
    report_failure,
    stop_signals,
)


def failure(rank: int, time_s: float = 1.0, **fields: Any) -> Failure:
    values: dict[str, Any] = {"kind": "ValueError", "message": "bad", "exit_code": 1, "is_expected": False}
    return Failure(rank=rank, trace="", time_s=time_s, **{**values, "is_consequence": False, **fields})


def ended(rank: int, exit_code: int, said: Failure | None = None, was_ended: bool = False, last: str = "") -> Ended:
    return Ended(rank, 100 + rank, exit_code, was_ended, said, last)


@pytest.mark.parametrize(
    ("processes", "cause"),
    [
        ([ended(0, 0), ended(1, 0)], None),
        ([ended(0, 130), ended(1, 130)], None),
        ([ended(0, 1, failure(0, 1.0, is_consequence=True)), ended(1, -signal.SIGKILL)], 1),
        ([ended(0, 1, failure(0, 1.0, is_consequence=True)), ended(1, 1, failure(1, 2.0))], 1),
        ([ended(0, 1, failure(0, 2.0)), ended(1, 1, failure(1, 1.0))], 1),
        ([ended(0, -signal.SIGKILL, was_ended=True), ended(1, 1, failure(1, 5.0))], 1),
        ([ended(0, 0), ended(1, 3)], 1),
        ([ended(0, 1, failure(0, 9.0, is_consequence=True)), ended(1, 1, failure(1, 8.0, is_consequence=True))], 1),
    ],
)
def test_the_cause_is_found(processes: list[Ended], cause: int | None) -> None:
    found = first_failure(processes)
    assert (None if found is None else found.rank) == cause


def test_how_a_process_ended_is_said() -> None:
    assert describe(ended(1, -9)) == "was killed by SIGKILL"
    assert describe(ended(1, -11, last="oh no")) == "was killed by SIGSEGV; its last words: oh no"
    assert describe(ended(1, 3)) == "ended with exit code 3"
    assert describe(ended(1, 1, failure(1))) == "failed: ValueError: bad"
    assert describe(ended(1, 1, failure(1, is_expected=True))) == "bad"


def test_report_travels_by_file_and_torchrun_finds_the_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    assert read_failure(path) is None
    try:
        raise KeyError("lost")
    except KeyError as error:
        said = describe_failure(error, 3, 1, is_expected=False, is_consequence=False)
    report_failure(said, {ERROR_FILE: str(path), "LOCKSTEP_AGENT_PID": "1"})
    assert read_failure(path) == said
    assert "test_report_travels" in said.trace
    assert json.loads(path.read_text())["message"]["message"] == "KeyError: 'lost'"
    assert capsys.readouterr().err == ""  # the agent says it once for all ranks
    report_failure(said, {"WORLD_SIZE": "4"})
    assert capsys.readouterr().err == f"{said.trace}lockstep: rank 3: 'lost'\n"


def test_stop_request_waits_for_the_loop_and_raises_before_it() -> None:
    before = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        stop = StopRequest(has_launcher=True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        stop = StopRequest(has_launcher=True)
        stop.arm()
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
