"""One safetensors file of a checkpoint: written piece by piece with its digests; its header, read without trust.

    8 bytes      length of the header, little-endian
    the header   JSON, filled up with spaces to 8 bytes: {path: {dtype, shape, data_offsets}}, in the order of the data;
                 a piece that does not begin at the start of its tensor says where in __metadata__
    the data     widest elements first, so that every piece is aligned

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.comm.tensor_parts import Part
from lockstep.durable import new_file
from lockstep.errors import CheckpointDamaged, CheckpointError

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
_CHUNK_BYTES = 4 << 20
_HEADER_BYTES_MAX = 100_000_000  # the format's own limit
TOKENS_MAX = 8_000_000  # of JSON that is parsed at once
_SIZE_MAX = 2**63
_DIMS_MAX = 64
_FURTHER = "~~"  # between a path and a number, in the name of a second, third, ... piece of a tensor in one file


class Piece(NamedTuple):
    """A box of a tensor, as it is in a file."""

    path: str
    dtype: str  # in the format's words
    part: Part

    @classmethod
    def whole(cls, path: str, dtype: str, shape: tuple[int, ...]) -> Piece:
        """All of a tensor."""
        return cls(path, dtype, Part((0,) * len(shape), shape))

    @property
    def nbytes(self) -> int:
        """How much room its elements take."""
        return self.part.numel * DTYPES[self.dtype].itemsize


class Stored(NamedTuple):
    """A piece and its place in a file."""

    piece: Piece
    offset: int  # bytes from the start of the file


class FileRecord(NamedTuple):
    """What tells whether a file is the one that was written, and which of its pieces are."""

    bytes: int
    sha256: str
    crc32: tuple[int, ...]  # of the pieces' bytes, in the order of the file


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The format's name of `dtype`. Raises: CheckpointError where it has none."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{what} has dtype {dtype}, which safetensors files cannot hold: convert it first")
    return _NAMES[dtype]


def write_tensor_file(path: Path, pieces: Sequence[Piece], read: Callable[[int], Tensor]) -> FileRecord:
    """Write a new file of those of `pieces` that have elements, and make its bytes durable.

    `read(i)` gives the elements of `pieces[i]` when their turn comes, of its dtype and shape.
    Memory: one piece, where it is not contiguous on the CPU; else none.
    Raises: OSError, as where `path` is there already; CheckpointError for too many pieces. A part may then be there.
    """
    order = sorted((i for i, piece in enumerate(pieces) if piece.nbytes), key=lambda i: _order(pieces[i]))
    ordered = [pieces[i] for i in order]
    header = _header(ordered)
    if len(header) > _HEADER_BYTES_MAX or tokens_in(header) > TOKENS_MAX:
        raise CheckpointError(f"{path.name} would have {len(pieces)} pieces, too many for one file: use more ranks")
    digest, crc32 = hashlib.sha256(), []
    with new_file(path, buffering=_CHUNK_BYTES) as file:
        for block in (len(header).to_bytes(8, "little"), header):
            digest.update(block)
            file.write(block)
        for i in order:
            crc = 0
            data = bytes_of(read(i), pieces[i])
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]  # hashed and written while it is in the cache
                digest.update(chunk)
                crc = zlib.crc32(chunk, crc)
                file.write(chunk)
            crc32.append(crc)
    size = 8 + len(header) + sum(piece.nbytes for piece in pieces)
    return FileRecord(size, digest.hexdigest(), tuple(crc32))


def bytes_of(tensor: Tensor, piece: Piece) -> memoryview:
    """The elements of `tensor`, which is `piece`, as bytes. Memory: its own where it is contiguous on the CPU."""
    assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[piece.dtype], piece.part.shape), f"not {piece}"
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def read_header(read_at: Callable[[int, int], bytes], size: int, source: str) -> list[Stored]:
    """The pieces of a file of `size` bytes, in its order; `read_at(offset, count)` reads from it.

    Takes only what `write_tensor_file` writes, to the byte: nothing overlaps, repeats or is left over.
    Memory: at most about ten times the header, which has at most 100 MB.
    Raises: CheckpointDamaged, beginning with `source`.
    """
    try:
        raw = raw_header(read_at, size)
        pieces = _parsed(raw)
        if _header(pieces) != raw:
            raise ValueError("it is not written as this library writes it")
        begins = list(accumulate((piece.nbytes for piece in pieces), initial=8 + len(raw)))
        if begins[-1] != size:
            raise ValueError(f"its pieces end at byte {begins[-1]}, the file has {size}")
    except ValueError as error:
        raise CheckpointDamaged(f"{source}: its header is damaged: {error}") from error
    return list(map(Stored, pieces, begins))


def raw_header(read_at: Callable[[int, int], bytes], size: int) -> bytes:
    """The header of any safetensors file, unparsed. Raises: ValueError where there is none."""
    length = int.from_bytes(read_at(0, 8), "little") if size >= 8 else -1
    if not 2 <= length <= min(size - 8, _HEADER_BYTES_MAX):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return read_at(8, length)


def header_text(metadata: dict[str, str], named: Iterable[tuple[str, Piece]]) -> bytes:
    """The header of a file of these pieces, in the order of their data, filled up so that what follows is aligned."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, piece in named:
        begin, end = end, end + piece.nbytes
        header[name] = {"dtype": piece.dtype, "shape": piece.part.shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


def parse_json(text: str) -> Any:
    """`text` as JSON, in which no key is there twice, and every number is finite.

    Memory: bounded by the number of tokens, which is limited. Raises: ValueError.
    """
    if tokens_in(text.encode()) > TOKENS_MAX:
        raise ValueError(f"more than {TOKENS_MAX} entries")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def tokens_in(text: bytes) -> int:
    """Into at most how many objects JSON `text` is parsed; about 100 bytes of memory each."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def natural(value: Any, below: int = _SIZE_MAX) -> int:
    """`value`, if it is an integer from 0 up. Raises: ValueError."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{short(value)} is no integer from 0 to {below - 1}")
    return value


def shape_of(value: Any) -> tuple[int, ...]:
    """`value`, if it is a list of sizes whose product fits any machine. Raises: ValueError."""
    if type(value) is not list or len(value) > _DIMS_MAX:
        raise ValueError(f"{short(value)} is no shape")
    product = 8  # as bytes, of the widest elements
    for n in value:
        product *= max(1, natural(n))
        if product >= _SIZE_MAX:
            raise ValueError(f"the shape {short(value)} is too large")
    return tuple(value)


def checked_dtype(value: Any) -> str:
    """`value`, if it names a dtype. Raises: ValueError."""
    if type(value) is not str or value not in DTYPES:
        raise ValueError(f"{short(value)} is no dtype that is known")
    return value


def open_tensors(path: Path) -> Any:
    """A file of weights from elsewhere, as safetensors' `safe_open` gives it, for a `with` block. Follows links.

    Raises: CheckpointError where it is missing, cut off, or no safetensors file.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


# ------------------------------------------------------------------ the header


def _order(piece: Piece) -> tuple[int, str, tuple[int, ...]]:
    return -DTYPES[piece.dtype].itemsize, piece.path, piece.part.start


def _names(pieces: Sequence[Piece]) -> list[str]:
    """What pieces, in the order of their data, are called in the file: by the path, further ones of it `path~~1`, ...

    No path has two tildes in a row.
    """
    names: list[str] = []
    number = 0
    for index, piece in enumerate(pieces):
        number = number + 1 if index and pieces[index - 1].path == piece.path else 0
        names.append(f"{piece.path}{_FURTHER}{number}" if number else piece.path)
    return names


def _header(pieces: Sequence[Piece]) -> bytes:
    """The header of a file of `pieces`, which are in the order of their data."""
    names = _names(pieces)
    starts = {name: piece.part.start for name, piece in zip(names, pieces, strict=True) if any(piece.part.start)}
    metadata = {"starts": json.dumps(starts, separators=(",", ":"))} if starts else {}
    return header_text(metadata, zip(names, pieces, strict=True))


def _parsed(raw: bytes) -> list[Piece]:
    """What the header says of its pieces, without their offsets, which follow from it. Raises: ValueError."""
    header = parse_json(raw.decode("ascii"))
    if type(header) is not dict:
        raise ValueError("it is no JSON object")
    metadata = header.pop("__metadata__", {"starts": "{}"})
    if type(metadata) is not dict or metadata.keys() != {"starts"} or type(metadata["starts"]) is not str:
        raise ValueError("its metadata is not of a checkpoint")
    starts = parse_json(metadata["starts"])
    if type(starts) is not dict or not starts.keys() <= header.keys():
        raise ValueError("its starts are not of its pieces")
    pieces = [_piece(path, entry, starts.get(path)) for path, entry in header.items()]
    if any(_order(one) >= _order(other) for one, other in pairwise(pieces)):
        raise ValueError("its pieces are not in order")
    if list(header) != _names(pieces):
        raise ValueError("its pieces are not named by their paths")
    return pieces


def _piece(path: str, entry: Any, start: Any) -> Piece:
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{path[:200]!r} is not described by dtype, shape and data_offsets")
    shape = shape_of(entry["shape"])
    if 0 in shape:
        raise ValueError(f"{path[:200]!r} has no elements")
    begin = (0,) * len(shape) if start is None else shape_of(start)
    if len(begin) != len(shape):
        raise ValueError(f"{path[:200]!r} starts at {begin} and has the shape {shape}")
    return Piece(path.partition(_FURTHER)[0], checked_dtype(entry["dtype"]), Part(begin, shape))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
