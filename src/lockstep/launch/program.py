"""What a worker process runs: a script, a module or another command, just as it would run by itself.

A worker is a fresh interpreter that calls `main` here, or a fork of the fork server: both end in `run_program`.
No torch.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import runpy
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Literal

import lockstep
from lockstep.comm.pulse import open_pulse
from lockstep.launch.crash import leave_stacks
from lockstep.launch.worker import ERROR_FILE, describe_failure, die_with_launcher, report_failure
from lockstep.observe.guard import Guard
from lockstep.observe.last_words import end_in_users_code, sees_another
from lockstep.observe.process_guard import FLIGHT, STORE, begin, thread_error
from lockstep.observe.profile.session import follow_program
from lockstep.observe.torch_start import Worlds, meet_machines
from lockstep.observe.torch_training import attach_training
from lockstep.observe.torch_watch import attach


@dataclass(frozen=True)
class Program:
    """What to run."""

    kind: Literal["script", "module", "command"]
    name: str
    arguments: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """As `main` reads it."""
        return [self.kind, self.name, *self.arguments]


def read_program(words: Sequence[str]) -> Program:
    """The opposite of `Program.words`."""
    kind, name, *arguments = words
    if kind not in ("script", "module", "command"):
        raise ValueError(f"{kind!r} is no kind of program")
    return Program(kind, name, tuple(arguments))


def python_command(module: str) -> list[str]:
    """A fresh interpreter that calls `main` of the module lockstep.launch.<module>, from wherever it is started.

    The current folder is not on its search path: a file there cannot take the place of one of ours.
    """
    root = str(Path(str(lockstep.__file__)).resolve().parents[1])
    code = (
        "import sys\n"
        "if not getattr(sys.flags, 'safe_path', False): del sys.path[0]\n"
        f"sys.path.insert(0, {root!r})\n"
        f"from lockstep.launch.{module} import main\n"
        "del sys.path[0]\n"
        "main()"
    )
    return [sys.executable, "-u", "-c", code]  # unbuffered, as torchrun starts them


def main() -> None:
    """A fresh worker: the words after the interpreter's own are a Program's."""
    die_with_launcher(os.environ)
    program = read_program(sys.argv[1:])
    if program.kind == "command":
        _become(program)
    run_program(program)


def _become(program: Program) -> None:
    sys.stdout.flush()
    try:
        os.execvp(program.name, [program.name, *program.arguments])
    except OSError as error:
        first = "; its first line has to name who runs it, #!/bin/sh" if error.errno == errno.ENOEXEC else ""
        raise SystemExit(f"lockstep: {program.name} cannot be started: {error.strerror}{first}") from error


def run_program(program: Program) -> None:
    """Run a script or module as `__main__`. Whatever it raises is printed and left for the launcher.

    Raises: SystemExit, KeyboardInterrupt: the interpreter ends by them as it would have without us.
    """
    leave_stacks(os.environ.get(FLIGHT, ""), os.environ.get("RANK", ""))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            # `python -u` writes a line and its end apart, so that the lines of ranks mix; this way each is one write
            stream.reconfigure(line_buffering=True, write_through=False)
    guard = None
    Worlds().attach()
    try:
        guard = begin(os.environ)
    except OSError as error:  # no room for its record: the program goes on without
        sys.stderr.write(f"lockstep: rank {os.environ['RANK']} is not guarded: {error}; make room in $TMPDIR\n")
    if guard is not None:
        pulse = open_pulse(os.environ)
        guard.before_look.append(lambda: pulse.stuck(guard.stuck_s))
        attach(guard)
        meet_machines(guard, os.environ.get(STORE, ""))
        follow_program(guard, os.environ, [program.name, *program.arguments])
        attach_training(guard)
    here = types.ModuleType("__main__")
    here.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = here
    pid = os.getpid()
    try:
        left = _run(program, here)
        if guard is not None and (left is None or left.code in (None, 0)):
            error = thread_error()
            if error is None or not sees_another(error):
                guard.finish()
            else:  # its training ended by another rank, in a thread that no exit code tells of
                left = SystemExit(1)
                left.__context__ = error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (printed and reported, as the interpreter would print it)
        if os.getpid() == pid:
            _say(error, guard, os.environ)
        else:  # a process that the rank has forked
            _say(error, None, {})
        raise SystemExit(1) from None
    if left is not None:
        if guard is not None:
            guard.end(left)
        raise left


def _run(program: Program, here: types.ModuleType) -> SystemExit | None:
    """How it left before its last line, if it did."""
    try:
        if program.kind == "module":
            sys.argv = ["-m", *program.arguments]
            _search_first(os.getcwd())
            runpy._run_module_as_main(program.name)  # pyright: ignore[reportAttributeAccessIssue] (what `python -m` calls)
        else:
            sys.argv = [program.name, *program.arguments]
            _search_first(str(Path(program.name).resolve().parent))
            _run_script(program.name, here)
    except SystemExit as error:
        if type(error.__context__).__module__ == "runpy":  # there is no such module: what Python says of it is enough
            error.__context__ = None
        return error
    return None


def _search_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_script(name: str, here: types.ModuleType) -> None:
    """As the interpreter does it: the module's own loader is named, so that spawned children find it again."""
    path = os.path.abspath(name)
    here.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), here.__dict__)


def _say(error: BaseException, guard: Guard | None, environ: Mapping[str, str]) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    if guard is not None:
        error = guard.cause_of(error)
    end_in_users_code(error)
    trace = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    path = environ.get(ERROR_FILE)
    if path and not os.path.exists(path):  # else torch's @record has written it
        rank = int(environ.get("RANK", "0"))
        report_failure(describe_failure(error, rank, 1, False, sees_another(error)), environ)
    sys.excepthook(type(error), error, trace)
