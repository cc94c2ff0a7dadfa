"""Every lesson and every puzzle's solution on real processes: what each rank did is the text beside this file."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lesson_trace import trace
from lockstep.comm.communicator import Communicator
from lockstep.learn.events import Event, read_events
from lockstep.learn.program import Played, title_of
from lockstep.learn.puzzle import Puzzle, problems, with_hole
from lockstep.learn.stage import Stage
from lockstep.lessons import KILLED, LESSONS
from lockstep.puzzles import PUZZLES
from lockstep.testing.worlds import run_processes

GOLDEN = Path(__file__).with_name("lessons")
BY_COMMAND = {"checkpoint": (2, 3, 4), "pitfalls": (2,)}  # processes die in them
SOLVED = {puzzle.name: puzzle for puzzle in PUZZLES}


def play(comm: Communicator, module: str, folder: str) -> list[dict[str, object]]:
    """The events of one rank."""
    events: list[Event] = []
    program = import_module(module)
    name = module.rpartition(".")[2]
    lesson = getattr(program, name[len("p01_") :] if name in SOLVED else name)
    lesson(Stage(comm, events.append, Path(folder)))
    return [event.to_json() for event in events]


def played(module: str, world_size: int, folder: Path) -> list[list[Event]]:
    ranks = run_processes(world_size, play, module, str(folder))
    return [[Event.from_json(event) for event in events] for events in ranks]


@pytest.mark.parametrize("name", [name for name in LESSONS if name not in BY_COMMAND])
def test_lesson(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """`pytest tests/golden/test_lessons.py --rewrite-golden` writes the texts anew; then look at the diff."""
    compare(f"lockstep.lessons.{name}", tmp_path, (2, 3, 4), request)


@pytest.mark.parametrize("name", SOLVED)
def test_solution(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for world_size, ranks in compare(f"lockstep.puzzles.{name}", tmp_path, SOLVED[name].ranks, request).items():
        assert problems(SOLVED[name], Played(ranks, 0, ""), world_size) == []


def compare(
    module: str, folder: Path, world_sizes: tuple[int, ...], request: pytest.FixtureRequest
) -> dict[int, list[list[Event]]]:
    runs = {world_size: played(module, world_size, folder) for world_size in world_sizes}
    text = "".join(f"--- {world_size} ranks\n{trace(ranks)}" for world_size, ranks in runs.items())
    compare_text(module.rpartition(".")[2], text, request)
    return runs


def compare_text(name: str, text: str, request: pytest.FixtureRequest) -> None:
    golden = GOLDEN / f"{name}.txt"
    if request.config.getoption("--rewrite-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


VARYING = (
    (r"after \d+\.\d s", "after T s"),
    (r"pid \d+", "pid P"),
    (r"(was killed by SIGKILL; ).*", r"\1.."),  # the others are ended, or are quicker
    (r"host [^,]+,", "host H,"),
    (r"/\S*/", "../"),
    (r"\.py:\d+: UserWarning", ".py: UserWarning"),
    (r"pair\.cc:\d+\] .*?Connection \w+ by peer.*", "pair.cc] Connection closed by peer .."),  # or reset, as it comes
    (r"(waiting for|CollectiveTimeout:) ranks 1, 2 ", r"\1 rank 2 "),  # the former may come late
    (r"127\.0\.0\.1:\d+,? .*", "ADDRESS .."),
    (r"rank 1 waits for rank 0 at ADDRESS \.\.\n +rank 0 +(?=waiting for)", ""),  # as it may, before
    (r"ank \d has (inconsistent )?\d params", r"ank R has \1N params"),
)


@pytest.mark.slow
@pytest.mark.limit_s(700)
@pytest.mark.parametrize("name", BY_COMMAND)
def test_lesson_in_which_processes_die(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """What the launcher says of their ends belongs to the text; times, processes and paths do not."""
    text = ""
    for world_size in BY_COMMAND[name]:
        words = [sys.executable, "-m", "lockstep", "learn", name, "-n", str(world_size), "--auto"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=650)
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout.partition("the processes said:\n")[2].partition("\nto play it back")[0]
        events = trace(read_events(tmp_path / f"runs/learn-{name}"))
        text += f"--- {world_size} ranks\n{events}{said if name in KILLED else ''}"
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    compare_text(name, text, request)


def test_screens_are_the_same_on_every_rank(tmp_path: Path) -> None:
    ranks = played("lockstep.lessons.send_receive", 3, tmp_path)
    titles = [[event.name for event in events if event.kind == "screen"] for events in ranks]
    assert titles[0]
    assert titles[0] == titles[1] == titles[2]


def test_every_lesson_is_short_and_says_what_it_is_about() -> None:
    for name in LESSONS:
        path = Path(str(import_module(f"lockstep.lessons.{name}").__file__))
        assert 10 <= len(path.read_text().splitlines()) <= 60, name
        assert title_of(path).endswith("."), name
        assert len(title_of(path)) <= 55, f"{name}: `lockstep learn` has 80 columns"


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)
def test_a_hole_is_a_program_that_does_not_solve_it(puzzle: Puzzle, tmp_path: Path) -> None:
    """What the learner is given can be run, or fails in the hole; either way it is told what is wrong."""
    path = Path(str(import_module(f"lockstep.puzzles.{puzzle.name}").__file__))
    source = path.read_text()
    given = with_hole(source)
    compile(given, puzzle.name, "exec")
    assert len(title_of(path)) <= 74, "`lockstep puzzle` has 80 columns"
    assert "# your turn" in given
    assert "# end of your turn" not in given
    assert given != source
    wanted = tuple(float(value) for value in puzzle.answer(0, 2))
    for answer in ((), tuple(value + 1 for value in wanted)):
        shown = Event(0, "show", name="answer", after=answer)
        assert problems(puzzle, Played([[shown]], 0, ""), 1)
    assert torch.tensor(wanted).isfinite().all()
