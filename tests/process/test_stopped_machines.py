"""Two launchers that meet on the loopback interface: one that is asked to stop takes the other with it."""

from __future__ import annotations

import base64
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from command_runs import Run, wait_for

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
def start(tmp_path: Path) -> Iterator[Callable[[str], Pair]]:
    """A machine that holds the store and one that does not, when both are up."""
    (tmp_path / "begins.py").write_text(_BEGINS)
    runs: list[Run] = []

    def both(nnodes: str) -> Pair:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        words = ("run", f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=two")
        words = (*words, "--local-addr=127.0.0.1", "--max-restarts=3", "--record=off")
        for holds in ("true", "false"):
            runs.append(
                Run(tmp_path, *words, f"--rdzv-conf=is_host={holds},last_call_timeout=5", "begins.py", warm=True)
            )
        wait_for(lambda: all(run.pids() for run in runs), "both machines came up", text)
        return runs[0], runs[1]

    def text() -> str:
        return "\n".join(run.text() for run in runs)

    yield both
    for run in runs:
        run.close()


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


def test_machine_that_waits_for_the_first_start_can_be_stopped(tmp_path: Path) -> None:
    """Where its own rendezvous has no limit for hours, and hears no signal: it is in C++."""
    (tmp_path / "begins.py").write_text(_BEGINS)
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint, port = f"127.0.0.1:{mute.getsockname()[1]}", listener.getsockname()[1]
        listener.close()
        modes = [
            (f"--rdzv-endpoint={endpoint}", "--rdzv-backend=c10d", "--rdzv-conf=is_host=false"),
            (f"--rdzv-endpoint={endpoint}", "--rdzv-backend=static", "--node-rank=1"),
            ("--master-addr=127.0.0.1", f"--master-port={port}", "--node-rank=0"),
        ]
        runs = [Run(tmp_path, "run", "--nnodes=2", *mode, "--record=off", "begins.py", warm=True) for mode in modes]
        try:
            met = [mute.accept()[0] for _ in range(2)]  # both have begun to wait for an answer
            wait_for(lambda: _listens(port), "the third waits for others", runs[2].text)
            for run in runs:
                run.process.send_signal(signal.SIGTERM)
            for run in runs:
                run.end(130)
                assert run.said() == ["stopped while the processes were starting"]
        finally:
            for run in runs:
                run.close()
            for connection in met:
                connection.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_machine_that_is_stopped_before_the_first_start_stops_those_that_wait(tmp_path: Path) -> None:
    """Two of three are there."""
    (tmp_path / "begins.py").write_text(_BEGINS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ("run", "--nnodes=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=three")
    conf = "--rdzv-conf=is_host="
    runs = [
        Run(tmp_path, *words, "--record=off", f"{conf}{holds}", "begins.py", warm=True) for holds in ("true", "false")
    ]
    try:
        wait_for(lambda: _listens(port), "the first waits for others", runs[0].text)
        store = TCPStore("127.0.0.1", port, is_master=False)
        both = [run.process.pid for run in runs]
        wait_for(lambda: all(map(_met(store), both)), "both wait for the third", runs[1].text)
        runs[1].process.send_signal(signal.SIGTERM)
        for run in runs:
            run.end(130)
            assert run.said() == ["stopped while the processes were starting"]
    finally:
        for run in runs:
            run.close()


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
