"""What a guard says, and what it does where it fails itself."""

from __future__ import annotations

import pytest

from lockstep.observe.voice import Voice


@pytest.fixture
def voice() -> Voice:
    return Voice(3, "", lambda rank: [])


def test_an_error_of_the_guard_is_said_once_and_goes_no_further(
    voice: Voice, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = 0
    for _ in range(3):
        with voice.part("a look"):
            raise ZeroDivisionError("by nothing")
        passed += 1
    said = capsys.readouterr().err
    assert passed == voice.failures == 3
    assert said.count("GUARD of rank 3: a look failed: ZeroDivisionError: by nothing (test_voice.py:") == 1


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_end_of_the_program_is_no_error_of_the_guard(
    voice: Voice, capsys: pytest.CaptureFixture[str], end: type[BaseException]
) -> None:
    with pytest.raises(end), voice.part("a look"):
        raise end
    assert voice.failures == 0
    assert capsys.readouterr().err == ""


def test_hooks_are_called_whatever_becomes_of_the_others(voice: Voice, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[object] = []

    def broken(*what: object) -> None:
        raise ValueError(what)

    voice.call([told.append, broken, told.append], 7)
    assert told == [7, 7]
    assert "its test_hooks_are_called_whatever_becomes_of_the_others.<locals>.broken failed" in capsys.readouterr().err
