"""The `lockstep` command as users run it: one process with all of its output, and the processes it starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import warm_programs

DEADLINE_S = 90.0


class Run:
    """One `lockstep` process, in a session of its own, and what it wrote to both of its outputs.

    warm: it and its ranks are forks that have torch, which is all that tells them from what a user starts.
    inside: what stands before the command, as `nsenter --net=FILE`.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        launcher: Sequence[str] = (),
        warm: bool = False,
        inside: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self.output = folder / f"output-{time.monotonic_ns()}"
        environ = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "",
            **variables,
        }
        with self.output.open("w") as file:
            self.process = (warm_programs.Popen if warm else subprocess.Popen)(
                [*inside, sys.executable, *launcher, "-m", "lockstep", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=folder,
                start_new_session=True,
            )

    def text(self) -> str:
        """All of its output so far."""
        return self.output.read_text()

    def said(self) -> list[str]:
        """The sentences that lockstep itself has said so far, but for where the report lies.

        And but for what machines say that have all come, if on a busy one it takes them long to begin.
        """
        lines = [line.removeprefix("lockstep: ") for line in self.text().splitlines() if line.startswith("lockstep: ")]
        return [line for line in lines if not line.startswith(("report: ", "waiting for all "))]

    def pids(self) -> list[int]:
        """Of all ranks that have come up so far."""
        return [int(pid) for pid in re.findall(r"rank \d(?: of \d)? is up: pid (\d+)", self.text())]

    def pid_of(self, rank: int) -> int:
        """Of the last start of this rank."""
        return int(re.findall(rf"rank {rank}(?: of \d)? is up: pid (\d+)", self.text())[-1])

    def await_text(self, pattern: str) -> None:
        """Raises AssertionError where it ends without, or takes too long."""
        wait_for(lambda: re.search(pattern, self.text()) or self.process.poll() is not None, f"{pattern!r}", self.text)
        assert re.search(pattern, self.text()), f"it ended without {pattern!r}:\n{self.text()}"

    def end(self, exit_code: int) -> str:
        """The output, once the run has ended with `exit_code` and left no process."""
        wait_for(lambda: self.process.poll() is not None, "the run ended", self.text)
        assert self.process.returncode == exit_code, self.text()
        wait_for(lambda: not any(map(is_alive, self.pids())), "all ranks were gone", self.text)
        return self.text()

    def signal(self, number: int) -> None:
        """To its process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End what still runs."""
        for pid in [self.process.pid, *self.pids()]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def complaints(output: str) -> list[str]:
    """The lines in which somebody warns of something. That there is a report of the run is no complaint."""
    lines = re.findall("(?i).*(?:lockstep|warning).*", output)
    return [line for line in lines if not line.startswith("lockstep: report: ")]


def wait_for(condition: Callable[[], object], what: str, context: Callable[[], str] = str) -> None:
    """Raises AssertionError where `condition()` does not become true."""
    deadline, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never saw that {what}:\n{context()}"
        pause.wait(0.02)


def is_alive(pid: int) -> bool:
    """False for zombies too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that live."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in listing.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
            continue
    return found
