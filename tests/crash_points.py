"""Actions that are killed, stopped or failed at one chosen system call, by strace.

A case is a forked child of a warm process: it waits at a gate until strace is attached, acts, and tells how it ended.
So a case costs as much as a fork and the action's own calls, some 25 ms. The process that forks holds one thread only,
and its memory in few large pages: of 200 MB in small ones a fork would copy the table, twice the time of all else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from lockstep.testing.pool import ProcessPool

_WORKERS_S = 280.0  # of all cases of one test
LIMIT_S = 30.0  # of what one case waits for
_SAID_BYTES = 4000
_SETS = "trace=%file,%desc,fsync,fdatasync,sync_file_range"
_NOT_FILES = {"mmap", "poll", "ppoll", "select", "pselect6", "epoll_wait", "execve"}
_LINE = re.compile(r"([a-z_0-9]+)\((.*)")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *(?:\[heap])?")  # memory of no file
_LARGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
Begin = Callable[[], None]
Action = Callable[[Begin], object]  # calls its argument where the calls begin that are looked at


class Call(NamedTuple):
    """One system call of an action."""

    name: str
    nth: int  # of this name in the action's thread, from 1
    text: str  # as strace shows it

    def __str__(self) -> str:
        return f"{self.name} number {self.nth}: {self.text}"


class Fault(NamedTuple):
    """What happens at a call, in strace's words."""

    name: str
    inject: str


KILL = Fault("killed", "signal=SIGKILL")  # before the call does anything
STOP = Fault("stopped", "signal=SIGSTOP")  # after the call
NOTHING = Fault("nothing", "")
EIO = Fault("EIO", "error=EIO")
ENOSPC = Fault("ENOSPC", "error=ENOSPC")
EINTR = Fault("EINTR", "error=EINTR")
SHORT = Fault("short", "retval=1")  # says that one byte was moved, and moves none


class Outcome(NamedTuple):
    """How an action ended."""

    code: int  # 0: returned; 1: raised; negative: killed by a signal
    said: str  # what it returned, or "StaleGeneration: this process ..."
    lines: tuple[str, ...]  # what strace wrote
    fired: bool  # strace has changed a call, or the process was killed


def strace_works() -> bool:
    """Whether system calls of a child can be changed here."""
    if shutil.which("strace") is None:
        return False
    probe = ["strace", "-qq", "-o", "/dev/null", "-e", "inject=rmdir:error=EIO", "true"]
    return subprocess.run(probe, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0


@contextlib.contextmanager
def forking_workers(count: int) -> Iterator[Callable[..., list[Any]]]:
    """A function that runs `fn(worker, *args)` on `count` processes of one thread and one processor each."""
    pool = ProcessPool(count)

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(fn, args, {}, timeout_s=_WORKERS_S, env=None, connect=False)

    run(_make_ready)
    try:
        yield run
    finally:
        pool.close()


def _make_ready(worker: int) -> None:
    """For all that is forked from here: one processor, as a traced process and its tracer take turns; large pages."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[worker % len(allowed)]})
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        mappings = [_MAPPING.match(line) for line in maps]
    for begin, end in ((int(found[1], 16), int(found[2], 16)) for found in mappings if found):
        for place in range(-(-begin // _LARGE_BYTES) * _LARGE_BYTES, end - _LARGE_BYTES + 1, _LARGE_BYTES):
            libc.madvise(ctypes.c_void_p(place), _LARGE_BYTES, _MADV_COLLAPSE)  # an old kernel refuses: only slower


def calls_of(action: Action) -> list[Call]:
    """The system calls on files that `action` makes in the thread in which it begins, in order. It must return."""
    outcome = run_traced(action, ["-s", "0"])
    assert outcome.code == 0, f"the action ends with {outcome}"
    return calls_in(outcome.lines)


def calls_in(lines: Sequence[str]) -> list[Call]:
    """The system calls on files that strace has written about."""
    counts: Counter[str] = Counter()
    calls = []
    for line in lines:
        found = _LINE.match(line)
        if found and found[1] not in _NOT_FILES:
            counts[found[1]] += 1
            calls.append(Call(found[1], counts[found[1]], line))
    return calls


def run_with_fault(action: Action, call: Call, fault: Fault) -> Outcome:
    """`action` in a child, with `fault` at `call`."""
    return run_traced(action, injection(call, fault))


def run_traced(action: Action, options: Sequence[str]) -> Outcome:
    """`action` in a child, under strace with `options` from where it begins."""
    with started(action) as child, child.traced(options) as strace:
        child.release()
        assert strace.stdout is not None
        output = strace.stdout.read()  # to its end, which is the child's
        return child.outcome(output)


@contextlib.contextmanager
def stopped_after(action: Action, call: Call) -> Iterator[Child]:
    """A child that has stopped right after `call`; `go_on` lets it go on."""
    with started(action) as child, child.traced(injection(call, STOP)) as strace:
        child.release()
        assert strace.stdout is not None
        for line in strace.stdout:
            if "stopped by SIGSTOP" in line:
                break
        else:
            raise AssertionError(f"the child has ended before {call}: {child.outcome()}")
        yield child


def at_once(act: Callable[[], object]) -> Action:
    """`act`, with all its calls."""

    def action(begin: Begin) -> object:
        begin()
        return act()

    return action


def in_first_thread(act: Callable[[], object]) -> Action:
    """`act`, with the calls of the first thread that it starts."""

    def action(begin: Begin) -> object:
        run, first = threading.Thread.run, threading.Lock()

        def begin_and_run(self: threading.Thread) -> None:
            if first.acquire(blocking=False):
                begin()
            run(self)

        threading.Thread.run = begin_and_run  # pyright: ignore[reportAttributeAccessIssue] - of this child alone
        return act()

    return action


def injection(call: Call, fault: Fault) -> list[str]:
    """The options of strace for `fault` at `call`."""
    return ["-e", f"trace={call.name}", "-e", f"inject={call.name}:{fault.inject}:when={call.nth}"]


class Child:
    """A forked process that acts; where it begins, it waits at its gate."""

    def __init__(self, action: Action) -> None:
        gate, self._gate = os.pipe()
        self._report, report = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate)
            self._report.close()
            _act(action, gate, report)
        os.close(gate)
        report.close()
        self._report.settimeout(LIMIT_S)
        self._status: int | None = None

    def task(self) -> int:
        """The thread that waits at the gate, when it does so."""
        said = self._report.recv(_SAID_BYTES).decode()
        assert said.isdecimal(), f"the child did not begin: {said}"
        return int(said)

    @contextlib.contextmanager
    def traced(self, options: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """strace with `options`, attached; its lines come on its standard output."""
        command = ["strace", "-p", str(self.task()), "-y", *(options if "-e" in options else ["-e", _SETS, *options])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as strace:
            try:
                assert strace.stdout is not None
                first = strace.stdout.readline()
                assert first.endswith(" attached\n"), first
                yield strace
            finally:
                self.kill()  # strace ends with it

    def release(self) -> None:
        """Open the gate."""
        os.write(self._gate, b"x")

    def go_on(self) -> None:
        """Go on after a stop."""
        os.kill(self.pid, signal.SIGCONT)

    def outcome(self, output: str = "") -> Outcome:
        """How it ended, when it has. `output`: strace's."""
        said = self._report.recv(_SAID_BYTES).decode(errors="replace")
        code = self._wait()
        return Outcome(code, said, tuple(output.splitlines()), "(INJECTED)" in output or code < 0)

    def kill(self) -> None:
        """End it by force, where it has not ended."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()

    def close(self) -> None:
        """Leave nothing behind."""
        self.kill()
        os.close(self._gate)
        self._report.close()

    def _wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


@contextlib.contextmanager
def started(action: Action) -> Iterator[Child]:
    """A child that acts; it is gone at the end."""
    child = Child(action)
    try:
        yield child
    finally:
        child.close()


# ------------------------------------------------------------------ in the child


def _act(action: Action, gate: int, report: socket.socket) -> NoReturn:
    """Run `action` and tell how it ended; never returns, whatever happens."""
    code, said = 2, ""
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))  # any process of this user may trace it
        said = str(action(lambda: _wait_at(gate, report)))
        code = 0
    except BaseException as error:  # noqa: BLE001 - told to the parent
        said = f"{type(error).__name__}: {error}"
        code = 1
    finally:
        report.send(said.encode()[:_SAID_BYTES])
        os._exit(code)


def _wait_at(gate: int, report: socket.socket) -> None:
    report.send(str(threading.get_native_id()).encode())
    waiting = select.poll()  # a read would be counted with the action's
    waiting.register(gate, select.POLLIN)
    if not waiting.poll()[0][1] & select.POLLIN:
        os._exit(2)  # the parent is gone
