"""Which samples an epoch lacks, and which it used too often, by the log of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np


@final
@dataclass(frozen=True)
class Differences:
    """Which samples an epoch lacks, and which it used more often than it should."""

    missing: tuple[int, ...]
    extra: tuple[int, ...]  # one entry per use too many

    def __str__(self) -> str:
        if not (self.missing or self.extra):
            return "every sample exactly once"
        return f"{len(self.missing)} missing{_some(self.missing)}, {len(self.extra)} too often{_some(self.extra)}"


def differences(
    ids: Iterable[int], length: int, repeated: Sequence[int] = (), dropped: Sequence[int] = ()
) -> Differences:
    """Compare the `ids` of an epoch, as the log of the run has them, with each of [0, length) once.

    repeated, dropped: what the tail policy allows.
    Memory: 8 * length bytes.
    """
    used = np.asarray(list(ids), dtype=np.int64)
    outside = used[(used < 0) | (used >= length)]
    counts = np.bincount(used[(used >= 0) & (used < length)], minlength=length)
    counts -= np.bincount(np.asarray(repeated, dtype=np.int64), minlength=length)
    counts += np.bincount(np.asarray(dropped, dtype=np.int64), minlength=length)
    extra = np.repeat(np.arange(length), np.maximum(counts - 1, 0))
    missing = np.repeat(np.arange(length), np.maximum(1 - counts, 0))
    return Differences(tuple(missing.tolist()), tuple(np.concatenate([extra, outside]).tolist()))


def _some(ids: Sequence[int], most: int = 8) -> str:
    return f" ({', '.join(map(str, ids[:most]))}{', ...' if len(ids) > most else ''})" if ids else ""
