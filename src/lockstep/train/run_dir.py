"""The directory of a run: what is in it, where a run begins, and where an older one goes.

out/config.json      the options, resolved
out/metrics.jsonl    one line per logged step
out/sample.txt       what the model writes in the end
out/checkpoints/     step-00000250.safetensors, or a folder step-00000250 where parameters are cut, ...
out/older-1/         the same of a run that was here before
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.manifest import NAME
from lockstep.checkpoint.state import State
from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.train.checkpoints import latest, load_values
from lockstep.train.config import RunConfig, changes_on_resume, to_json

_OURS = ("config.json", "metrics.jsonl", "sample.txt", "checkpoints")


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    step: int  # optimizer steps done before
    tokens: int  # trained on before, over all ranks
    found: str  # the checkpoint it begins from; "": from random weights
    values: State  # in that checkpoint: all but tensors
    news: tuple[str, ...]  # what the user should know about it


def checkpoints_of(run: RunConfig) -> Path:
    """Where the run's checkpoints are."""
    return run.out / "checkpoints"


def find_start(run: RunConfig, comm: Communicator, resume: str) -> Start:
    """Where `resume` ("", "auto", a checkpoint or a directory that holds some) says to begin. Changes nothing on disk.

    Collective: every rank of `comm`; blocks.
    Raises: ConfigError, CheckpointError on every rank where it cannot be found or is of another model.
    """
    found = _tell_all(comm, lambda: _find(run, resume))
    if not found:
        news = (f"nothing to resume in {checkpoints_of(run)}: starting anew",) if resume else ()
        return Start(0, 0, "", {}, news)
    values = load_values(Path(found))
    changes = changes_on_resume(values["config"], run)
    news = [f"resumed from {found} (step {values['step']}, made by {values['world_size']} ranks)"]
    if changes:
        news.append(f"changed since then: {', '.join(changes)}")
    return Start(values["step"], values["tokens"], found, values, tuple(news))


def make_ready(run: RunConfig, comm: Communicator, start: Start) -> str:
    """Make `run.out` ready for this run; returns where an older one had to be moved to, else "".

    Collective: every rank of `comm`; blocks.
    Raises: ConfigError on every rank where the directory cannot be written.
    """
    return _tell_all(comm, lambda: _prepare(run, start.found))


def _find(run: RunConfig, resume: str) -> str:
    """The checkpoint that `resume` means, "" for none."""
    if not resume:
        return ""
    if resume == "auto":
        return str(latest(checkpoints_of(run)) or "")
    path = Path(resume)
    if path.is_dir() and not (path / NAME).is_file():
        newest = latest(path / "checkpoints") or latest(path)
        if newest is None:
            raise ConfigError(f"--resume {path} holds no checkpoint")
        return str(newest)
    if not path.exists():
        raise ConfigError(f"--resume {path} does not exist; `--resume auto` finds the newest checkpoint in --out")
    return str(path)


def _prepare(run: RunConfig, found: str) -> str:
    """Make `run.out` ready for writing; where an older run had to be moved to, else ""."""
    newest = latest(checkpoints_of(run))
    is_continued = bool(found) and newest is not None and newest.samefile(found)
    moved = ""
    if not is_continued and any((run.out / name).exists() for name in _OURS):
        older = next(p for n in itertools.count(1) if not (p := run.out / f"older-{n}").exists())
        older.mkdir()
        for name in _OURS:
            if (run.out / name).exists():
                (run.out / name).rename(older / name)
        moved = str(older)
    checkpoints_of(run).mkdir(parents=True, exist_ok=True)
    (run.out / "config.json").write_text(json.dumps(to_json(run), indent=2) + "\n")
    return moved


def _tell_all(comm: Communicator, work: Callable[[], str]) -> str:
    """What `work` returns on rank 0, on every rank; what it raises there, everywhere."""
    answer, problem = "", ""
    if comm.rank == 0:
        try:
            answer = work()
        except ConfigError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot use the run directory: {error}; choose another with --out"
    answer, problem = comm.broadcast_object([answer, problem], label="run_dir")
    if problem:
        raise ConfigError(problem)
    return answer
