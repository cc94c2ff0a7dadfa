"""What rank 0 of `lockstep train` says."""

from __future__ import annotations

from lockstep.train.words import shown


def test_what_a_model_writes_moves_no_cursor_and_rings_no_bell() -> None:
    written = "a b\tc\n\x1b[2Jd\x07\x00e\x0ef\x9b\né\x7fg"
    assert shown(written) == "  | a b\tc\n  | \ufffd[2Jd\ufffd\ufffde\ufffdf\ufffd\n  | é\ufffdg"
