"""A permutation of [0, n) that is computed, not stored: O(1) memory and O(1) seek, for datasets too large to shuffle.

A Feistel network mixes the bits of a position with a key. Each round can be undone, so it maps the 2**bits numbers one
to one. A result outside [0, n) is mixed again until it falls inside (cycle walking): as 2**bits < 2n, that is less than
one repetition on average, and it stays one to one, because it only skips members of the larger permutation's cycles.

Source: Luby and Rackoff 1988 (Feistel networks as permutations); Black and Rogaway 2002, "Ciphers with Arbitrary Finite
Domains" (cycle walking); Steele, Lea and Flood 2014 (splitmix64, the round function). Not meant to keep secrets.
"""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError
from lockstep.observe.tally import scramble

MAX_LENGTH = 2**62

# Chosen by chi-square over all orders of 5 samples and over neighbours: 8 rounds on 6 bits or more are even, 4 rounds
# or 3 bits are not.
_ROUNDS = 8
_MIN_BITS = 6

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@final
class KeyedPermutation:
    """Position -> sample, one to one on [0, length), for one (seed, epoch). The same on every machine and version."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ConfigError(f"a keyed order has 1 to 2**62 samples, not {length}")
        bits = max(_MIN_BITS, (length - 1).bit_length())
        high_bits = bits // 2
        self.length = length
        self._low_bits = np.uint64(bits - high_bits)
        self._low_mask = np.uint64(2 ** (bits - high_bits) - 1)
        self._high_mask = np.uint64(2**high_bits - 1)
        self._keys = _round_keys(seed, epoch)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Shapes: any -> the same. Every position must be in [0, length)."""
        values = self._mix(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            again = self._mix(values[outside])
            values[outside] = again
            outside = outside[again >= self.length]
        return values.astype(np.int64)

    def _mix(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low_mask
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            high ^= scramble(low + first) & self._high_mask
            low ^= scramble(high + second) & self._low_mask
        return (high << self._low_bits) | low


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    """One 64-bit key per round. Seed and epoch enter one after the other: (0, 1) and (1, 0) are different orders."""
    state = np.zeros(1, np.uint64)
    for number in (seed, epoch):
        state = scramble(state + np.uint64((number + _GOLDEN) & _WORD))
    steps = np.array([(step * _GOLDEN) & _WORD for step in range(1, _ROUNDS + 1)], np.uint64)
    return list(scramble(state + steps))
