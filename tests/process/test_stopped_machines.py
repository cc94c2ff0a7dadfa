"""Two launchers that meet on the loopback interface: one that is asked to stop takes the other with it."""

from __future__ import annotations

import base64
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from command_runs import Run, wait_for
from ports import free_port, mute_program

pytestmark = pytest.mark.limit_s(120)

# a rank that handles no signal yet, of a run that has a checkpoint
_BEGINS = """
import os, signal
from lockstep.comm.pulse import open_pulse
pulse = open_pulse(os.environ)
pulse.step(7)
pulse.committed(7)
print(f"rank {os.environ['RANK']} is up: pid {os.getpid()}", flush=True)
while True:
    signal.pause()
"""

Pair = tuple[Run, Run]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts the launcher of one machine."""
    (tmp_path / "begins.py").write_text(_BEGINS)
    runs: list[Run] = []

    def one(*words: str) -> Run:
        runs.append(Run(tmp_path, "run", *words, "--record=off", "begins.py", warm=True))
        return runs[-1]

    yield one
    for run in runs:
        run.close()


@pytest.fixture
def start(machine: Callable[..., Run]) -> Callable[[str], Pair]:
    """A machine that holds the store and one that does not, when both are up."""

    def both(nnodes: str) -> Pair:
        words = (f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
        words = (*words, "--rdzv-id=two", "--local-addr=127.0.0.1", "--max-restarts=3")
        conf = "--rdzv-conf=last_call_timeout=5,is_host="
        pair = machine(*words, f"{conf}true"), machine(*words, f"{conf}false")
        wait_for(
            lambda: all(run.pids() for run in pair), "both machines came up", lambda: "\n".join(map(Run.text, pair))
        )
        return pair

    return both


def test_rank_that_is_stopped_before_its_loop_stops_all_machines(start: Callable[[str], Pair]) -> None:
    holder, other = start("2")
    os.kill(other.pids()[0], signal.SIGTERM)
    for run in (holder, other):
        run.end(75)
        assert run.said()[1:] == ["stopped; the newest checkpoint is that of step 7"]
        assert "Exception" not in run.text()
    assert holder.said()[0] == f"{socket.gethostname()} was asked to stop by SIGTERM: stopping"
    assert other.said()[0].endswith("was ended by SIGTERM: stopping")


def test_machine_that_is_stopped_while_it_restarts_stops_the_other(start: Callable[[str], Pair]) -> None:
    holder, other = start("2")
    other.process.send_signal(signal.SIGSTOP)
    os.kill(holder.pids()[0], signal.SIGKILL)
    holder.await_text("restart 1 of 3")  # for which it needs the other
    holder.process.send_signal(signal.SIGTERM)
    holder.await_text("stopped while the processes were starting")
    other.process.send_signal(signal.SIGCONT)
    for run in (holder, other):
        run.end(75)
    assert other.said()[0] == f"{socket.gethostname()} was asked to stop by SIGTERM: stopping"


def test_machine_that_waits_for_another_is_stopped_with_it(start: Callable[[str], Pair]) -> None:
    holder, other = start("2")
    other.process.send_signal(signal.SIGSTOP)
    os.kill(holder.pids()[0], signal.SIGKILL)
    holder.await_text("restart 1 of 3")
    other.process.send_signal(signal.SIGTERM)
    other.process.send_signal(signal.SIGCONT)
    for run in (holder, other):
        run.end(75)
    assert holder.said()[-1] == "stopped while the processes were starting"


def test_launcher_that_stands_still_does_not_make_the_others_deaf(start: Callable[[str], Pair]) -> None:
    """The one that holds the store, which then answers nobody."""
    holder, other = start("2")
    holder.process.send_signal(signal.SIGSTOP)
    other.process.send_signal(signal.SIGTERM)
    other.end(75)
    assert other.said()[-1] == "stopped; the newest checkpoint is that of step 7"
    holder.process.send_signal(signal.SIGCONT)


def test_machine_that_waits_for_the_first_start_can_be_stopped(machine: Callable[..., Run]) -> None:
    """Where its own rendezvous has no limit for hours, and hears no signal: it is in C++."""
    with mute_program() as mute:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{mute}"
        runs = [
            machine("--nnodes=2", endpoint, "--rdzv-backend=c10d", "--rdzv-conf=is_host=false"),
            machine("--nnodes=2", endpoint, "--rdzv-backend=static", "--node-rank=1"),
            machine("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--node-rank=0"),
        ]
        for run, what in zip(runs, ("no torch store replies", "no torch store replies", "waiting for"), strict=True):
            run.await_text(what)
        for run in runs:
            run.process.send_signal(signal.SIGTERM)
        _are_stopped_before_the_start(runs)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _are_stopped_before_the_start(runs: Sequence[Run]) -> None:
    for run in runs:
        run.end(130)
        assert run.said()[-1] == "stopped while the processes were starting"


def test_machine_that_is_stopped_before_the_first_start_stops_those_that_wait(machine: Callable[..., Run]) -> None:
    """Two of three are there."""
    port = free_port()
    words = ("--nnodes=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=three")
    runs = [machine(*words, f"--rdzv-conf=is_host={holds}") for holds in ("true", "false")]
    wait_for(lambda: _listens(port), "the first waits for others", runs[0].text)
    store = TCPStore("127.0.0.1", port, is_master=False)
    both = [run.process.pid for run in runs]
    wait_for(lambda: all(map(_met(store), both)), "both wait for the third", runs[1].text)
    runs[1].process.send_signal(signal.SIGTERM)
    _are_stopped_before_the_start(runs)
    assert f"{socket.gethostname()} was asked to stop by SIGTERM: stopping" in runs[0].said()


def _met(store: TCPStore) -> Callable[[int], bool]:
    """Whether the launcher with this pid is among those that wait, as torch's rendezvous writes them down."""
    state = base64.b64decode(store.get("torch.rendezvous.three"))
    return lambda pid: pid.to_bytes(3, "little").rstrip(b"\0") in state


def test_others_go_on_where_fewer_machines_are_enough(start: Callable[[str], Pair]) -> None:
    holder, other = start("1:2")
    os.kill(other.pids()[0], signal.SIGTERM)
    other.end(75)
    assert holder.process.poll() is None
    os.kill(holder.pids()[0], signal.SIGKILL)
    wait_for(lambda: len(holder.pids()) == 2, "it came back alone", holder.text)
    holder.process.send_signal(signal.SIGINT)
    holder.end(75)
