"""Checkpoints in a directory: one file per step, there as a whole or not at all.

Rank 0 writes beside the final name, makes the bytes durable, renames, makes the name durable. Tensors are safetensors,
everything else is JSON in the same file's header: reading one runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lockstep.checkpoint.old_state import FlatState, State, flatten_state, unflatten_state
from lockstep.comm.communicator import Communicator
from lockstep.errors import CheckpointError

_FORMAT = "lockstep-checkpoint-1"
_PATTERN = "step-[0-9]*.safetensors"
_TEMPORARY = ".step-*.tmp"


def save(comm: Communicator, directory: Path, step: int, state: State, keep: int) -> Path:
    """Write rank 0's `state` as the checkpoint of `step`, then delete all but the `keep` newest and what crashes left.

    Collective: every rank of `comm`; returns when the file is durable. Other ranks' `state` is ignored.
    Raises: CheckpointError on every rank if rank 0 could not write; older checkpoints are then untouched.
    """
    path = directory / f"step-{step:08}.safetensors"
    problem = ""
    if comm.rank == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _write(path, flatten_state(state))
            _prune(directory, keep)
        except (OSError, SafetensorError) as error:
            problem = f"cannot write checkpoint {path}: {error}; older checkpoints in {directory} are untouched"
    problem = comm.broadcast_object(problem, label="checkpoint")
    if problem:
        raise CheckpointError(problem)
    return path


def load(path: Path, *, mapped: bool = False) -> State:
    """The state in checkpoint `path`, its tensors on the CPU. Not collective.

    Memory: the state's; with `mapped` none, for those who only read: the tensors are the file's own pages.
    Raises: CheckpointError for a file that is missing, cut off, or no checkpoint.
    """
    with _opened(path) as (file, header):
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        if not mapped:
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    return unflatten_state(FlatState(tensors, json.loads(header["values"]), json.loads(header["aliases"])))


def load_values(path: Path) -> State:
    """The state in checkpoint `path` without its tensors, which are not read. Not collective.

    Raises: CheckpointError as `load`.
    """
    with _opened(path) as (_, header):
        return unflatten_state(FlatState({}, json.loads(header["values"]), {}))


def latest(directory: Path) -> Path | None:
    """The newest checkpoint in `directory`, None where there is none. Not collective."""
    return max(directory.glob(_PATTERN), key=step_of, default=None)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """The open file and its header."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise CheckpointError(f"{path} is not a lockstep checkpoint (format {header.get('format')!r})")
            yield file, header
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error}") from error


def _write(path: Path, flat: FlatState) -> None:
    temporary = path.with_name(f".{path.stem}.tmp")
    header = {"format": _FORMAT, "values": json.dumps(flat.values), "aliases": json.dumps(flat.aliases)}
    try:
        save_file(flat.tensors, temporary, metadata=header)
        _make_durable(temporary)
        temporary.replace(path)
        _make_durable(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _prune(directory: Path, keep: int) -> None:
    for path in sorted(directory.glob(_PATTERN), key=step_of)[:-keep]:
        path.unlink()
    for path in directory.glob(_TEMPORARY):
        path.unlink()


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
