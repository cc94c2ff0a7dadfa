"""A lesson's program as a file: where it lies, what it is about, and one run of it on real processes."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import NamedTuple

from lockstep.errors import ConfigError
from lockstep.learn.events import Event, read_events
from lockstep.observe.report.terminal import ending_by_exception

FOLDER = "LOCKSTEP_LESSON"  # names the folder for the events of a rank; unset: they are printed
_LIMIT_S = 600.0
_ROOM_BYTES = 1 << 20  # more than any lesson needs


class Played(NamedTuple):
    """One run of a program."""

    ranks: list[list[Event]]
    exit_code: int | None  # None: it had to be ended
    output: str  # what the processes said beside


def title_of(path: Path) -> str:
    """The first sentence of a program, without running it. Raises: ConfigError where it is no Python."""
    try:
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as a program: {error}") from error
    return (about or "").partition("\n")[0]


def play(
    path: Path, world_size: int, folder: Path, more: Mapping[str, str], restarts: int = 0, limit_s: float = _LIMIT_S
) -> Played:
    """Run the program `path` on `world_size` new processes of this machine, with the guard around it.

    folder: gets the events of the ranks, and is theirs to write in; what was in it is gone. more: variables for
    the processes. Blocks until all have ended.
    Raises: OSError where `folder` cannot be made. ConfigError where there is no room for that, or the program told
        nothing at all, with what it said instead.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        what = f"{error.strerror}; start it in a folder in which you can write"
        raise OSError(error.errno, what, str(folder)) from error
    room = folder / "room"
    try:
        room.write_bytes(bytes(_ROOM_BYTES))
    except OSError as error:
        raise ConfigError(f"{folder} has no room for what the processes tell: {error.strerror}") from error
    finally:
        room.unlink(missing_ok=True)
    flags = ["--nproc-per-node", str(world_size), "--record", "off", "--max-restarts", str(restarts)]
    command = [sys.executable, "-m", "lockstep", "run", *flags, str(path)]
    environ = {"LOCKSTEP_HANG_S": "3", "LOCKSTEP_EVIDENCE": "", **os.environ, **more}
    environ[FOLDER] = str(folder.resolve())
    with (
        ending_by_exception(),
        Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=environ, errors="replace") as process,
    ):
        try:
            output, _ = process.communicate(timeout=limit_s)
            code: int | None = process.returncode
        except TimeoutExpired:
            process.terminate()  # the launcher ends its ranks, and has said why they wait
            output, code = process.communicate()[0], None
        except BaseException:
            process.terminate()
            raise
    try:
        return Played(read_events(folder), code, output.strip())
    except ConfigError:
        end = f"and was ended after {limit_s:g} s" if code is None else f"exit code {code}"
        said = output.strip() or "`lockstep learn send_receive --source` shows a program that tells what it does"
        raise ConfigError(f"{path} told nothing on {world_size} processes, {end}:\n{said}") from None
