"""Starts workers: as forks of a process that has imported everything, or as fresh interpreters where that cannot be."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast, final

from lockstep.launch.fork_server import Start
from lockstep.launch.processes import HAS_PIDFD, ForkServer, Waiting, WorkerProcess, refuse_few_files, start_fresh
from lockstep.launch.program import Program, python_command
from lockstep.launch.worker import AGENT_PID

_HEIR = "sh", "-c", 'while read -r now; do pids=$now; done; for pid in $pids; do kill -s KILL -- "-$pid"; done'
_TRIES = 3  # of fork servers for one worker
# what a machine with a GPU, or another accelerator, has: without any, torch need not be asked
_ACCELERATORS = ("/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/dri/render*", "/dev/davinci*", "/dev/habanalabs*")


@contextmanager
def loading_ahead(modules: Sequence[str], **variables: str) -> Iterator[ForkServer | None]:
    """A fork server that loads while this process loads torch itself; None where there may be a GPU.

    Raises: ConfigError where this process may open too few files.
    """
    refuse_few_files(1)
    if not HAS_PIDFD or may_have_accelerator():
        yield None
        return
    server = ForkServer(modules, {**os.environ, **variables, AGENT_PID: str(os.getpid())})
    try:
        yield server
    finally:
        server.close()


@final
class Starter:
    """Starts the workers of one launcher. The fork server begins to load as soon as this exists.

    server: one that loads already, taken if it is the right one.
    """

    def __init__(
        self,
        program: Program,
        *,
        modules: Sequence[str],
        is_warm: bool,
        wait: Waiting,
        say: Callable[[str], None],
        server: ForkServer | None = None,
    ) -> None:
        self._modules, self._wait, self._say = modules, wait, say
        self._is_warm = is_warm and not why_fresh(program)
        suits = server is not None and server.suits(modules, os.environ)
        if server is not None and not (self._is_warm and suits):
            server.close()
        self._server = (server if suits else ForkServer(modules, os.environ)) if self._is_warm else None
        self._heir, self._named = None, b"\n"

    def start(self, start: Start, command: Callable[[list[str]], list[str]] = list) -> WorkerProcess:
        """One more worker. command: what becomes of the command of a fresh one, a binding to a NUMA node for example.

        Blocks until the fork server has loaded. Raises: LaunchError where the machine has no room for it.
        """
        tries = 0
        while self._is_warm and tries < _TRIES:
            self._server = self._server or ForkServer(self._modules, os.environ)
            worker = self._fork(self._server, start)
            if worker is not None:
                return worker
            self._drop_server()
            tries += 1
        if self._is_warm:
            self._say(f"the fork server has ended {_TRIES} times: one worker is started as a fresh interpreter")
        return start_fresh(start, command([*python_command("program"), *start.program.words()]))

    def look(self, running: Iterable[WorkerProcess]) -> None:
        """Begin to load another fork server where the one that was there has ended: the next restart is warm again.

        running: what these have started does not outlive this process.
        """
        names = f"{' '.join(str(worker.pid) for worker in running)}\n".encode()
        if names != self._named:
            with suppress(OSError):  # there is no shell, or somebody has killed it
                self._heir, self._named = self._heir or _heir(), names
                cast(IO[bytes], self._heir.stdin).write(names)
        if self._server is not None and self._server.was_lost():
            self._server.close()
            self._server = ForkServer(self._modules, os.environ)

    def close(self) -> None:
        """End the fork server, and what is left of workers that were not seen to end."""
        if self._heir is not None:
            self._heir.communicate()
        self._drop_server()

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _fork(self, server: ForkServer, start: Start) -> WorkerProcess | None:
        try:
            problem = server.problem(self._wait)
            worker = server.start(start, self._wait) if problem == "" else None
        except BaseException:
            self._drop_server()  # an answer is outstanding: nothing else can be asked
            raise
        if problem:
            self._is_warm = False
            self._say(f"workers are started as fresh interpreters, which takes longer: {problem}")
        return worker


def _heir() -> subprocess.Popen[bytes]:
    """A shell that outlives this process, to kill what workers have started, but for what has left their groups.

    It reads lines that name all workers there are; when no more can come, the last line says whose groups are meant.
    """
    return subprocess.Popen(_HEIR, bufsize=0, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)


def default_processes() -> int:
    """One per GPU, two where there is none."""
    if not has_accelerator():
        return 2
    import torch

    return torch.cuda.device_count() or 2


def why_fresh(program: Program) -> str:
    """Why workers for `program` cannot be forks on this machine; "" if they can. Where a GPU may be, torch is asked."""
    if not HAS_PIDFD:
        return "this system cannot hand over a forked process"
    if program.kind == "command":
        return "it is no Python program that we start"
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return "PYTHON_EXEC names another interpreter"
    path = Path(program.name)
    if program.kind == "script" and (path.suffix == ".pyc" or not path.is_file() or zipfile.is_zipfile(path)):
        return "it is no Python source"
    return "there is an accelerator, which a fork cannot use" if has_accelerator() else ""


def may_have_accelerator() -> bool:
    """False where there is no GPU, nor anything like it, without asking torch."""
    return any(glob.glob(pattern) for pattern in _ACCELERATORS)


def has_accelerator() -> bool:
    """True where torch can use a GPU, or something like it. Nothing is initialised on it."""
    if not may_have_accelerator():
        return False
    import torch

    return torch.cuda.device_count() > 0 if torch.backends.cuda.is_built() else torch.accelerator.is_available()
