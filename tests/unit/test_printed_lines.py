"""Lines of a run that have no place to go, and those that nobody reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.words import printing, say


def test_words_that_nobody_reads_any_more_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        say("stopping")
        say("stopped")


def _full() -> TextIO:
    return open("/dev/full", "w")


def _closed_terminal() -> TextIO:
    ours, theirs = os.openpty()
    os.close(ours)
    return os.fdopen(theirs, "w")


def _without_reader() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


@pytest.mark.parametrize(
    ("made", "why"),
    [(_full, "No space left on device"), (_closed_terminal, "Input/output error")],
    ids=["full", "gone"],
)
def test_run_goes_on_where_its_lines_have_no_place_and_says_so_once(
    made: Callable[[], TextIO], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with made() as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        for step in range(3):
            with printing():
                print(f"step {step}")
    assert capsys.readouterr().err == f"lockstep: nothing is printed any more: {why}; the run goes on\n"


def test_run_ends_where_nobody_reads_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _without_reader() as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(ConfigError, match=r"^the reader of what is printed has gone, .*> FILE`"), printing():
            print("step 1")
    assert capsys.readouterr().err == "", "the error says it"
