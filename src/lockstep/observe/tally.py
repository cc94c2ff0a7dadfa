"""Sets of samples as sums of hashes: 24 bytes say which were used, whoever used which when. See `data.coverage`.

Source: Clarke, Devadas, van Dijk, Gassend and Suh 2003, "Incremental Multiset Hash Functions" (additive hashes);
Steele, Lea and Flood 2014 (splitmix64).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

DIGEST_BYTES = 24
BINS = 64  # of the ids of an epoch, at most, in which samples are counted

_COUNT_BYTES = 8
_WORD, _SUM = 1 << 64, 1 << 128
_LENGTH_MAX = 1 << 24  # that are hashed, in a second, for a note only
CHUNK = 1 << 14  # ids hashed at a time: their words stay in the processor's cache
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_KEYS = np.uint64(0x6C6F636B73746570), np.uint64(0xD1B54A32D192ED03)  # of the low and of the high word
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Ids = Sequence[int] | npt.NDArray[np.int64]


@final
@dataclass(frozen=True)
class Tally:
    """How many samples, and the sum of their hashes. Tallies of parts add up to the tally of the whole."""

    count: int = 0
    total: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, (self.total + other.total) % _SUM)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.count - other.count, (self.total - other.total) % _SUM)

    def digest(self) -> bytes:
        """Shapes: 24 bytes, the count first, little-endian."""
        return (self.count % _WORD).to_bytes(_COUNT_BYTES, "little") + self.total.to_bytes(16, "little")


def tally_of(ids: Ids) -> Tally:
    """The tally of `ids`, each counted as often as it is there. About 20 million a second."""
    words = np.asarray(ids, dtype=np.int64).astype(np.uint64)
    total = sum(_sum_of_hashes(words[first : first + CHUNK]) for first in range(0, len(words), CHUNK))
    return Tally(len(words), total % _SUM)


@lru_cache(maxsize=16)
def whole_tally(length: int) -> Tally:
    """The tally of [0, length), each once: what a complete epoch has."""
    parts = (np.arange(first, min(first + CHUNK, length)) for first in range(0, length, CHUNK))
    return sum((tally_of(part) for part in parts), start=Tally())


def tally_from(digest: bytes) -> Tally:
    """The tally whose digest this is. Raises: DataError for another number of bytes."""
    if len(digest) != DIGEST_BYTES:
        raise DataError(f"a coverage digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return Tally(int.from_bytes(digest[:_COUNT_BYTES], "little"), int.from_bytes(digest[_COUNT_BYTES:], "little"))


def _sum_of_hashes(words: npt.NDArray[np.uint64]) -> int:
    low, high = (scramble(scramble(words * GOLDEN + key)) for key in _KEYS)
    # The low words' sum carries into the high ones: halves of 32 bits add up without loss.
    halves = int((low & np.uint64(0xFFFFFFFF)).sum()) + (int((low >> np.uint64(32)).sum()) << 32)
    return halves + (int(high.sum()) << 64)


def scramble(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64, in place; arithmetic is modulo 2**64."""
    words ^= words >> _SHIFTS[0]
    words *= _FACTORS[0]
    words ^= words >> _SHIFTS[1]
    words *= _FACTORS[1]
    words ^= words >> _SHIFTS[2]
    return words


def bins_of(ids: Ids, length: int) -> npt.NDArray[np.int64]:
    """How many of `ids` lie in each of at most BINS equal parts of [0, length). Shapes: [min(BINS, length)]."""
    bins = max(1, min(BINS, length))
    parts = np.asarray(ids, dtype=np.int64) * bins // max(1, length)
    return np.bincount(np.clip(parts, 0, bins - 1), minlength=bins)


def coverage_fields(length: int, own: Tally, bins: npt.NDArray[np.int64]) -> dict[str, Any]:
    """What a note of a run says of the samples that one rank has used of an epoch."""
    whole = whole_tally(length).digest().hex() if length <= _LENGTH_MAX else ""
    digest = own.digest().hex()
    return {"length": length, "samples": own.count, "digest": digest, "whole": whole, "bins": bins.tolist()}
