"""Two launchers that meet on the loopback interface: one that is asked to stop takes the other with it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
            runs.append(Run(tmp_path, *words, f"--rdzv-conf=is_host={holds},last_call_timeout=5", "begins.py"))
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


def test_others_go_on_where_fewer_machines_are_enough(start: Callable[[str], Pair]) -> None:
    holder, other = start("1:2")
    os.kill(other.pids()[0], signal.SIGTERM)
    other.end(75)
    assert holder.process.poll() is None
    os.kill(holder.pids()[0], signal.SIGKILL)
    wait_for(lambda: len(holder.pids()) == 2, "it came back alone", holder.text)
    holder.process.send_signal(signal.SIGINT)
    holder.end(75)
