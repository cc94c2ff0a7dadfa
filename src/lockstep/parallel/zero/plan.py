"""Which elements of which parameter a rank's optimizer steps: a pure function of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from lockstep.parallel.buckets import starts_of

ALIGNMENT = 16  # elements; a piece begins where a kernel's vectors begin, so its bits are those of the whole parameter


class Span(NamedTuple):
    """Elements [start, stop) of parameter `param`, counted as they lie in memory."""

    param: int
    start: int
    stop: int


@final
class FlatLayout:
    """Parameters one after the other in a flat buffer, which W ranks share in equal parts of `part` elements.

    Parameters and parts begin at multiples of ALIGNMENT; zeros lie between and at the end.

        parameters of 30 and 3 elements, 2 ranks:   a * 30, 2 zeros | b * 3, 29 zeros       rank 0 | rank 1
    """

    def __init__(self, numels: Sequence[int], world_size: int) -> None:
        self.numels = tuple(numels)
        self.starts, numel = starts_of([_round_up(n) for n in numels])
        self.part = _round_up(-(-numel // world_size))
        self.numel = self.part * world_size

    def spans(self, rank: int, longest: int | None = None) -> list[Span]:
        """What lies in `rank`'s part, in order; cut where a span would be longer than `longest`.

        A parameter without elements has an empty span on rank 0: its steps are counted too.
        """
        begin, end = rank * self.part, (rank + 1) * self.part
        found: list[Span] = []
        for param, (at, numel) in enumerate(zip(self.starts, self.numels, strict=True)):
            start, stop = max(begin - at, 0), min(end - at, numel)
            ranges = [(0, 0)] if numel == 0 and rank == 0 else cut(start, stop, longest)
            found += [Span(param, *each) for each in ranges]
        return found


def cut(start: int, stop: int, longest: int | None) -> list[tuple[int, int]]:
    """[start, stop) in consecutive ranges of at most `longest`; nothing where it is empty."""
    step = longest or max(stop - start, 1)
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]


def _round_up(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
