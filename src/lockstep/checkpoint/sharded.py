"""Checkpoints of sharded models: one folder per step, in which every rank wrote its own pieces.

    step-00000100/  manifest.json             what there is: shapes, values, digests
                    rank-00000.safetensors    pieces of DTensors, and what all ranks have alike
                    rank-00001.safetensors

The folder gets its name when everything in it is durable: it is there as a whole or not at all. Any number of ranks,
with any strategy, loads it; each reads the ranges that it needs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.checkpoint.old_manifest import NAME, Manifest, check_file, read_manifest, write_manifest
from lockstep.checkpoint.pieces import ShardedState, by_path, open_pieces, write_pieces
from lockstep.checkpoint.old_state import FlatState, State, unflatten_state
from lockstep.checkpoint.old_tensor_file import DTYPES, FileSum, write_tensors
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import local_of, part_of
from lockstep.errors import CheckpointError, LockstepError

_T = TypeVar("_T")
_UNFINISHED = ".step-*.partial"
_REASON_CHARS = 2000


def save(comm: Communicator, directory: Path, step: int, state: State, keep: int | None = None) -> Path:
    """Write `state` as the checkpoint of `step`; then delete all but the `keep` newest (None: keep all).

    `state` has the same tensors on every rank: DTensors, of which every rank writes its piece (equal ones once), and
    others, which are rank 0's, as all that is no tensor. Replaces a checkpoint of the same step.
    Collective: every rank of `comm`, on one file system; returns when the checkpoint is durable.
    Memory: one piece at a time, where it has to be copied to the CPU.
    Raises: CheckpointError on every rank if one could not do its part; older checkpoints are then untouched.
    """
    final = directory / f"step-{step:08}"
    unfinished = directory / f".{final.name}.partial"
    what = f"cannot write checkpoint {final}, older ones are untouched"
    try:
        flat = _together(comm, what, lambda: _begin(comm.rank, unfinished, state))
        aliases: dict[str, str] = comm.broadcast_object(flat.aliases, label="checkpoint")  # rank 0 sees no empty pieces
        for path in aliases:
            flat.tensors.pop(path, None)
        name = f"rank-{comm.rank:05}.safetensors"
        file = _together(comm, what, lambda: _write_own(unfinished, name, flat, comm.rank))
        files = _gather_files(comm, what, flat, name, file)
        manifest = Manifest(step, comm.world_size, files, flat.table(), aliases, flat.values)
        _together(comm, what, lambda: _commit(manifest, unfinished, final, keep) if comm.rank == 0 else None)
    except LockstepError:
        if comm.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def load(comm: Communicator, path: Path, into: State, *, strict: bool = True, cast: bool = False) -> State:
    """Fill the tensors of `into` from checkpoint `path`; returns a state of them and the checkpoint's other values.

    `into` is laid out as at saving, for any number of ranks: DTensors get this rank's pieces, other tensors everything.
    `strict=False`: tensors that only one side has are passed over. `cast=True`: dtypes may differ.
    Collective: every rank of `comm`. Each file is checked by one rank before any tensor is written.
    Raises: CheckpointError on every rank, naming all that is missing, unexpected or of another shape or dtype.
    """
    what = f"cannot load checkpoint {path}"

    def check() -> tuple[Manifest, ShardedState]:
        manifest = read_manifest(path)
        for name in list(manifest.files)[comm.rank :: comm.world_size]:
            check_file(path, name, manifest.files[name])
        flat = by_path(into)
        _check_fit(manifest, flat.tensors, strict, cast)
        return manifest, flat

    manifest, flat = _together(comm, what, check)
    _together(comm, what, lambda: _fill(path, manifest, flat.tensors))
    return unflatten_state(FlatState(flat.tensors, manifest.values, {}))


def export(path: Path, out: Path, *, key: str = "model") -> None:
    """Write the tensors under `key` of checkpoint `path` as one plain safetensors file, as transformers reads it.

    Of tensors that are tied there, the first is written. Not collective. Memory: the largest tensor.
    Raises: CheckpointError for a damaged checkpoint, and where there is nothing under `key`.
    """
    manifest = read_manifest(path)
    for name, expected in manifest.files.items():
        check_file(path, name, expected)
    prefix = f"{key}/"
    paths = [tensor for tensor in manifest.tensors if tensor.startswith(prefix)]
    paths += [a for a, of in manifest.aliases.items() if a.startswith(prefix) and not of.startswith(prefix)]
    if not paths:
        raise CheckpointError(f"{path} has no tensors under {key!r}: it has {sorted(_first_keys(manifest))}")
    temporary = out.with_name(f".{out.name}.partial")
    try:
        with open_pieces(path, manifest) as pieces:
            sources = {
                tensor.removeprefix(prefix).replace("/", "."): pieces.whole(manifest.target(tensor)) for tensor in paths
            }
            write_tensors(temporary, sources, {"format": "pt"})
        temporary.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def latest(directory: Path) -> Path | None:
    """The newest sharded checkpoint in `directory`, None where there is none. Not collective."""
    return next(reversed(_checkpoints(directory)), None)


def _checkpoints(directory: Path) -> list[Path]:
    found = [path for path in directory.glob("step-*") if (path / NAME).is_file()]
    return sorted((path for path in found if path.name.removeprefix("step-").isdecimal()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# ------------------------------------------------------------------ saving


def _begin(rank: int, unfinished: Path, state: State) -> ShardedState:
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
        unfinished.mkdir(parents=True)
    return by_path(state)


def _write_own(unfinished: Path, name: str, flat: ShardedState, rank: int) -> FileSum | None:
    if not unfinished.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see the folder that rank 0 has made, {unfinished}: checkpoints of several hosts "
            "must be in a folder that all of them see"
        )
    return write_pieces(unfinished / name, flat.tensors, rank)


def _gather_files(
    comm: Communicator, what: str, flat: ShardedState, name: str, file: FileSum | None
) -> dict[str, FileSum]:
    """Every rank's file. Raises: CheckpointError on every rank where their states are not one."""
    table = repr(sorted(flat.table().items())).encode()
    mine = [hashlib.sha256(table).hexdigest(), len(flat.tensors), name, file]
    everyone = comm.all_gather_object(mine, label="checkpoint")
    others = [rank for rank, (digest, *_) in enumerate(everyone) if digest != everyone[0][0]]
    if others:
        counts = [count for _, count, *_ in everyone]
        raise CheckpointError(
            f"{what}: the states of ranks {others} have tensors of other names, shapes or dtypes than rank 0's "
            f"(tensors per rank: {counts}); every rank passes the same structure"
        )
    return {name: FileSum(*file) for _, _, name, file in everyone if file is not None}


def _commit(manifest: Manifest, unfinished: Path, final: Path, keep: int | None) -> None:
    with open_pieces(unfinished, manifest):
        pass  # what could not be loaded is not given a name
    write_manifest(unfinished, manifest)
    _make_durable(unfinished)
    replaced = final.with_name(f".{final.name}.replaced.partial")
    if final.exists():
        final.rename(replaced)
    try:
        unfinished.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    _make_durable(final.parent)
    old = [] if keep is None else _checkpoints(final.parent)[:-keep]
    for path in [*old, *final.parent.glob(_UNFINISHED)]:
        shutil.rmtree(path)


def _make_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------ loading


def _check_fit(manifest: Manifest, tensors: dict[str, Tensor], strict: bool, cast: bool) -> None:
    problems = []
    held = {*manifest.tensors, *manifest.aliases}
    if strict:
        problems += [f"{path} is not in the checkpoint" for path in tensors if path not in held]
        problems += [f"{path} is in the checkpoint only" for path in sorted(held - set(tensors))]
    for path in (path for path in tensors if path in held):
        dtype, shape = manifest.tensors[manifest.target(path)]
        tensor = tensors[path]
        if tuple(tensor.shape) != shape:
            problems.append(f"{path} is {list(tensor.shape)}, the checkpoint has {list(shape)}")
        elif tensor.dtype != DTYPES[dtype] and not cast:
            problems.append(f"{path} is {tensor.dtype}, the checkpoint has {DTYPES[dtype]} (cast=True converts)")
    if problems:
        raise CheckpointError("; ".join(problems))


def _fill(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad(), open_pieces(folder, manifest) as pieces:
        for path, tensor in tensors.items():
            pieces.read_into(local_of(tensor), manifest.target(path), part_of(tensor))


def _first_keys(manifest: Manifest) -> set[str]:
    return {path.split("/")[0] for path in manifest.tensors}


# ------------------------------------------------------------------ every rank alike


def _together(comm: Communicator, what: str, action: Callable[[], _T]) -> _T:
    """What `action` returns, once it has succeeded on every rank. Collective.

    Raises: CheckpointError on every rank where it failed on one, with the reasons of all.
    """
    reason, cause, result = "", None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        cause = error
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    reasons: list[Any] = comm.all_gather_object(reason[:_REASON_CHARS], label="checkpoint")
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text]
    if failed:
        raise CheckpointError(f"{what}: {'; '.join(failed)}") from cause
    return result  # pyright: ignore[reportReturnType]
