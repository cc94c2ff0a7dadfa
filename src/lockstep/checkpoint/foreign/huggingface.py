"""Folders of weights as Hugging Face's libraries read and write them, and single safetensors files.

    config.json                        of the model, not read here
    model.safetensors                  all tensors by name; or, when they are large,
    model-00001-of-00003.safetensors   some of them, and
    model.safetensors.index.json       which name is in which file

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.foreign.torch_files import read_torch_window
from lockstep.checkpoint.foreign.window import Folder, Window, open_folder
from lockstep.checkpoint.tensor_file import (
    DTYPES,
    Piece,
    bytes_of,
    header_text,
    natural,
    parse_json,
    raw_header,
    shape_of,
)
from lockstep.durable import new_file
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
_INDEX_BYTES_MAX = 64 << 20


# ------------------------------------------------------------------ reading


def read_huggingface_folder(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder with one of `SINGLE_FILES` or the index of several, on the CPU.

    Memory: the tensors. Raises: CheckpointMissing where it has neither; CheckpointDamaged for files that do not fit the
    index or are not whole; CheckpointError for links, and for names that leave the folder.
    """
    with open_folder(path) as folder:
        present = folder.names()
        for single in SINGLE_FILES:  # where there are several, transformers takes this one, too
            if single in present:
                return _read_weights(folder, single)
            if single + INDEX_SUFFIX in present:
                return _read_indexed(folder, single + INDEX_SUFFIX)
    raise CheckpointMissing(f"{path} has none of {', '.join(SINGLE_FILES)}, and no index of several files")


def read_safetensors(file: Window) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU, in the order of their data.

    Raises: CheckpointDamaged for what is no safetensors file, or not whole; CheckpointError for a dtype that torch or
    lockstep does not have.
    """
    try:
        raw = raw_header(file.read, file.bytes)
        header = parse_json(raw.decode("utf-8"))
        if type(header) is not dict:
            raise ValueError("it is no JSON object")
        header.pop("__metadata__", None)
        placed = sorted((_placed(file, name, found) for name, found in header.items()), key=lambda place: place[1:])
        end = 0
        for (name, *_), begin, stop in placed:
            if begin != end:
                raise ValueError(f"{ascii(name)[:200]} begins at {begin}, what is before it ends at {end}")
            end = stop
        room = file.bytes - 8 - len(raw)
        if end != room:
            raise ValueError(f"its tensors have {end} bytes, the file has room for {room}")
    except ValueError as error:
        raise CheckpointDamaged(f"{file.name} is no whole safetensors file: its header is damaged: {error}") from error
    return {piece.path: _read_tensor(file, piece, 8 + len(raw) + begin) for piece, begin, _ in placed}


def _placed(file: Window, name: str, found: Any) -> tuple[Piece, int, int]:
    if type(found) is not dict or found.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{ascii(name)[:200]} is not described by dtype, shape and data_offsets")
    dtype, offsets = found["dtype"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{file.name}: {ascii(name)[:200]} has the dtype {ascii(dtype)[:40]}, not known here")
    piece = Piece.whole(name, dtype, shape_of(found["shape"]))
    if type(offsets) is not list or len(offsets) != 2 or natural(offsets[1]) - natural(offsets[0]) != piece.nbytes:
        raise ValueError(f"{ascii(name)[:200]} has data_offsets that do not fit its shape")
    return piece, *offsets


def _read_tensor(file: Window, piece: Piece, offset: int) -> Tensor:
    data = torch.empty(piece.nbytes, dtype=torch.uint8)
    file.read_into(data.numpy().data, offset)
    return data.view(DTYPES[piece.dtype]).view(piece.part.shape)


def _read_weights(folder: Folder, name: str) -> dict[str, Tensor]:
    with folder.open(name) as file:
        found = read_safetensors(file) if name.endswith(".safetensors") else read_torch_window(file)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{file.name} holds something else than tensors by name: it is no file of weights")
    return found


def _read_indexed(folder: Folder, index: str) -> dict[str, Tensor]:
    with folder.open(index) as file:
        data = file.read_all(_INDEX_BYTES_MAX)
    try:
        found = parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise CheckpointDamaged(f"{file.name} is no JSON: {error}") from error
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointDamaged(f"{file.name} has no weight_map")
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(places.values()):
        held, wanted = _read_weights(folder, name), [tensor for tensor, place in places.items() if place == name]
        absent = [tensor for tensor in wanted if tensor not in held]
        if absent:
            raise CheckpointDamaged(f"{folder.path / name} lacks {absent[:10]!a}, which its index places there")
        tensors |= {tensor: held[tensor] for tensor in wanted}
    return {tensor: tensors[tensor] for tensor in places}


# ------------------------------------------------------------------ writing


def write_huggingface_folder(
    folder: Path, tensors: Sequence[Piece], read: Callable[[str], Tensor], shard_bytes: int
) -> list[str]:
    """Write whole `tensors` into the existing `folder`, in files of at most `shard_bytes` where they allow it.

    `read(name)` gives a tensor when its turn comes. Returns the names of the files, which are durable.
    """
    shards: list[list[Piece]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if len(shards) == 1:
        write_safetensors(folder / SINGLE_FILES[0], tensors, read)
        return [SINGLE_FILES[0]]
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, read)
    places = {tensor.path: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = SINGLE_FILES[0] + INDEX_SUFFIX
    with new_file(folder / index) as file:
        file.write(json.dumps({"metadata": total, "weight_map": places}, indent=2).encode() + b"\n")
    return [*names, index]


def write_safetensors(path: Path, tensors: Sequence[Piece], read: Callable[[str], Tensor]) -> None:
    """Write a new file of whole `tensors` and make its bytes durable. Memory: one tensor."""
    ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.path))  # so all are aligned
    metadata = {"format": "pt"}  # some readers ask for it
    encoded = header_text(metadata, ((tensor.path, tensor) for tensor in ordered))
    with new_file(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in ordered:
            file.write(bytes_of(read(tensor.path), tensor))
