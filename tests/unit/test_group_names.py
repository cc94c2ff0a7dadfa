"""The names that groups have in the flight record."""

from __future__ import annotations

from collections import Counter

from lockstep.observe.recording import name_of_part


def test_names_are_short_and_tell_groups_apart() -> None:
    groups = [tuple(range(0, 1000, step)) for step in (1, 2, 3)] + [
        (0, 5, 7, 100, 999, 1000, n) for n in range(1001, 1099)
    ]
    names = Counter(name_of_part(ranks, count) for ranks in groups for count in (1, 2, 1000))
    assert set(names.values()) == {1}
    assert all(len(name.encode()) <= 24 for name in names)
    assert name_of_part((3,), 1) == "ranks 3"
