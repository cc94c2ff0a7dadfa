"""Folders of `torch.distributed.checkpoint`: every tensor put together from the chunks that its ranks wrote.

    .metadata       a pickle: dtype, shape and chunks of every tensor; file, offset and length of every chunk
    __0_0.distcp    chunks and values one after the other, each an archive of `torch.save`

Nested keys were joined with dots; `.metadata` says how they were nested. Integer keys of dicts had become text.

Source: the classes in that pickle, torch/distributed/checkpoint/metadata.py and filesystem.py (version 1.0.0).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from lockstep.checkpoint.foreign.inert_pickle import PICKLE_BYTES_MAX, Call, read_inert
from lockstep.checkpoint.foreign.torch_files import read_torch_window
from lockstep.checkpoint.foreign.torch_tensors import dtype_of, shape_of
from lockstep.checkpoint.foreign.window import Folder, Window, open_folder
from lockstep.checkpoint.shares import is_tiled
from lockstep.checkpoint.state import DEPTH_MAX
from lockstep.comm.tensor_parts import Part
from lockstep.errors import CheckpointDamaged, CheckpointError

METADATA = ".metadata"
_HOME = "torch.distributed.checkpoint.metadata."
_LIST_MAX = 1_000_000
_SMALL_BYTES = 64 << 20  # archives around chunks and the like


def _place_key(name: str, start: tuple[int, ...] | None) -> str:
    """Where the chunk of item `name` at `start` is looked up. Text: equal hashes of numbers could be made."""
    return f"{start} {name}"


class _Place(NamedTuple):
    file: str
    offset: int
    length: int


class _Sharded(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Part]


def read_dcp_folder(path: Path) -> dict[str, Any]:
    """The state that `torch.distributed.checkpoint.save` has written to the folder, its tensors whole, on the CPU.

    Memory: the tensors, one chunk and the metadata.
    Raises: CheckpointDamaged where elements of a tensor are in no chunk or in several, and for what is not whole;
    CheckpointError for what would need code, by its name, and for paths that leave the folder.
    """
    with open_folder(path) as folder:
        with folder.open(METADATA) as file:
            data = file.read_all(PICKLE_BYTES_MAX)
        metadata = _Metadata(file.name, read_inert(data, file.name))
        _check_complete(folder, metadata)
        nested = _Nested(file)
        for name, item in metadata.items.items():
            value = _stored(folder, metadata, name, None) if item is None else _tensor(folder, metadata, name, item)
            nested.set(metadata.nesting.get(name, (name,)), value)
    return nested.state()


@final
class _Metadata:
    """The symbols of `.metadata` as tables."""

    def __init__(self, source: str, root: Any) -> None:
        self._source = source
        fields = self._fields(root, _HOME + "Metadata")
        self.items: dict[str, _Sharded | None] = {}  # None: bytes
        for name, item in self._table(fields.get("state_dict_metadata")):
            if not isinstance(name, str):
                self._fail("the name of an item is no text")
            self.items[name] = self._item(name, item)
        self.places: dict[str, _Place] = {}
        for index, info in self._table(fields.get("storage_data")):
            self._add_place(index, info)
        self.nesting: dict[str, tuple[Any, ...]] = {}
        for name, path in self._table(fields.get("planner_data") or {}):
            if name not in self.items or not isinstance(path, tuple) or not 0 < len(path) <= DEPTH_MAX:
                self._fail(f"{name!a} has no right path in the state, or is no item")
            self.nesting[name] = path

    def _item(self, name: str, item: Any) -> _Sharded | None:
        if isinstance(item, Call) and item.is_of(_HOME + "BytesStorageMetadata"):
            return None
        fields = self._fields(item, _HOME + "TensorStorageMetadata")
        properties = fields.get("properties")
        if not isinstance(properties, Call) or not properties.is_of(_HOME + "TensorProperties"):
            self._fail(f"{name!a} has no properties")
        state = properties.states[0] if len(properties.states) == 1 else None
        dtype = dtype_of(state[0]) if isinstance(state, tuple) and state else None
        shape, chunks = shape_of(fields.get("size")), fields.get("chunks")
        if dtype is None or shape is None or not isinstance(chunks, list):
            self._fail(f"{name!a} has no right dtype, shape or list of chunks")
        parts = [self._chunk(name, chunk, shape) for chunk in chunks]
        return _Sharded(dtype, shape, [part for part in parts if part.numel])

    def _chunk(self, name: str, chunk: Any, shape: tuple[int, ...]) -> Part:
        fields = self._fields(chunk, _HOME + "ChunkStorageMetadata")
        start, size = shape_of(fields.get("offsets")), shape_of(fields.get("sizes"))
        if start is None or size is None or not len(start) == len(size) == len(shape):
            self._fail(f"a chunk of {name!a} has no right offsets or sizes")
        if any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
            self._fail(f"a chunk of {name!a} lies outside of it")
        return Part(start, size)

    def _add_place(self, index: Any, info: Any) -> None:
        at = self._fields(index, _HOME + "MetadataIndex")
        to = self._fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
        name, offset, file = at.get("fqn"), at.get("offset"), to.get("relative_path")
        start = None if offset is None else shape_of(offset)
        if not isinstance(name, str) or name not in self.items or (offset is not None and start is None):
            self._fail("a place belongs to no item")
        if to.get("transform_descriptors"):
            raise CheckpointError(
                f"{self._source} tells of compressed or otherwise transformed chunks: only plain are read"
            )
        begin, length = to.get("offset"), to.get("length")
        if not isinstance(file, str) or not isinstance(begin, int) or not isinstance(length, int):
            self._fail(f"the place of {name!a} has no file, offset or length")
        if _place_key(name, start) in self.places:
            self._fail(f"{name!a} is in two places")
        self.places[_place_key(name, start)] = _Place(file, begin, length)

    def _fields(self, found: Any, name: str) -> dict[Any, Any]:
        states = found.states if isinstance(found, Call) and found.is_of(name) else []
        if len(states) != 1 or type(states[0]) is not dict:
            self._fail(f"it holds no {name} where one belongs")
        return states[0]

    def _table(self, found: Any) -> list[tuple[Any, Any]]:
        if type(found) is not dict:
            self._fail("a table is missing")
        return list(found.items())

    def _fail(self, what: str) -> NoReturn:
        raise CheckpointDamaged(f"{self._source} is damaged, or of a version that is not known here: {what}")


def _check_complete(folder: Folder, metadata: _Metadata) -> None:
    """That every element is in exactly one chunk, and the files as large as all chunks. Before memory is taken."""
    lost, total = [], 0
    for name, item in metadata.items.items():
        starts = [None] if item is None else [chunk.start for chunk in item.chunks]
        lost += [ascii(name) for start in starts if _place_key(name, start) not in metadata.places]
        if item is not None:
            total += math.prod(item.shape) * item.dtype.itemsize
            if not is_tiled(item.shape, item.chunks):
                raise _damaged(folder, f"the chunks of {name!a} do not have every element once")
    if lost:
        raise _damaged(folder, f"it has no place for {', '.join(lost[:10])}")
    room = _SMALL_BYTES
    for name in {place.file for place in metadata.places.values()}:
        with folder.open(name) as file:
            room += file.bytes
    if total > room:
        raise _damaged(folder, f"its tensors have {total} bytes, more than its files")


def _tensor(folder: Folder, metadata: _Metadata, name: str, item: _Sharded) -> Tensor:
    whole = torch.empty(item.shape, dtype=item.dtype)
    for chunk in item.chunks:
        found = _stored(folder, metadata, name, chunk.start)
        if not isinstance(found, Tensor) or found.dtype != item.dtype or tuple(found.shape) != chunk.shape:
            what = f"the chunk of {name!a} at {list(chunk.start)} is no {item.dtype} {list(chunk.shape)}"
            raise _damaged(folder, what)
        whole[chunk.slices].copy_(found)
    return whole


def _stored(folder: Folder, metadata: _Metadata, name: str, start: tuple[int, ...] | None) -> Any:
    place = metadata.places[_place_key(name, start)]
    with folder.open(place.file) as file:
        return read_torch_window(file.part(place.offset, place.length, f"{file.name}, {ascii(name)[1:-1]}"))


def _damaged(folder: Folder, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{folder.path} is damaged: {what}")


class _Branch(dict[Any, Any]):
    """A container that is being put together. One whose keys are all integers becomes a list."""


@final
class _Nested:
    """A state that grows leaf by leaf."""

    def __init__(self, file: Window) -> None:
        self._file = file
        self._root = _Branch()
        self._room = _LIST_MAX

    def set(self, path: tuple[Any, ...], value: Any) -> None:
        """Put a leaf at `path`."""
        place = self._root
        if not all(type(key) in (str, int) for key in path):
            self._file.fail("a path has a key that is neither text nor an integer")
        for key in path[:-1]:
            place = place.setdefault(key, _Branch())
            if not isinstance(place, _Branch):
                self._file.fail(f"{path!a} lies within another item")
        if path[-1] in place:
            self._file.fail(f"{path!a} is there twice, or has other items within it")
        place[path[-1]] = value

    def state(self) -> dict[str, Any]:
        """The whole. What a list lacks, as an empty dict has no leaf, is None, as it is for torch."""
        return {key: self._built(value) for key, value in self._root.items()}

    def _built(self, found: Any) -> Any:
        if not isinstance(found, _Branch):
            return found
        built = {key: self._built(value) for key, value in found.items()}
        if not any(isinstance(key, int) for key in built):
            return built
        if not all(isinstance(key, int) and 0 <= key < self._room for key in built):
            self._file.fail("a container has both names and indices, or far too many of them")
        size = max(built) + 1
        self._room -= size
        return [built.get(index) for index in range(size)]
