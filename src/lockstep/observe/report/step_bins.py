"""Thousands of steps in a few hundred bins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple


class Bins(NamedTuple):
    """Steps in a row, cut into parts: part i is from `first[i]` to `last[i]`, both included."""

    first: tuple[int, ...]
    last: tuple[int, ...]

    def of(self, step: int) -> int:
        """The part that holds `step`, which is within."""
        return bisect_left(self.last, step)


def bins_of(first: int, ends: Iterable[int], most: int) -> Bins:
    """At most `most` parts of about equal width, none of which ends where no line of a record does.

    first: of all steps; ends: the last step of each line.
    """
    ordered = sorted(set(ends))
    if not ordered:
        return Bins((), ())
    parts = min(most, len(ordered))
    width = (ordered[-1] - first + 1) / parts
    targets = (first - 1 + round(width * part) for part in range(1, parts + 1))
    last = sorted({ordered[min(bisect_left(ordered, target), len(ordered) - 1)] for target in targets})
    return Bins((first, *(step + 1 for step in last[:-1])), tuple(last))
