"""What a rank that ends tells the others, whatever its program makes of the error itself."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from lockstep.observe import process_guard
from lockstep.observe.facts import Facts
from lockstep.observe.last_words import last_words
from lockstep.observe.wording import THREAD


class Told:
    """A guard's place."""

    words: Any = None

    def __init__(self) -> None:
        self.facts = Facts()

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


def test_a_thread_that_an_error_ends_is_told_of_and_its_trace_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise ValueError("label 7")

    guard = Told()
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setattr(process_guard, "_before_in_thread", [threading.__excepthook__])
    monkeypatch.setattr(threading, "excepthook", process_guard._thread_ended)
    for end in (work, sys.exit):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    (text,) = guard.facts.said()[THREAD].values()
    assert text.startswith("ValueError: label 7, at ")
    assert "test_last_words.py:" in text
    assert capsys.readouterr().err.count("Traceback") == 1
