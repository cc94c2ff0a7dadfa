"""The pieces of a sharded state: which of them a rank writes, and how any part is put together from the files again."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lockstep.checkpoint.old_manifest import Manifest
from lockstep.checkpoint.old_state import State, leaves
from lockstep.checkpoint.old_tensor_file import DTYPES, FileSum, Source, dtype_name, open_tensors, write_tensors
from lockstep.comm.tensor_parts import Part, is_dtensor, is_first_copy, local_of, part_of
from lockstep.errors import CheckpointError

_STARTS = "starts"


class ShardedState(NamedTuple):
    """A state by path, its tensors as they are."""

    tensors: dict[str, Tensor]  # whole ones and DTensors
    values: dict[str, Any]  # JSON
    aliases: dict[str, str]  # tensors that are others, as far as this rank can see

    def table(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What must be equal on all ranks: dtype and whole shape by path."""
        return {path: (dtype_name(t.dtype, path), tuple(t.shape)) for path, t in self.tensors.items()}


def by_path(state: State) -> ShardedState:
    """`state` in flat form. Memory: the tensors' own.

    Raises: CheckpointError for a key that is no path component and for a tensor on the meta device.
    """
    flat = ShardedState({}, {}, {})
    seen: dict[tuple[Any, ...], str] = {}
    for path, leaf in leaves(state):
        if not isinstance(leaf, Tensor):
            flat.values[path] = leaf
            continue
        if leaf.is_meta:
            raise CheckpointError(
                f"{path} is on the meta device: fill the model first, with lockstep.materialize(model)"
            )
        flat.tensors[path] = leaf
        local = local_of(leaf)
        storage = local.untyped_storage()
        if leaf.numel() and storage.nbytes():
            place = (local.device, storage.data_ptr(), local.storage_offset(), local.stride(), leaf.dtype, leaf.shape)
            if seen.setdefault(place, path) != path:
                flat.aliases[path] = seen[place]
    return flat


def write_pieces(path: Path, tensors: Mapping[str, Tensor], rank: int) -> FileSum | None:
    """Write what this rank alone has, and, on rank 0, what every rank has; None where that is nothing."""
    mine = {p: t for p, t in tensors.items() if (is_first_copy(t) if is_dtensor(t) else rank == 0)}
    parts = {p: part_of(t) for p, t in mine.items()}
    sources = {
        p: Source(mine[p].dtype, part.shape, partial(local_of, mine[p])) for p, part in parts.items() if part.numel
    }
    starts = {p: part.start for p, part in parts.items() if any(part.start)}
    return write_tensors(path, sources, {_STARTS: json.dumps(starts)}) if sources else None


class _Piece(NamedTuple):
    file: Any  # open
    part: Part


@final
class Pieces:
    """The files of one checkpoint, open; see `open_pieces`."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._pieces: dict[str, list[_Piece]] = {}

    def add(self, file: Any, name: str) -> None:
        """Take an open file in."""
        starts = json.loads((file.metadata() or {}).get(_STARTS, "{}"))
        for path in file.keys():  # noqa: SIM118 (not a dict)
            dtype, shape = self.manifest.tensors.get(path, ("", ()))
            found = file.get_slice(path)
            part = Part(tuple(starts.get(path, [0] * len(shape))), tuple(found.get_shape()))
            inside = len(part.start) == len(part.shape) == len(shape) and all(
                start >= 0 and start + n <= whole for start, n, whole in zip(*part, shape, strict=True)
            )
            if found.get_dtype() != dtype or not inside:
                raise CheckpointError(f"{name} holds {found.get_dtype()} {part} of {path}, which is {dtype} {shape}")
            self._pieces.setdefault(path, []).append(_Piece(file, part))

    def check_complete(self) -> None:
        """Raises: CheckpointError, naming them, where elements of tensors are in no file, or in several."""
        wrong = []
        for path, (_, shape) in self.manifest.tensors.items():
            parts = sorted(piece.part for piece in self._pieces.get(path, ()))
            if sum(part.numel for part in parts) != math.prod(shape) or _overlap(parts):
                wrong.append(path)
        if wrong:
            raise CheckpointError(f"the files do not have every element of {', '.join(wrong)} once")

    def read_into(self, out: Tensor, path: str, part: Part) -> None:
        """`out` becomes `part` of tensor `path`. Reads only what is asked for."""
        for file, held in self._pieces.get(path, ()):
            common = held.overlap(part)
            if common is not None:
                out[common.within(part).slices].copy_(file.get_slice(path)[common.within(held).slices])

    def whole(self, path: str) -> Source:
        """Tensor `path` from all its pieces, for `write_tensors`."""
        dtype, shape = self.manifest.tensors[path]

        def read() -> Tensor:
            out = torch.empty(shape, dtype=DTYPES[dtype])
            self.read_into(out, path, Part((0,) * len(shape), shape))
            return out

        return Source(DTYPES[dtype], shape, read)


def _overlap(parts: Sequence[Part]) -> bool:
    """Whether two of `parts`, which are in the order of their starts, have an element in common."""
    for index, part in enumerate(parts):
        for other in parts[index + 1 :]:
            if part.shape and other.start[0] >= part.start[0] + part.shape[0]:
                break
            if part.overlap(other):
                return True
    return False


@contextlib.contextmanager
def open_pieces(folder: Path, manifest: Manifest) -> Iterator[Pieces]:
    """All pieces of the checkpoint in `folder`. Raises: CheckpointError where the files do not fit the manifest."""
    with contextlib.ExitStack() as stack:
        pieces = Pieces(manifest)
        for name in manifest.files:
            pieces.add(stack.enter_context(open_tensors(folder / name)), name)
        pieces.check_complete()
        yield pieces
