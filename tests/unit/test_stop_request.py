"""A signal asks a run to stop between two steps: on one rank, with real signals."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import lockstep
from lockstep.comm.pulse import create_pulses, open_pulse, read_pulses
from lockstep.errors import ConfigError
from lockstep.launch.worker import INTERRUPTED, REQUEUE, StopRequest, stop_signals

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


class OneRank:
    """As much of a communicator as `agreed` needs, with what the other ranks would say."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.others = 0
        self.calls = 0

    def all_reduce(self, tensor: torch.Tensor, reduce: str, *, label: str) -> None:
        assert (reduce, label, tensor.dtype, tensor.shape) == ("max", "stop", torch.int64, (1,))
        self.calls += 1
        tensor.clamp_(min=self.others)


@pytest.fixture
def comm() -> Any:
    return OneRank()


@pytest.fixture(autouse=True)
def _handlers_are_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before, "close() has not put back what was there"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_each_of_the_signals_asks_and_says_its_name(comm: OneRank, number: signal.Signals) -> None:
    stop: Any = lockstep.StopRequest(comm)  # pyright: ignore
    try:
        assert (stop.agreed(), stop.is_set(), stop.reason) == (False, False, "")
        signal.raise_signal(number)
        assert (stop.is_set(), stop.reason) == (True, number.name)
        assert stop.agreed()
        assert stop.agreed()
        assert comm.calls == 2, "once all know, nobody asks again"
    finally:
        stop.close()
    stop.close()


def test_handler_that_c_has_made_is_put_back(comm: Any, tmp_path: Path) -> None:
    """As faulthandler's: Python takes it for none, and without it SIGUSR1 ends the process."""
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            stop = StopRequest(comm)
            signal.raise_signal(signal.SIGUSR1)
            assert stop.reason == "SIGUSR1"
            assert not (tmp_path / "stacks").read_text()
            stop.close()
            signal.raise_signal(signal.SIGUSR1)
            assert "test_handler_that_c_has_made" in (tmp_path / "stacks").read_text()
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_signal_of_another_rank_stops_this_one_too(comm: Any) -> None:
    stop = StopRequest(comm)
    try:
        assert not stop.agreed()
        comm.others = int(signal.SIGUSR1)
        assert stop.agreed()
        assert not stop.is_set()
        assert stop.reason == "SIGUSR1"
    finally:
        stop.close()


def test_all_ranks_name_the_same_signal(comm: Any) -> None:
    stop = StopRequest(comm)
    try:
        comm.others = int(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGINT"
        assert stop.agreed()
        assert stop.reason == "SIGTERM"
    finally:
        stop.close()


def test_without_a_communicator_it_is_for_a_loop_that_looks_itself() -> None:
    stop = StopRequest(has_launcher=True)
    try:
        with pytest.raises(ConfigError, match=r"StopRequest\(comm\)"):
            stop.agreed()
        stop.arm()
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # with a launcher, which ends all ranks together
        assert stop.is_set()
    finally:
        stop.close()


def test_before_there_is_a_loop_a_signal_raises_where_nobody_else_is_told() -> None:
    stop = StopRequest(has_launcher=False)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        stop.close()


def test_ignored_signals_stay_ignored(comm: Any) -> None:
    """`nohup` ignores SIGHUP, a shell the SIGINT of what runs in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()
        stop = StopRequest(comm)
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
        stop.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_only_the_main_thread_can_have_it(comm: Any) -> None:
    errors: list[BaseException] = []

    def body() -> None:
        try:
            StopRequest(comm)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


# ------------------------------------------------------------------ in a process of its own

_START = """
import os, signal, sys, time
import lockstep
from lockstep.launch.worker import StopRequest
stop = StopRequest()
stop.arm()
"""


@contextmanager
def run(script: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process that runs `script` outside any launcher, and what it prints."""
    environ = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_AGENT_PID"}
    process = subprocess.Popen([sys.executable, "-c", _START + script], env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        try:
            yield process, process.stdout
        finally:
            process.kill()


def test_second_signal_ends_at_once_a_process_without_a_launcher() -> None:
    script = """
print("ready", flush=True)
while not stop.is_set():
    time.sleep(0.001)
print("saving", stop.reason, flush=True)
try:
    while True:
        time.sleep(1)
finally:
    print("no clean-up may stand in the way", flush=True)
"""
    with run(script) as (process, printed):
        assert printed.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert printed.readline() == "saving SIGUSR1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == INTERRUPTED
        assert printed.read() == ""


def test_loop_that_stops_ends_with_the_code_that_means_again() -> None:
    script = """
print("ready", flush=True)
while not stop.is_set():
    time.sleep(0.001)
sys.exit(lockstep.REQUEUE)
"""
    with run(script) as (process, printed):
        assert printed.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == REQUEUE == 75


def test_forked_child_hears_only_the_signal_that_ends_it() -> None:
    """A data loader's workers: Ctrl-C reaches the whole group, but they have to go on until the run has saved."""
    script = """
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
    os.write(writing, b"set" if stop.is_set() else b"not set")
    while True:
        time.sleep(1)
told = os.read(reading, 100).decode()
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(told, os.waitstatus_to_exitcode(status), stop.is_set(), flush=True)
"""
    with run(script) as (process, printed):
        assert printed.readline() == f"not set {-signal.SIGTERM} False\n"
        assert process.wait(20) == 0


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_before_there_is_a_loop_a_launcher_sees_the_signal(number: signal.Signals) -> None:
    """At once, also while the process is blocked where no Python runs: in a rendezvous, for example."""
    script = """
import ctypes
stop.close()
stop = StopRequest(has_launcher=True)
print("ready", flush=True)
ctypes.PyDLL(None).sleep(600)  # it holds the interpreter: no handler of Python's would run
"""
    with run(script) as (process, printed):
        assert printed.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(20) == -number


def test_supervisor_reads_which_signal_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_pulses(tmp_path / "pulse", 2)
    monkeypatch.setenv("LOCKSTEP_PULSE", str(tmp_path / "pulse"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    stop = StopRequest(has_launcher=True)
    stop.arm()
    try:
        assert [beat.asked for beat in read_pulses(tmp_path / "pulse")] == [0]
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert [beat.asked for beat in read_pulses(tmp_path / "pulse")] == [signal.SIGUSR1]
    finally:
        stop.close()
        open_pulse(os.environ).close()


def test_no_signal_changes_an_exit_code_that_is_settled() -> None:
    script = """
import atexit
stop.close()
stop = StopRequest(has_launcher=True)
stop.settle()
reading, writing = os.pipe()

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(15, 2, 1, 10)):
        for number in numbers:
            kill(pid, number)

keep = Late()
stop.keep = keep  # gone only when the interpreter clears its modules: handlers of Python's are gone by then
sys.exit(lockstep.REQUEUE)
"""
    with run(script) as (process, _):
        assert process.wait(20) == REQUEUE


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("with leaving_at_once(): os.kill(os.getpid(), {0}); time.sleep(60)", INTERRUPTED),
        ("with leaving_at_once(): pass\nos.kill(os.getpid(), {0}); sys.exit(3)", 3),
        ("with leaving_at_once() as (settle, _): settle(); os.kill(os.getpid(), {0})\nsys.exit(5)", 5),
        ("try:\n    with leaving_at_once(): 1 / 0\nfinally: os.kill(os.getpid(), {0})", -signal.SIGTERM),
        ("signal.signal({0}, signal.SIG_IGN)\nwith leaving_at_once(): os.kill(os.getpid(), {0})\nsys.exit(4)", 4),
    ],
    ids=["within", "after", "settled", "after an exception", "ignored"],
)
def test_launcher_that_has_nothing_to_stop_leaves_at_once_and_only_then(script: str, code: int) -> None:
    start = "stop.close()\nfrom lockstep.launch.stop_signals import leaving_at_once\n"
    with run(start + script.format(int(signal.SIGTERM))) as (process, _):
        assert process.wait(20) == code
