"""The free list against a list of pages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.shm.free_list import FreeList

GRAIN = 16
PAGES = 24

# take as many bytes (0: give the oldest part back, 1: the newest, 2: one in the middle)
_calls = st.lists(st.one_of(st.integers(3, 9 * GRAIN), st.integers(0, 2)), max_size=60)


def first_fit(pages: list[int | None], count: int) -> int | None:
    """The first page of the lowest hole that is large enough."""
    for start in range(PAGES - count + 1):
        if all(page is None for page in pages[start : start + count]):
            return start
    return None


@settings(derandomize=True, database=None)
@given(_calls)
def test_against_a_list_of_pages(calls: list[int]) -> None:
    free = FreeList(PAGES * GRAIN + GRAIN - 1, GRAIN)  # what is no whole grain is not given out
    pages: list[int | None] = [None] * PAGES
    parts: list[int] = []  # the starts, in order of taking
    for call in calls:
        if call > 2:
            count = -(-call // GRAIN)
            expected = first_fit(pages, count)
            start = free.take(call)
            assert start == (None if expected is None else expected * GRAIN)
            if start is not None:
                parts.append(start)
                pages[start // GRAIN : start // GRAIN + count] = [start] * count
                assert free.size_of(start) == count * GRAIN
        elif parts:
            start = parts.pop((0, -1, len(parts) // 2)[call])
            free.give_back(start)
            pages = [None if page == start else page for page in pages]
        assert sum(free._used.values()) == GRAIN * sum(page is not None for page in pages)
    for start in parts:
        free.give_back(start)
    assert not free._used
    assert free.take(PAGES * GRAIN) == 0  # all holes have become one again


def test_nothing_larger_than_all() -> None:
    free = FreeList(100, 10)
    assert free.take(101) is None
    assert free.take(100) == 0
    assert free.take(1) is None
    free.give_back(0)
    assert FreeList(9, 10).take(1) is None
