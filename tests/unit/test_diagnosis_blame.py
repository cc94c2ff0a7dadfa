"""Whose fault it is where the nearest evidence points elsewhere: to the transport, a waiting rank, the next line."""

from __future__ import annotations

import pytest
from rank_sights import REDUCE, PaperRank, found_in, world

from lockstep.observe.scene import message_text

OTHER = "all_reduce float32 [9] max"


def asleep_after(start: str, to: int = 0) -> list[PaperRank]:
    """Rank 1 has started something that it has not waited for, and stands still elsewhere; the others wait for it."""
    ranks = world(3)
    for one in ranks:
        if start == "async" or one.rank == 1:
            one.open.add(one.call(OTHER, "train.py:3 f") if start == "async" else one.message(start, "train.py:3 f"))
        if one.rank == 1:
            one.is_at("train.py:6 f", unmoved_s=40)
            one.open_s = 40
        else:
            one.waits(one.call(REDUCE, "train.py:7 f"), 40)
    return ranks


@pytest.mark.parametrize("start", ["async", message_text("send", "float32 [4]", 0, 3)])
def test_who_stands_elsewhere_is_blamed_and_not_the_transport_nor_who_waits(start: str) -> None:
    """Not kept busy by a collective that all have come to, nor by a send to one that waits for it."""
    finding = found_in(asleep_after(start))
    assert (finding.kind, finding.culprits) == ("hang", (1,)), finding.text
    assert "rank 1 is not there: at train.py:6 f" in finding.text


def test_of_two_orders_of_groups_that_of_most_is_right() -> None:
    """Rank 1 has left out a collective of ranks 0 to 3, and gone on to one of all five."""
    ranks = world(5)
    for one in ranks:
        members = (0, 1, 2, 3)
        if one.rank in members:
            one.group("few", members)
        waits_in_few = one.rank in members and one.rank != 1
        one.waits(one.call(group="few" if waits_in_few else "world", site=f"train.py:{7 + waits_in_few} f"), 2.6)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("cycle", (1,)), finding.text
    assert finding.text.splitlines()[0].endswith("rank 0 -> rank 1 -> rank 0.  Culprit: rank 1")


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", ["skipped", "alone issued"])
def test_of_equal_calls_the_one_that_was_left_out_or_put_in_is_named(fault: str, size: int, guilty: int) -> None:
    """By the lines that used to meet: what they say differs only later, where both are stuck."""
    lines = ["train.py:3 f", "train.py:5 f", "train.py:6 f"]
    ranks = world(size)
    for step in range(3):
        for one in ranks:
            odd = step == 2 and one.rank == guilty
            mine = {"skipped": lines[1:], "alone issued": ["train.py:2 f", *lines]}[fault] if odd else lines
            for line in mine:
                one.call(REDUCE, line)
            one.waits(one.call(OTHER, "train.py:8 f"), 0.6)
            if step < 2:
                one.open.clear()
                one.step += 1
    finding = found_in(ranks)
    assert finding.kind == "mismatch"
    assert guilty in finding.culprits
    line = 3 if fault == "skipped" else 2
    assert f"rank {guilty} {fault} {REDUCE} at train.py:{line} f" in finding.text, finding.text
