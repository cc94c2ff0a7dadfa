"""Checkpoints of a run, whichever way it is cut: one file written by rank 0, or a folder that every rank writes into.

step-00000250.safetensors   where every rank has whole parameters
step-00000250/              where ranks have pieces of them

Each is resumed by any strategy and any number of ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint import manifest, sharded, store
from lockstep.checkpoint.state import FlatState, State, unflatten_state
from lockstep.checkpoint.tensor_file import DTYPES
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import local_of, part_of
from lockstep.errors import CheckpointError
from lockstep.parallel.named_state import (
    is_cut,
    load_optimizer_state,
    optimizer_state,
    room_for_state,
    unwrapped,
)
from lockstep.parallel.sharded_optimizer import ShardedOptimizer

_MODEL, _OPTIMIZER = "model", "optimizer"


def save(
    comm: Communicator, directory: Path, step: int, model: nn.Module, optimizer: Optimizer, values: State, keep: int
) -> Path:
    """Write the model, the optimizer and `values`, JSON, as the checkpoint of `step`; delete all but the `keep` newest.

    Collective: every rank of `comm`; returns when it is durable.
    Raises: CheckpointError on every rank; older checkpoints are then untouched.
    """
    state = {**values, _MODEL: dict(unwrapped(model).state_dict()), _OPTIMIZER: optimizer_state(model, optimizer)}
    saved = (sharded if is_cut(model) else store).save(comm, directory, step, state, keep)
    if comm.rank == 0:
        for older in find_all(directory)[:-keep]:  # of the other kind
            shutil.rmtree(older) if older.is_dir() else older.unlink()
    return saved


def find_all(directory: Path) -> list[Path]:
    """All checkpoints of both kinds in `directory`, the newest last. Not collective."""
    found = [*directory.glob("step-*.safetensors"), *directory.glob(f"step-*/{manifest.NAME}")]
    paths = [path.parent if path.name == manifest.NAME else path for path in found]
    return sorted((p for p in paths if p.stem.removeprefix("step-").isdecimal()), key=lambda p: (store.step_of(p), p))


def latest(directory: Path) -> Path | None:
    """The newest checkpoint in `directory`, None where there is none. Not collective."""
    return next(reversed(find_all(directory)), None)


def load_values(path: Path) -> State:
    """The `values` of checkpoint `path`. Not collective.

    Raises: CheckpointError for what is missing, cut off, or no checkpoint.
    """
    if path.is_dir():
        return unflatten_state(FlatState({}, manifest.read_manifest(path).values, {}))
    return store.load_values(path)


def restore(comm: Communicator, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Put the weights and the optimizer's state of checkpoint `path` back.

    Collective: every rank of `comm`. Memory: each rank's own pieces, of a folder and of a file.
    Raises: CheckpointError where it is of another model.
    """
    weights = unwrapped(model).state_dict()
    if not path.is_dir():
        keeps = not isinstance(optimizer, ShardedOptimizer)  # the tensors it is given; ours copies its pieces
        state = store.load(path, mapped=not keeps)
        fill(weights, state[_MODEL])
        load_optimizer_state(model, optimizer, state.get(_OPTIMIZER, {}))
        return
    described = _tensors_of(path, _OPTIMIZER)
    into: State = {_MODEL: weights}
    if described:
        into[_OPTIMIZER] = room_for_state(model, described)
    load_optimizer_state(model, optimizer, sharded.load(comm, path, into).get(_OPTIMIZER, {}))


@torch.no_grad()
def fill(weights: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Let `weights`, DTensors or whole ones, have the values of whole tensors.

    Raises: CheckpointError for other names or shapes, before anything is changed.
    """
    problems = [f"it lacks {fqn!r}" for fqn in weights if fqn not in saved]
    problems += [f"it has {fqn!r}" for fqn in saved if fqn not in weights]
    problems += [
        f"{fqn!r} is {list(saved[fqn].shape)}, not {list(weight.shape)}"
        for fqn, weight in weights.items()
        if fqn in saved and saved[fqn].shape != weight.shape
    ]
    if problems:
        raise CheckpointError(f"the checkpoint's weights do not fit this model: {'; '.join(problems)}")
    for fqn, weight in weights.items():
        local_of(weight).copy_(saved[fqn][part_of(weight).slices])


def _tensors_of(path: Path, key: str) -> dict[str, dict[str, Tensor]]:
    """What the folder `path` has under `key`, name by name, as tensors on the meta device."""
    found: dict[str, Any] = {}
    held = manifest.read_manifest(path)
    for place in (*held.tensors, *held.aliases):
        if place.startswith(f"{key}/"):
            _, fqn, name = place.split("/")
            dtype, shape = held.tensors[held.target(place)]
            found.setdefault(fqn, {})[name] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    return found
