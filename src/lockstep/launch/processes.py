"""Worker processes as their launcher sees them: children that it alone waits for, so that no pid can be another's."""

from __future__ import annotations

import ctypes
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

from lockstep.comm.kernel import read_proc
from lockstep.errors import ConfigError, LaunchError
from lockstep.launch.fork_server import Start, receive, send
from lockstep.launch.program import python_command

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_PR_GET_CHILD_SUBREAPER = 37
_THREADS = "OMP_NUM_THREADS"  # read once by libraries, while they are loaded
HAS_PIDFD = hasattr(os, "pidfd_open") and sys.platform == "linux"

_OPEN_FILES = 32, 4  # of a launcher, and more for each of its processes: output, connections to its store, a handle
# whether the descriptor can be read within that many seconds; raises when the user will not wait
Waiting = Callable[[int, float], bool]
_LOAD_S = 600.0  # imports from a network that is cold
_FORK_S = 30.0  # on a machine that is short of memory


@contextmanager
def adopting_orphans() -> Iterator[bool]:
    """Within, processes whose parent has ended become children of this one, if they descend from it.

    Yields whether that is so: Linux alone can, and a sandbox may forbid it.
    """
    if sys.platform != "linux":
        yield False
        return
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    is_adopting = libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield is_adopting
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within, this process and all it starts have these."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def refuse_few_files(processes: int) -> None:
    """Raises: ConfigError where this process may not open as many files as it needs for so many workers."""
    needed = _OPEN_FILES[0] + _OPEN_FILES[1] * processes
    limit, most = (number if number >= 0 else needed for number in resource.getrlimit(resource.RLIMIT_NOFILE))
    if limit < needed:
        fix = "ulimit -n 4096" if most >= 4096 else "raise the hard limit, nofile in /etc/security/limits.conf"
        raise ConfigError(f"a process may open {limit} files here, but a launcher needs {needed}. Type: {fix}")


@final
class WorkerProcess:
    """A child of this process that nobody else waits for. Until `reap` has returned its end, its pid is its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None  # negative: the number of the signal that killed it
        self.handle = os.pidfd_open(pid) if HAS_PIDFD else -1  # can be read when it has ended

    def send_signal(self, number: int) -> None:
        """To the process alone: what it has started hears of it from the process, or not at all."""
        if self.exit_code is None:
            os.kill(self.pid, number)  # not waited for, so at worst a zombie

    def kill(self) -> None:
        """End it at once, and all that it has started in its session."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._kill_group()

    def reap(self) -> bool:
        """True once it has ended; `exit_code` says how. What a killed one leaves in its session is killed too."""
        if self.exit_code is not None:
            return True
        if hasattr(os, "waitid"):
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return False
            if end.si_code != os.CLD_EXITED:
                self._kill_group()  # before its pid is given back, which is also the group's number
        pid, status = os.waitpid(self.pid, os.WNOHANG)  # macOS has nothing else before Python 3.13
        if pid == 0:
            return False
        self.exit_code = os.waitstatus_to_exitcode(status)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
        return True

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it had no time to make its session
            os.killpg(self.pid, signal.SIGKILL)


def reap_strangers(known: Sequence[int]) -> None:
    """Wait for children that have ended and are not `known`: orphans that this process has adopted, for the most."""
    for pid in children():
        if pid not in known:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def children(pid: int | str = "self") -> list[int]:
    """Of process `pid`, adopted ones too; none are seen where it has ended, or there is no /proc."""
    pids: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, read_proc(f"/proc/{pid}/task/{task}/children").split())
    return pids


# ---------------------------------------------------------------------- two ways to start one


def start_fresh(start: Start, command: Sequence[str]) -> WorkerProcess:
    """Run `command` in a session of its own."""
    files = [
        (os.POSIX_SPAWN_OPEN, number, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for path, number in ((start.stdout, 1), (start.stderr, 2))
        if path
    ]
    default = [number for number in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", None)) if number is not None]
    try:
        pid = os.posix_spawn(
            command[0], list(command), start.environ, file_actions=files, setsid=True, setsigmask=(), setsigdef=default
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from error
    return WorkerProcess(pid)


@final
class ForkServer:
    """The launcher's side of a fork server: it is started at once, and loads while the launcher does other things."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        self._settings = (tuple(modules), environ.get(_THREADS))
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*python_command("fork_server"), str(theirs.fileno())],
                env=dict(environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._link = ours
        self._is_ready = False
        send(ours, {"modules": list(modules)})

    def was_lost(self) -> bool:
        """True where it had loaded, and has ended since."""
        return self._is_ready and self._process.poll() is not None

    def suits(self, modules: Sequence[str], environ: Mapping[str, str]) -> bool:
        """True where another one made with these would do nothing else."""
        return self._settings == (tuple(modules), environ.get(_THREADS))

    def problem(self, wait: Waiting) -> str | None:
        """Why it cannot start workers; "" if it can, None where it has ended. Blocks in `wait` until it has loaded."""
        if not self._is_ready:
            message = self._answer(wait, _LOAD_S)
            if message is None or message["problem"]:
                return None if message is None else message["problem"]
            self._is_ready = True
        return ""

    def start(self, start: Start, wait: Waiting) -> WorkerProcess | None:
        """A worker that has forked and now begins; None where the server has ended."""
        reading, writing = os.pipe()
        try:
            request = {**start._asdict(), "program": start.program.words()}
            try:
                send(self._link, request, reading)
            except OSError:
                return None
            message = self._answer(wait, _FORK_S)
            if message is None:
                return None
            if message["pid"] < 0:
                raise LaunchError("the machine cannot start one more process: see `ulimit -u`")
            worker = WorkerProcess(message["pid"])
            os.write(writing, b"!")
            return worker
        finally:
            os.close(reading)
            os.close(writing)

    def close(self) -> None:
        """End it, if it has not ended; workers stay."""
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, wait: Waiting, limit_s: float) -> dict[str, Any] | None:
        """None where it has ended, or hangs."""
        return receive(self._link)[0] if wait(self._link.fileno(), limit_s) else None


def wait_for(descriptors: Sequence[int], timeout_s: float | None) -> list[int]:
    """Those of `descriptors` that can be read, as soon as there are any; [] after `timeout_s`."""
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(timeout_s)]
