"""Folders of weights as Hugging Face's libraries read and write them, and single safetensors files.

    config.json                        of the model, not read here
    model.safetensors                  all tensors by name; or, when they are large,
    model-00001-of-00003.safetensors   some of them, and
    model.safetensors.index.json       which name is in which file

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.foreign.torch_files import read_torch_window
from lockstep.checkpoint.foreign.window import Window, open_window
from lockstep.checkpoint.tensor_file import DTYPES, Piece, bytes_of, natural, parse_json, shape_of
from lockstep.comm.tensor_parts import Part
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX_SUFFIX = ".index.json"
_HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_INDEX_BYTES_MAX = 64 << 20


class Entry(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: str  # in the format's words
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How much room its elements take."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


# ------------------------------------------------------------------ reading


def read_huggingface_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder with one of `SINGLE_FILES` or the index of several, on the CPU.

    Memory: the tensors. Raises: CheckpointMissing where it has neither; CheckpointDamaged for files that do not fit the
    index or are not whole; CheckpointError for links, and for names that leave the folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointMissing(f"cannot open the folder {folder}: {error}") from error
    try:
        present = set(os.listdir(descriptor))
        for single in SINGLE_FILES:
            if single + _INDEX_SUFFIX in present:
                return _read_indexed(folder, descriptor, single + _INDEX_SUFFIX)
            if single in present:
                return _read_weights(folder, descriptor, single)
    finally:
        os.close(descriptor)
    raise CheckpointMissing(f"{folder} has none of {', '.join(SINGLE_FILES)}, and no index of several files")


def read_safetensors(file: Window) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU, in the order of their data.

    Raises: CheckpointDamaged for what is no safetensors file, or not whole; CheckpointError for a dtype that torch or
    lockstep does not have.
    """
    try:
        length = int.from_bytes(file.read(0, 8), "little") if file.bytes >= 8 else -1
        if not 2 <= length <= min(file.bytes - 8, _HEADER_BYTES_MAX):
            raise ValueError(f"a header of {length} bytes in a file of {file.bytes}")
        header = parse_json(file.read(8, length).decode("utf-8"))
        if type(header) is not dict:
            raise ValueError("it is no JSON object")
        header.pop("__metadata__", None)
        entries = sorted((_entry(file, name, found) for name, found in header.items()), key=lambda entry: entry[1:3])
        end = 0
        for (name, *_), begin, stop in entries:
            if begin != end:
                raise ValueError(f"{ascii(name)[:200]} begins at {begin}, what is before it ends at {end}")
            end = stop
        if end != file.bytes - 8 - length:
            raise ValueError(f"its tensors have {end} bytes, the file has room for {file.bytes - 8 - length}")
    except ValueError as error:
        raise CheckpointDamaged(f"{file.name} is no whole safetensors file: its header is damaged: {error}") from error
    return {entry.name: _read_tensor(file, entry, 8 + length + begin) for entry, begin, _ in entries}


def _entry(file: Window, name: str, found: Any) -> tuple[Entry, int, int]:
    if type(found) is not dict or found.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{ascii(name)[:200]} is not described by dtype, shape and data_offsets")
    dtype, offsets = found["dtype"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{file.name}: {ascii(name)[:200]} has the dtype {ascii(dtype)[:40]}, not known here")
    entry = Entry(name, dtype, shape_of(found["shape"]))
    if type(offsets) is not list or len(offsets) != 2 or natural(offsets[1]) - natural(offsets[0]) != entry.nbytes:
        raise ValueError(f"{ascii(name)[:200]} has data_offsets that do not fit its shape")
    return entry, *offsets


def _read_tensor(file: Window, entry: Entry, offset: int) -> Tensor:
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    for _ in file.read_blocks(offset, data.numpy().data):
        pass
    return data.view(DTYPES[entry.dtype]).view(entry.shape)


def _read_weights(folder: Path, descriptor: int, name: str) -> dict[str, Tensor]:
    with open_window(folder / name, folder=descriptor) as file:
        if name.endswith(".safetensors"):
            return read_safetensors(file)
        found = read_torch_window(file)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{folder / name} holds something else than tensors by name: it is no file of weights")
    return found


def _read_indexed(folder: Path, descriptor: int, index: str) -> dict[str, Tensor]:
    with open_window(folder / index, folder=descriptor) as file:
        if file.bytes > _INDEX_BYTES_MAX:
            raise CheckpointError(f"{folder / index} has {file.bytes} bytes, more than are read")
        try:
            found = parse_json(file.read(0, file.bytes).decode("utf-8"))
        except ValueError as error:
            raise CheckpointDamaged(f"{folder / index} is no JSON: {error}") from error
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointDamaged(f"{folder / index} has no weight_map")
    tensors: dict[str, Tensor] = {}
    placed: dict[str, list[str]] = {}
    for tensor, name in places.items():
        placed.setdefault(name, []).append(tensor)
    for name, wanted in placed.items():
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise CheckpointError(f"{folder / index} names the file {ascii(name)[:200]}: only names beside it are read")
        held = _read_weights(folder, descriptor, name)
        absent = [tensor for tensor in wanted if tensor not in held]
        if absent:
            raise CheckpointDamaged(f"{folder / name} lacks {absent[:10]!a}, which its index places there")
        tensors |= {tensor: held[tensor] for tensor in wanted}
    return {tensor: tensors[tensor] for tensor in places}


# ------------------------------------------------------------------ writing


def write_huggingface_folder(
    folder: Path, entries: Sequence[Entry], read: Callable[[str], Tensor], shard_bytes: int
) -> list[str]:
    """Write `entries` into the existing `folder`, in files of at most `shard_bytes` where tensors allow it.

    `read(name)` gives a tensor when its turn comes. Returns the names of the files, which are durable.
    """
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(held.nbytes for held in shards[-1]) + entry.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        write_safetensors(folder / SINGLE_FILES[0], entries, read)
        return [SINGLE_FILES[0]]
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, read)
    places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = {"total_size": sum(entry.nbytes for entry in entries)}
    index = SINGLE_FILES[0] + _INDEX_SUFFIX
    write_bytes(folder / index, json.dumps({"metadata": total, "weight_map": places}, indent=2).encode() + b"\n")
    return [*names, index]


def write_safetensors(path: Path, entries: Sequence[Entry], read: Callable[[str], Tensor]) -> None:
    """Write a new file of `entries` and make its bytes durable. Memory: one tensor."""
    ordered = sorted(entries, key=lambda entry: (-DTYPES[entry.dtype].itemsize, entry.name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # some readers ask for it
    end = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (end, end + entry.nbytes),
        }
        end += entry.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for entry in ordered:
            whole = Piece(entry.name, entry.dtype, Part((0,) * len(entry.shape), entry.shape))
            file.write(bytes_of(read(entry.name), whole))
        file.flush()
        os.fsync(file.fileno())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small new file and make its bytes durable."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
