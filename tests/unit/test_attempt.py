"""How long those that are left may go on once a rank was killed, on a clock that its launcher's own work moves."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch import attempt
from lockstep.launch.attempt import Attempt
from lockstep.launch.course import Course
from lockstep.launch.job import Supervision
from lockstep.launch.recovery import RestartPolicy
from lockstep.observe.flight import FlightRecorder, Record
from lockstep.observe.hang import FAILING
from lockstep.observe.sights import FlightRecord, flight_path
from lockstep.observe.status import Status, Waiting

_LOOK_S, _TELLING_S = 0.1, 5.0


class Workers:
    """Of two ranks, of which one was killed; the other ends by itself at its `last` look, if it lives so long."""

    def __init__(self, last: int) -> None:
        self.looks, self.last, self.is_killed = 0, last, False
        self.processes = {0: SimpleNamespace(exit_code=None, handle=-1), 1: SimpleNamespace(exit_code=-signal.SIGKILL)}

    def look(self) -> None:
        self.looks += 1

    def running(self) -> dict[int, Any]:
        return {} if self.is_killed or self.looks >= self.last else {0: self.processes[0]}

    def failed(self) -> bool:
        return True

    cause_is_known = failed

    def stopped(self) -> dict[int, int]:
        return {}

    pids = stopped

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(attempt, "time", SimpleNamespace(monotonic=lambda: made.now_s, sleep=lambda _: None))
    for name in ("read_pulses", "reap_strangers"):
        monkeypatch.setattr(attempt, name, lambda *_: [])
    return made


def attended(workers: Workers, flights: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the other rank was killed."""

    def tell(running: Attempt) -> None:
        if not running._told:
            clock.now_s += _TELLING_S
            running._told.add(1)

    def wait(*_: object) -> None:
        clock.now_s += _LOOK_S

    monkeypatch.setattr(Attempt, "_tell_ends", tell)
    monkeypatch.setattr(Attempt, "_look_at_states", lambda *_: None)
    mine: Any = object.__new__(Attempt)
    mine.workers, mine.ranks, mine._flights, mine._pulses, mine._told = workers, {0: 0, 1: 1}, flights, flights, set()
    mine._course, mine._machines = Course(Supervision(RestartPolicy(0))), None
    mine._signals = SimpleNamespace(wait=wait, arrived=(), count=0)
    mine._starter = SimpleNamespace(look=lambda _: None)
    assert mine.attend()
    return workers.is_killed


@pytest.mark.parametrize(("last", "is_killed"), [(8, False), (20, True)])
def test_time_to_speak_begins_when_the_others_were_told(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, last: int, is_killed: bool
) -> None:
    """Not before: writing that down may take longer than they have."""
    assert attended(Workers(last), tmp_path, clock, monkeypatch) is is_killed


@pytest.mark.parametrize(("waits", "is_said"), [(True, False), (True, True), (False, False)])
def test_who_waits_is_not_killed_before_its_guard_has_said_why(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, waits: bool, is_said: bool
) -> None:
    """Nothing fails at a store or on a GPU, as a wait of Gloo does."""
    recorder = FlightRecorder(flight_path(tmp_path, 0), 0, 2)
    record = Record(7, 7, 20, 1, 0, 0, False, "WORLD", "all_reduce float32 [4] sum", "train.py:3 main", "")
    recorder.tell(Status(0, 2, 4711, "host", waiting=(Waiting(record, 0.1),) * waits).to_json())
    if is_said:
        with contextlib.closing(FlightRecord(recorder.path)) as record_of_0:
            record_of_0.put_up(b"GONE")
    assert attended(Workers(20), tmp_path, clock, monkeypatch) is not (waits and not is_said)
    recorder.close()


@pytest.mark.parametrize(("activity", "is_killed"), [(FAILING, False), ("checkpoint", True)])
def test_who_asks_why_it_has_failed_is_not_killed_before_it_has_said_so(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, activity: str, is_killed: bool
) -> None:
    recorder = FlightRecorder(flight_path(tmp_path, 0), 0, 2)
    recorder.tell(Status(0, 2, 4711, "host", activity=activity).to_json())
    assert attended(Workers(20), tmp_path, clock, monkeypatch) is is_killed
    recorder.close()
