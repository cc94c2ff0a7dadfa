"""Programs, run as Python runs them, but in forks of a process that has torch: seconds less for each.

What `lockstep run` starts in such a fork is forked in turn: its fork server, which has torch then, and so the ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import takewhile
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

_CONTEXT = multiprocessing.get_context("forkserver")
_SPACES = {"mount": 1 << 17, "uts": 1 << 26, "ipc": 1 << 27, "net": 1 << 30, "time": 1 << 7}  # <sched.h>: CLONE_NEW*
_PRELOAD = ["lockstep.testing.preload", "pytest"]


def get_ready() -> None:
    """Start the process that is forked, if it is not there: who counts the children of this one counts it before."""
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


def start(folder: Path, words: Sequence[str], environ: Mapping[str, str], stderr: Path) -> BaseProcess:
    """`python *words` in `folder`, with this environment alone."""
    get_ready()
    with stderr.open("wb") as file:
        args = (str(folder), list(words), dict(environ), _Handed(1), _Handed(file.fileno()))
        process = _CONTEXT.Process(target=_run, args=args, daemon=True)
        process.start()
    return process


def end(processes: Sequence[BaseProcess], limit_s: float) -> list[int | None]:
    """The exit codes of what `start` has started; None of who has to be killed, after so long."""
    for process in processes:
        process.join(limit_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
        process.close()
    return codes


def run_by_hand(folder: Path, program: str, limit_s: float) -> tuple[list[int | None], str]:
    """Two ranks of a program, without a launcher: their exit codes, and what rank 0 has said.

    It is given a file at which they can meet, and its rank.
    """
    (folder / "train.py").write_text(program)
    environ = {"PATH": os.environ["PATH"], "LOCKSTEP_EVIDENCE": "", "OMP_NUM_THREADS": "1"}
    words, said = ["train.py", str(folder / "meeting")], [folder / f"stderr-{rank}" for rank in range(2)]
    codes = end([start(folder, [*words, str(rank)], environ, file) for rank, file in enumerate(said)], limit_s)
    return codes, said[0].read_text()


class Popen:
    """`subprocess.Popen` for a command of this interpreter, as far as our tests use it.

    Before it may stand `nsenter --net=FILE`, with more namespaces.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: Any,
        stderr: Any,
        stdin: int = subprocess.DEVNULL,
        start_new_session: bool = True,
        preexec_fn: object = None,  # ties it to a parent that it has not: it goes with the process that is forked
    ) -> None:
        options = list(takewhile(lambda word: word.startswith("--"), command[1:])) if command[0] == "nsenter" else []
        spaces = dict(map(_read_space, options))
        python, *words = command[len(options) + 1 :] if options else command
        assert (python, stdin) == (sys.executable, subprocess.DEVNULL)
        get_ready()
        out = stdout if isinstance(stdout, int) else stdout.fileno()
        err = out if stderr == subprocess.STDOUT else stderr
        args = (str(cwd), words, dict(env), _Handed(out), _Handed(err))
        more = {"in_session": start_new_session, "spaces": spaces}
        self._process = _CONTEXT.Process(target=_run, args=args, kwargs=more, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.args, self.pid, self.returncode = command, self._process.pid, None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises: subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """To the process alone, if it has not ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._process.join(timeout)
            self.returncode = self._process.exitcode
            if self.returncode is not None:
                self._process.close()
        return self.returncode


def _read_space(word: str) -> tuple[str, str]:
    """Name and file of one of nsenter's namespaces."""
    name, _, path = word.removeprefix("--").partition("=")
    return name, path


class _Handed:
    """An open file on its way to a process that is being started, where it arrives as a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _received, (reduction.DupFd(self.number),)


def _received(handed: Any) -> int:
    return handed.detach()


# ------------------------------------------------------------------ in the fork


class _Forked:
    """`subprocess.Popen` for the fork server of a launcher: it is forked from the launcher, which has torch."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], start_new_session: bool
    ) -> None:
        assert start_new_session
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            weakref.finalize._registry.clear()  # pyright: ignore # what the launcher deletes at its end
            os.setsid()
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            low = 3
            for number in sorted(pass_fds):
                os.closerange(low, number)
                low = number + 1
            os.closerange(low, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(env)
            _interpret(list(command[1:]))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self.pid, 0
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _run(
    folder: str,
    words: list[str],
    environ: dict[str, str],
    stdout: int,
    stderr: int,
    *,
    in_session: bool = False,
    spaces: Mapping[str, str] | None = None,
) -> None:
    if in_session:
        os.setsid()
    with ExitStack() as opened:
        files = {name: opened.enter_context(open(path)) for name, path in (spaces or {}).items()}
        for name, file in files.items():
            assert ctypes.CDLL(None).setns(file.fileno(), _SPACES[name]) == 0, name
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore # it may have children
    _interpret(words)


def _interpret(words: list[str]) -> NoReturn:
    """Do as `python *words` would, to the end of the process."""
    import torch

    from lockstep.launch import processes

    processes.subprocess = types.SimpleNamespace(Popen=_Forked)  # pyright: ignore
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or words[0] == "-u"
    told = sys.stdout
    sys.stdout = sys.__stdout__ = open(  # noqa: SIM115 # the old one remembers that its file could be sought in
        1, "w", encoding=told.encoding, errors=told.errors, closefd=False
    )
    sys.stdout.reconfigure(write_through=unbuffered)
    kind, *rest = words[1:] if words[0] == "-u" else words
    code = 0
    try:
        if kind == "-c":
            sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *sys.path]
            exec(rest[0], {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv, sys.path[:] = rest, [os.getcwd(), *sys.path]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:] = [kind, *rest], [str(Path(kind).absolute().parent), *sys.path]
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - told as the interpreter would tell it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
