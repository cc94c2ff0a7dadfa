"""The directory of a run: what is in it, where a run begins, and where an older one goes.

out/config.json      the options, resolved
out/tokenizer.json   what made tokens of the text, as transformers reads it: an export takes it along
out/metrics.jsonl    one line per logged step
out/samples.jsonl    one line per step: which windows of the text it was trained on
out/sample.txt       what the model writes in the end
out/profile/         where the time of each rank went: see `lockstep profile`
out/report.html      the picture of the run: see `lockstep report`
out/checkpoints/     step-00000250-g1/, ...: see `checkpoint/generation.py`
out/older-1/         the same of a run that was here before
out/.launch          which launch of the run this is: the processes that it starts again find their own run

A run may be killed between any two of the steps that make the directory ready: what was begun is finished next time.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.generation import names_in
from lockstep.checkpoint.loading import Loaded
from lockstep.checkpoint.state import State
from lockstep.comm.communicator import Communicator
from lockstep.durable import partial_of, rename_durably, sync_folder, write_whole
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.observe.loggers import LOGGED
from lockstep.train.checkpoints import Origin, find_origin, peek
from lockstep.train.config import RunConfig, changes_on_resume, to_json

# Checkpoints first: once they are gone, nobody takes what is left for a run that could go on.
_LOGS = ("metrics.jsonl", "samples.jsonl", "sample.txt")
_OURS = ("checkpoints", "config.json", "tokenizer.json", *_LOGS, "profile", "report.html", *LOGGED, ".launch")
_MARK = ".launch"


@dataclass(frozen=True)
class Launch:
    """Which start of which launch this process belongs to, as torchrun and our own launcher say it."""

    name: str = ""  # "" where no launcher starts processes again
    restarts: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch:
        """As the environment says."""
        return cls(environ.get("TORCHELASTIC_RUN_ID", ""), int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0))


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    origin: Origin | None  # None: random weights
    is_same_run: bool  # started again, by its launcher or with "auto": what is in the directory is its own past
    values: State  # beside model and optimizer, in the newest checkpoint there
    news: tuple[str, ...]  # what the user should know about it


def checkpoints_of(run: RunConfig) -> Path:
    """Where the run's checkpoints are."""
    return run.out / "checkpoints"


def token_cache() -> Path | None:
    """Where the tokens of a text are kept: None is the user's cache; a temporary folder where that has no place."""
    wanted = Path(os.path.expanduser("~/.cache/lockstep"))
    there = next(filter(os.path.exists, (wanted, *wanted.parents)))
    if "XDG_CACHE_HOME" in os.environ or (wanted.is_absolute() and os.access(there, os.W_OK | os.X_OK)):
        return None
    folder = Path(tempfile.gettempdir()) / f"lockstep-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if folder.stat(follow_symlinks=False).st_uid == os.getuid() else None


def find_start(run: RunConfig, comm: Communicator, resume: str, launch: Launch) -> Start:
    """Where to begin: where `resume` says (see `find_origin`), or, in a run that its launcher starts again, where it
    had come to. Changes nothing on disk.

    Collective: every rank of `comm`; blocks.
    Raises: ConfigError, CheckpointError on every rank where it cannot be found or is of another model.
    """

    def look() -> list[Any]:
        origin, is_same_run = _begin_at(run, resume, launch)
        if origin is None:
            return [is_same_run, None, None, {}]
        return [is_same_run, str(origin.directory), origin.step, peek(origin)]

    is_same_run, directory, step, values = _tell_all(comm, look)
    if directory is None:
        news = (f"nothing to resume in {checkpoints_of(run)}: starting anew",) if is_same_run else ()
        return Start(None, is_same_run, {}, news)
    changes = changes_on_resume(values["config"], run)
    news = (f"changed since then: {', '.join(changes)}",) if changes else ()
    return Start(Origin(Path(directory), step), is_same_run, values, news)


def _begin_at(run: RunConfig, resume: str, launch: Launch) -> tuple[Origin | None, bool]:
    """`origin` and `is_same_run` of Start."""
    mark = run.out / _MARK
    name = mark.read_text(encoding="utf-8").strip() if mark.exists() else None
    is_restart = launch.restarts > 0 and name == launch.name
    has_own = is_restart and bool(names_in(checkpoints_of(run)))
    return find_origin("auto" if has_own else resume, checkpoints_of(run)), is_restart or resume == "auto"


def news_of(loaded: Loaded) -> list[str]:
    """What was resumed from, and what was not."""
    passed = [f"a newer checkpoint was passed over: {reason}" for reason in loaded.skipped]
    ranks = loaded.state["world_size"]
    return [*passed, f"resumed from {loaded.path} (step {loaded.step}, made by {ranks} ranks)"]


def make_ready(run: RunConfig, comm: Communicator, start: Start, launch: Launch, tokenizer: str) -> str:
    """Make `run.out` ready, with `tokenizer` in it; returns where an older run had to be moved to, else "".

    Collective: every rank of `comm`; blocks.
    Raises: ConfigError on every rank where the directory cannot be written.
    """
    return _tell_all(comm, lambda: _prepare(run, start, launch, tokenizer))


def goes_on(run: RunConfig, start: Start) -> bool:
    """Whether what is in `run.out` is this run's past, and no older run's. Not collective."""
    own = checkpoints_of(run)
    if start.origin is None or start.is_same_run:
        return start.is_same_run
    is_here = own.is_dir() and own.samefile(start.origin.directory)
    return is_here and start.origin.step in (None, names_in(own)[0].step)


def _prepare(run: RunConfig, start: Start, launch: Launch, tokenizer: str) -> str:
    out, moved = run.out, ""
    out.mkdir(parents=True, exist_ok=True)
    begun = next(iter(sorted(out.glob(".older-*.partial"))), None)  # a run was killed while it moved another aside
    if begun is not None and not any(begun.iterdir()):
        begun.rmdir()
        begun = None
    if begun is not None or (_has_past(run) and not goes_on(run, start)):
        older = next(p for n in itertools.count(1) if not (p := out / f"older-{n}").exists())
        moved = _move_aside(out, begun, older)
    for name in _OURS:
        partial_of(out / name).unlink(missing_ok=True)
    if launch.name:
        write_whole(out / _MARK, launch.name + "\n")
    (probe := checkpoints_of(run) / ".probe").mkdir(parents=True, exist_ok=True)  # saving would find out after hours
    probe.rmdir()
    write_whole(out / "config.json", json.dumps(to_json(run), indent=2) + "\n")
    write_whole(out / "tokenizer.json", tokenizer)
    return moved


def _has_past(run: RunConfig) -> bool:
    """Whether a run has been here that came as far as its first step."""
    return any((run.out / name).exists() for name in _LOGS) or bool(names_in(checkpoints_of(run)))


def _move_aside(out: Path, begun: Path | None, older: Path) -> str:
    """Move what is ours into `older`, which gets its name when it has everything."""
    if begun is None:
        begun = out / f".{older.name}.partial"
        begun.mkdir()
    for name in _OURS:
        if (out / name).exists():
            (out / name).rename(begun / name)
    sync_folder(begun)
    rename_durably(begun, older)
    return str(older)


def _tell_all(comm: Communicator, work: Callable[[], Any]) -> Any:
    """What `work` returns on rank 0, on every rank; what it raises there, everywhere."""
    answer: Any = None
    kind, problem = "", ""
    if comm.rank == 0:
        try:
            answer = work()
        except LockstepError as error:
            kind, problem = type(error).__name__, str(error)
        except OSError as error:
            kind, who = "ConfigError", f"user {os.getuid()} of {socket.gethostname()}"
            problem = f"{who} cannot use the run directory: {error}; make that possible, or choose another with --out"
    answer, kind, problem = comm.broadcast_object([answer, kind, problem], label="run_dir")
    if problem:
        raise ConfigError(problem) if kind == "ConfigError" else CheckpointError(problem)
    return answer
