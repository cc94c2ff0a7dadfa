"""A puzzle: a lesson with a hole. What the learner puts there is run on real processes and checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from lockstep.durable import write_whole
from lockstep.learn.events import Event, numbers
from lockstep.learn.program import Played

ANSWER = "answer"  # what a puzzle's program shows in the end
_HOLE = re.compile(
    r"(?m)^(?P<task>(?P<indent> *)# your turn:.*\n(?: *#.*\n)*)(?P<code>(?:.*\n)*?) *# end of your turn\n"
)
_is_close = partial(math.isclose, rel_tol=1e-5, abs_tol=1e-5)
_PROGRESS = "progress.json"
_SAID = 14  # lines that are shown; a report of the guard has 12


@final
@dataclass(frozen=True)
class Puzzle:
    """What a solution has to do. Each function is of (rank, world size)."""

    name: str
    answer: Callable[[int, int], Sequence[float]]
    hints: tuple[str, ...]
    ranks: tuple[int, ...] = (2, 3, 4)  # it is run on each
    sent: Callable[[int, int], int] | None = None  # bytes in messages, at most; None: they are not counted
    calls: tuple[str, ...] = ("send", "recv")  # of the communicator that may be used
    calls_max: int | None = None  # of each rank


def with_hole(solution: str) -> str:
    """The program that a learner is given: the instruction stays, the code between the marks is gone.

    Lines of the instruction that begin with "#| " are what stands there instead, to be mended.
    """

    def hole(found: re.Match[str]) -> str:
        task = found["task"].splitlines(keepends=True)
        given = [line.replace("#| ", "", 1) for line in task if line.lstrip().startswith("#| ")]
        told = [line for line in task if not line.lstrip().startswith("#| ")]
        return "".join([*told, *(given or [f"{found['indent']}...\n"])])

    return _HOLE.sub(hole, solution)


def problems(puzzle: Puzzle, played: Played, world_size: int) -> list[str]:
    """What is wrong with one run on `world_size` ranks, in the order in which to look at it; empty: it is solved."""
    if played.exit_code is None:
        return [f"with {world_size} ranks it did not come to an end", *_said(played)]
    if played.exit_code != 0 or len(played.ranks) < world_size:
        return [f"with {world_size} ranks it failed with exit code {played.exit_code}", *_said(played)]
    found: list[str] = []
    for rank, events in enumerate(played.ranks):
        found += [f"with {world_size} ranks, rank {rank} {text}" for text in _of_rank(puzzle, rank, world_size, events)]
    return found


def _of_rank(puzzle: Puzzle, rank: int, world_size: int, events: Sequence[Event]) -> list[str]:
    wanted = tuple(float(value) for value in puzzle.answer(rank, world_size))
    shown = [event.after for event in events if event.kind == "show" and event.name == ANSWER]
    if not shown:
        return ["never showed its answer"]
    calls = [event for event in events if event.kind not in ("screen", "show", "curve", "say")]
    found: list[str] = []
    if len(shown[-1]) != len(wanted) or not all(map(_is_close, shown[-1], wanted)):
        found.append(f"has the answer {numbers(shown[-1], (0, 0))}; {numbers(wanted, (0, 0))} is right")
    others = sorted({event.kind for event in calls} - set(puzzle.calls))
    if others:
        found.append(f"called {', '.join(others)}; this one is about {', '.join(puzzle.calls) or 'no call at all'}")
    sent = sum(event.bytes for event in calls if event.kind == "send")
    limit = None if puzzle.sent is None else puzzle.sent(rank, world_size)
    if limit is not None and sent > limit:
        found.append(f"sent {sent} bytes; {limit} are enough")
    if puzzle.calls_max is not None and len(calls) > puzzle.calls_max:
        found.append(f"made {len(calls)} calls; {puzzle.calls_max} are enough")
    return found


def _said(played: Played) -> list[str]:
    """What the processes said, from the guard's word on who waits for whom on; else the end of it, with the error."""
    lines = played.output.splitlines()
    first = next((at for at, line in enumerate(lines) if re.match(r"lockstep: [A-Z]{2}", line)), -_SAID)
    return lines[first:][:_SAID]


def solved_in(folder: Path) -> set[str]:
    """Names of the puzzles that were solved in `folder`."""
    try:
        return set(json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))["solved"])
    except (OSError, ValueError, KeyError, TypeError):  # nothing kept, or not by us: one begins anew
        return set()


def keep_solved(folder: Path, name: str) -> None:
    """Remember that `name` is solved."""
    write_whole(folder / _PROGRESS, json.dumps({"solved": sorted({*solved_in(folder), name})}) + "\n")
