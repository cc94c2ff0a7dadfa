"""The words of calls by their line: which lines are remembered, how many, and that none is taken for another."""

from __future__ import annotations

import sys
import weakref
from types import CodeType

import pytest

from lockstep.observe import line_words as module
from lockstep.observe.call_site import call_site
from lockstep.observe.flight import Words
from lockstep.observe.line_words import LineWords


def _run(file: str, known: LineWords) -> CodeType:
    """A new line in `file` makes a call."""
    code = compile("learn(known)", file, "exec")
    exec(code, {"learn": _learn, "known": known})
    return code


def _learn(known: LineWords, seen_as: str = "") -> Words:
    """What a call from the line that calls this one says. seen_as: another line, where a layer stands between."""
    frame, site = sys._getframe(1), seen_as or call_site(2)
    words = known.of((site, "barrier"), lambda: "barrier")
    known.learn((id(frame.f_code), frame.f_lasti, "barrier"), frame, site, words)
    return words


def test_a_line_of_the_users_is_remembered_with_its_words() -> None:
    known = LineWords("world")
    code = _run("train.py", known)
    ((line, words),) = known.of_lines.items()
    assert (line[0], line[2]) == (id(code), "barrier")
    assert [*known.of_sites.values()] == [words]


def test_a_line_that_leads_to_other_lines_is_not() -> None:
    known = LineWords("world")
    _learn(known, "another.py:7 step")
    _run(module.__file__, known)  # lockstep's own, to which any line may lead
    assert not known.of_lines
    assert len(known.of_sites) == 2


def test_the_code_of_a_remembered_line_lives_as_long_as_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    known, codes = LineWords("world"), list[weakref.ref[CodeType]]()
    for _ in range(5):
        code = _run("train.py", known)
        codes.append(weakref.ref(code))
        assert id(code) in {line[0] for line in known.of_lines}
        del code
        module.SITES.clear()  # which keeps code too
        alive = {id(code) for code in (one() for one in codes) if code is not None}
        assert {line[0] for line in known.of_lines} <= alive, "an id may be that of other code by now"
        assert 0 < len(known.of_lines) <= 2


def test_words_are_kept_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    known = LineWords("world")
    for number in range(5):
        known.of(("train.py:1 step", number), lambda: "barrier")
        assert 0 < len(known.of_sites) <= 2
