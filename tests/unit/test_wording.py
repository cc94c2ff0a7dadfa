"""What a finding looks like, whatever it is about."""

from __future__ import annotations

import pytest

from lockstep.observe.flight import Record
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.status import Sight, Status
from lockstep.observe.wording import COLUMNS, LINES, compose, stacks, whereabouts

SCENE = Scene(0, {0: Sight(Status(0, 1, 4711, "b"), 0.0, is_gone=False)}, lambda _: [], Limits())


def test_a_path_is_not_broken_at_its_hyphens() -> None:
    """To be copied, and to be searched for."""
    path = "/scratch/of-some-body/" + "run-" * 15 + "b/checkpoint.pt"
    text = compose(SCENE, "data", "", "SAVE.", (), [f"ranks 0, 1 write the same file {path}: the last one wins."]).text
    assert f" {path}:" in text
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_what_has_no_room_is_counted_and_a_word_without_end_is_cut() -> None:
    text = compose(SCENE, "data", "", "DATA.", (), ["x" * 300, *map(str, range(20))], fix="y" * 300).text
    assert len(text.splitlines()) == LINES
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "... and " in text


@pytest.mark.parametrize(
    ("stood_step", "last_step", "seen", "recorded"),
    [
        (0, 0, "in step 1", "recorded last: barrier #3 of group world, t.py:9, in step 1"),
        (0, 24, "in step 1", "issued last: barrier #3 of group world, t.py:9"),
        (25, 25, "in step 26", "issued last: barrier #3 of group world, t.py:9"),
    ],
)
def test_where_a_rank_stood_before_is_not_said_of_its_end(
    stood_step: int, last_step: int, seen: str, recorded: str
) -> None:
    """As of one that was killed: its guard has looked at it for the last time before that, in step 1 or in step 26."""
    last = Record(3, 3, last_step, 1, 2, 7, False, "world", "barrier", "t.py:9", "")
    status = Status(0, 1, 4711, "b", step=25, stood_step=stood_step, last=last, stack=("t.py:1 start",))
    scene = Scene(0, {0: Sight(status, 0.3, is_gone=True)}, lambda _: [], Limits())
    where = whereabouts(scene, {0: "was last seen"})
    assert where == [f"rank 0 was last seen {seen}", f"  {recorded}"]
    assert stacks(scene, [0]) == []
