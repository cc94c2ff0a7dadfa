"""What a rank that ends tells the others, whatever its program makes of the error itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lockstep.observe import process_guard
from lockstep.observe.last_words import last_words


class Told:
    """A guard's place."""

    words: Any = None

    def end(self, error: BaseException | None = None) -> None:
        self.words = None if error is None else last_words(error)

    def rest(self, patience_s: float) -> None:
        """It has no thread."""


def test_who_leaves_because_of_an_error_is_quoted_with_that() -> None:
    def program() -> None:
        try:
            raise ValueError("label 7")
        except ValueError:
            sys.exit(1)

    with pytest.raises(SystemExit) as left:
        program()
    words = last_words(left.value)
    assert (words.kind, words.message) == ("ValueError", "label 7")
    assert "test_last_words.py:" in words.where


def test_who_leaves_for_no_error_is_quoted_with_its_code() -> None:
    assert last_words(SystemExit(3)).message == "3"


def test_an_error_that_another_excepthook_has_shown_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Told()
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setattr(sys, "last_value", ValueError("label 7"), raising=False)
    process_guard._end()
    assert guard.words.kind == "ValueError"
