"""`lockstep puzzle` without processes: on how many ranks a file is run, what is said of it, what is remembered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import lockstep.cli.puzzle as command
from lockstep.errors import ConfigError
from lockstep.learn.events import Event
from lockstep.learn.program import Played
from lockstep.learn.puzzle import problems
from lockstep.puzzles import PUZZLES


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The worlds in which puzzle 4, which is begun, was played; a file that says "wrong" is wrong on three ranks."""
    found: list[int] = []

    def play(path: Path, world_size: int, folder: Path, more: Mapping[str, str], *, limit_s: float) -> Played:
        assert limit_s <= 60
        found.append(world_size)
        is_wrong = world_size == 3 and "wrong" in path.read_text()
        answers = [tuple(map(float, PUZZLES[3].answer(rank, world_size))) for rank in range(world_size)]
        shown = [
            [Event(rank, "show", name="answer", after=() if is_wrong else answers[rank])] for rank in range(world_size)
        ]
        return Played(shown, 0, "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "play", play)
    assert command.puzzle(["4"]) == 0
    assert found == [], "the first time there is only a file to be filled in"
    return found


def test_a_right_file_is_run_on_all_ranks_and_remembered(worlds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.puzzle(["4"]) == 0
    assert worlds == [2, 3, 4]
    assert "solved. Next: `lockstep puzzle 1`" in capsys.readouterr().out
    command.puzzle([])
    assert "x  4" in capsys.readouterr().out


def test_a_wrong_file_is_run_until_it_fails(worlds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("puzzles/p04_sampler.py")
    path.write_text("wrong")
    assert command.puzzle(["4"]) == 1
    assert worlds == [2, 3]
    said = capsys.readouterr().out
    assert "with 3 ranks, rank 0 has the answer []; [0, 3, 6, 9] is right" in said
    assert "not yet. `lockstep puzzle 4 --hint` has 2" in said
    assert command.puzzle(["4", "--hint", "9"]) == 0
    assert capsys.readouterr().out.splitlines() == list(PUZZLES[3].hints)
    with pytest.raises(ConfigError, match="--hint 0: they are numbered 1 to 2"):
        command.puzzle(["4", "--hint", "0"])
    assert command.puzzle(["4", "--again"]) == 0
    assert path.with_suffix(".py.before").read_text() == "wrong"
    assert "# your turn" in path.read_text()


def test_what_the_guard_said_is_shown_from_its_first_line() -> None:
    report = ["lockstep: DEADLOCK in step 1: rank 0 -> rank 1 -> rank 0", *(f"  line {at}" for at in range(2, 12))]
    traces = [f"[rank{rank}]: line {at}" for rank in range(2) for at in range(9)]
    said = "\n".join(["lockstep: run begins", *report, *traces])
    assert problems(PUZZLES[0], Played([], 1, said), 2)[1:] == [*report, *traces[:3]]
    assert problems(PUZZLES[0], Played([], 1, "\n".join(traces)), 2)[1:] == traces[-14:]
