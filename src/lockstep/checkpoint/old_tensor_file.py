"""One safetensors file: written tensor by tensor with its digest, read range by range."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.errors import CheckpointError

# The names that the safetensors format gives to torch's dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_READ_BYTES = 1 << 20


class Source(NamedTuple):
    """A tensor to be written. `read` gives it when its turn comes, so that not all need memory at once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class FileSum(NamedTuple):
    """What tells whether a file is the one that was written."""

    bytes: int
    sha256: str


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The format's name of `dtype`. Raises: CheckpointError where it has none."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{what} has dtype {dtype}, which safetensors files cannot hold")
    return _NAMES[dtype]


def write_tensors(path: Path, sources: Mapping[str, Source], metadata: Mapping[str, str]) -> FileSum:
    """Write the file and make its bytes durable. Memory: one tensor on the CPU.

    Source: the safetensors format, https://github.com/huggingface/safetensors#format
    """
    names = sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name))  # so that every tensor is aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        dtype, shape, _ = sources[name]
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": dtype_name(dtype, name), "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(encoded).to_bytes(8, "little"), encoded):
            digest.update(block)
            file.write(block)
        for name in names:
            data = _bytes_of(sources[name], name)
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(8 + len(encoded) + end, digest.hexdigest())


def _bytes_of(source: Source, name: str) -> memoryview:
    tensor = source.read().detach()
    assert (tensor.dtype, tuple(tensor.shape)) == source[:2], f"{name} is not what was announced"
    flat = tensor.cpu().resolve_conj().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def sum_of(path: Path) -> FileSum:
    """The size and digest of the file as it is now."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileSum(size, digest.hexdigest())


def open_tensors(path: Path) -> Any:
    """The file, as safetensors' `safe_open` gives it, for a `with` block.

    Raises: CheckpointError where it is missing, cut off, or no safetensors file.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
