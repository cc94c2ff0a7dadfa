"""Whatever part of the guard fails, it says so once, goes on with the rest, and looks again."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_sights import running
from watched_guard import Watched, failed, stopped

from lockstep.errors import CommError, PeerFailed, PeerLost
from lockstep.observe import account, diagnosis, divergence, lookout, training_findings, voice
from lockstep.observe.wording import Finding

PARTS: dict[str, tuple[Any, str]] = {
    "stack": (account.Motion, "look"),
    "facts": (account.Facts, "said"),
    "comparison": (account.Facts, "compare"),
    "record": (account.Account, "catch_up"),
    "status": (account.Account, "status"),
    "notes": (training_findings.Training, "notes"),
    "training": (training_findings.Training, "find_training"),
    "diagnosis": (lookout, "diagnose"),
    "groups": (divergence, "_compare"),
    "scene": (diagnosis, "Scene"),
    "sequel": (voice, "goes_on"),
    "evidence": (voice, "keep_evidence"),
}
ON_BOARD = ("tell", "sights", "announced")


def fails(*_: object, **__: object) -> Any:
    raise KeyError("an error of ours")


@pytest.fixture
def watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Watched]:
    made = Watched(tmp_path, capsys, evidence=str(tmp_path / "evidence"))
    yield made
    made.guard.close()


def heads(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("lockstep: ")]


@pytest.mark.parametrize("part", [*PARTS, *ON_BOARD])
def test_a_part_that_fails_is_said_once_and_the_rest_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    noted = list[Finding]()
    watched.guard.on_finding.append(noted.append)
    said = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(*PARTS.get(part, (watched.board, part)), fails)
        said += watched.sees(running(3)) + watched.sees(running(3))
        said += watched.sees(stopped()) + watched.sees(stopped(3))
    said += watched.sees(stopped(4)) + watched.sees(failed())
    assert sorted(heads(said)) == ["GUARD", "STOPPED", "STOPPED,"]
    assert any("KeyError: 'an error of ours'" in line and ".py:" in line for line in said)
    assert [one.kind for one in noted if one.kind == "guard"] == ["guard"]
    with pytest.raises(PeerFailed):  # and what it has found is raised
        watched.guard.raise_if_found()


def test_what_cannot_be_announced_is_said_and_raised(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched.board, "announce", fails)
    assert heads(watched.sees(failed())) == ["GUARD", "RAISED"]
    with pytest.raises(PeerFailed):
        watched.guard.raise_if_found()
    assert watched.sees(failed()) == []


def test_hooks_that_fail_keep_nobody_else_from_being_called(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    called = list[str]()
    guard = watched.guard
    for name, hooks in (("look", guard.before_look), ("end", guard.at_end), ("close", guard.before_close)):
        hooks += [fails, lambda name=name: called.append(name)]
    guard.on_finding[:] = [fails, lambda _: called.append("finding")]
    guard.aborts[:] = [fails, lambda _: called.append("abort")]
    assert heads(watched.sees(running(3))) == ["GUARD"]
    guard.give_up(ValueError())
    guard.finish()
    guard.end()
    guard.close()
    assert {"look", "finding", "abort", "end", "close"} <= {*called}
    assert capsys.readouterr().err == ""  # it was one error
    watched.guard.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO())])
def test_a_closed_output_silences_no_hook(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, stream: io.TextIOWrapper | None
) -> None:
    noted = list[Finding]()
    watched.guard.on_finding.append(noted.append)
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    watched.sees(failed())
    assert [one.kind for one in noted] == ["raised"]


def test_of_a_rank_whose_status_cannot_be_made_the_others_see_that_it_runs(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account.Motion, "look", fails)
    watched.sees(running(3))
    told = watched.board.told
    assert told is not None
    assert (told.rank, told.state, told.groups) == (0, "running", {})


def test_another_rank_looks_for_one_that_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one says what may pass; it must not be the blind one."""
    first, second = (Watched(tmp_path, capsys, me) for me in (0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(lookout, "diagnose", fails)
        assert heads(first.sees(stopped())) == ["GUARD"]
        first.sees(stopped())
    assert first.board.told is not None
    assert first.board.told.is_blind
    ranks = stopped()
    assert second.sees(ranks) == []
    ranks[0].status_fields["is_blind"] = True
    assert heads(second.sees(ranks)) == ["STOPPED"]
    first.sees(running(3))
    first.sees(running(3))
    assert not first.board.told.is_blind
    for one in (first, second):
        one.guard.close()


@pytest.mark.parametrize("call", ["lost", "cause_of"])
def test_the_error_of_an_operation_is_raised_though_its_cause_cannot_be_found(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error: Any = PeerLost("closed", 1) if call == "lost" else RuntimeError("Connection closed by peer [127.0.0.1]:1")
    monkeypatch.setattr(watched.board, "sights", fails)
    ask: Callable[[Any], BaseException] = getattr(watched.guard, call)
    assert ask(error) is error or isinstance(ask(error), CommError)
    assert heads(capsys.readouterr().err.splitlines())[:1] == ["GUARD"]


def test_the_thread_outlives_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched(tmp_path, capsys)
    looks = list[int]()

    def look(**_: object) -> None:
        looks.append(1)
        if len(looks) >= 3:
            watched.guard._stop.set()
        raise KeyError("an error of ours")

    watched.guard._period_s = 0.001
    watched.guard._lookout.look = look  # type: ignore[method-assign]
    watched.guard.start()
    watched.guard._thread.join()
    watched.guard.close()
    assert len(looks) == 3
    assert heads(capsys.readouterr().err.splitlines()) == ["GUARD"]
