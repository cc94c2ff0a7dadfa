"""Which parts of a range are in use: first fit, neighbours merge. Pure; knows nothing of memory."""

from __future__ import annotations

import bisect
from typing import final


@final
class FreeList:
    """The free parts of [0, size), in units of `grain` bytes."""

    def __init__(self, size: int, grain: int) -> None:
        self._grain = grain
        self._starts = [0]  # of the free parts, ascending; no two touch
        self._ends = [size // grain * grain]
        self._used: dict[int, int] = {}  # start -> length

    def take(self, nbytes: int) -> int | None:
        """The start of a part of at least `nbytes`; None where no free part is as large."""
        length = -(-nbytes // self._grain) * self._grain
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                if end - start == length:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] += length
                self._used[start] = length
                return start
        return None

    def size_of(self, start: int) -> int:
        """Bytes of the part that `take` gave."""
        return self._used[start]

    def give_back(self, start: int) -> None:
        """Free what `take` gave. A second time is our own error."""
        end = start + self._used.pop(start)
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:  # the free part behind it begins there
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == start:  # the free part before it ends here
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
