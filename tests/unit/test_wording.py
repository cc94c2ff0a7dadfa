"""What a finding looks like, whatever it is about."""

from __future__ import annotations

from lockstep.observe.scene import Limits, Scene
from lockstep.observe.status import Sight, Status
from lockstep.observe.wording import COLUMNS, LINES, compose

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
