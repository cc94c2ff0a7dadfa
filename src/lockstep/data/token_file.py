"""Token files: a header of 256 int32 (magic, version, count, zeros), then the tokens, little endian.

The two kinds are those of llm.c and modded-nanogpt, so their shards can be read here and ours there: 16-bit tokens have
magic 20240520 and version 1, 32-bit tokens magic 20240801 and version 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError, DataError

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_HEADER_BYTES = 256 * 4
_MAX_COUNT = 2**31 - 1  # the count is an int32
_KINDS: dict[tuple[int, int], str] = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) -> dtype


def token_dtype(vocab_size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The smaller of the two token types that holds ids below `vocab_size`."""
    if not 1 <= vocab_size <= 2**32:
        raise ConfigError(f"vocab_size={vocab_size}: token ids are 0 to 2**32 - 1")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_tokens(file: BinaryIO, chunks: Iterable[npt.NDArray[np.integer]], vocab_size: int) -> int:
    """Write `chunks` one after the other as one token file; returns how many tokens there are.

    `file` must be seekable: the header is written last, so a file that was not finished is not taken for a whole one.
    Memory: one chunk.
    Raises: DataError for an id that is not below `vocab_size`, and above 2**31 - 1 tokens.
    """
    dtype = token_dtype(vocab_size)
    count = 0
    file.write(bytes(_HEADER_BYTES))
    for chunk in chunks:
        if chunk.size and (chunk.min() < 0 or chunk.max() >= vocab_size):
            raise DataError(f"token ids {chunk.min()} to {chunk.max()} do not fit a vocabulary of {vocab_size}")
        count += chunk.size
        if count > _MAX_COUNT:
            raise DataError(f"a token file holds at most {_MAX_COUNT} tokens: write several files")
        file.write(chunk.astype(dtype, copy=False).tobytes())
    header = np.zeros(256, dtype="<i4")
    magic, version = next(key for key, name in _KINDS.items() if np.dtype(name) == dtype)
    header[:3] = magic, version, count
    file.seek(0)
    file.write(header.tobytes())
    return count


def read_tokens(path: Path) -> Tokens:
    """The tokens in `path`, mapped and not read: only what is used is loaded, and processes share it.

    Raises: DataError where the file is missing, empty, truncated, or no token file.
    """
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            header = np.frombuffer(file.read(_HEADER_BYTES), dtype="u1")
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}") from error
    if header.size < _HEADER_BYTES:
        raise DataError(f"{path} has {nbytes} bytes, less than the header of a token file: it is truncated")
    magic, version, count = (int(value) for value in header.view("<i4")[:3])
    if (magic, version) not in _KINDS:
        raise DataError(
            f"{path} is no token file, or was not finished: it begins with {magic}, {version} instead of "
            f"{' or '.join(f'{m}, {v}' for m, v in _KINDS)}"
        )
    dtype = np.dtype(_KINDS[magic, version])
    expected = _HEADER_BYTES + count * dtype.itemsize
    if count < 1 or nbytes != expected:
        raise DataError(
            f"{path} is damaged: its header says {count} tokens, which makes {expected} bytes, but it has {nbytes}"
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES)
