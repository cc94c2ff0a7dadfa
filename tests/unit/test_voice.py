"""What a guard says, and what it does where it fails itself."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.status import Sight, Status
from lockstep.observe.voice import Voice
from lockstep.observe.wording import Finding


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


@pytest.mark.parametrize("is_certain", [True, False])
@pytest.mark.parametrize("why", ["", "Not a directory", "No space left on device"])
def test_a_finding_names_a_place_for_its_evidence_that_there_is_or_says_why_there_is_none(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    is_certain: bool,
) -> None:
    folder = tmp_path / "runs" / "then"
    if why == "Not a directory":
        (tmp_path / "runs").touch()
    elif why:

        def full(**_: Any) -> Any:
            raise OSError(errno.ENOSPC, why)

        monkeypatch.setattr(tempfile, "TemporaryFile", full)
    voice = Voice(0, str(folder), lambda rank: [])
    text = f"lockstep: HANG in step 4.\n  rank 1 is not there\nEvidence: {folder}"
    told = Finding("hang", (1,), text, is_certain, "hang:1")
    heard: list[Finding] = []
    voice.on_finding.append(heard.append)
    found = voice.marked(told) if is_certain else told
    voice.say_with_evidence(found, {1: Sight(Status(1, 2, 7, "host"), 0.0, is_gone=False)})
    end = f"No evidence could be kept in {folder}: {why}" if why else f"Evidence: {folder}"
    said = f"lockstep: HANG in step 4.\n  rank 1 is not there\n{end}"
    assert capsys.readouterr().err == said + "\n"
    assert [one.text for one in heard] == [said]
    assert found.text == (said if is_certain else text)
    assert why or (folder / "finding.txt").exists()
