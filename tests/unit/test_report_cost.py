"""What it costs to make a page of many ranks: counted, not timed."""

from __future__ import annotations

import cProfile
import gc
import pstats
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import World

from lockstep.observe.profile.rank_reader import steps_of
from lockstep.observe.profile.waits import unseen, waits_of
from lockstep.observe.report.document import document_of
from lockstep.observe.report.source import RunReader

_RANKS, _COLLECTIVES, _STEPS = 16, 24, 20
_CALLS = 24  # of functions, for one operation of one rank


def test_an_operation_costs_few_calls_to_read_and_to_compare(tmp_path: Path) -> None:
    World(
        work_us=lambda rank, step: 900 + 40 * ((5 * rank + step) % 16),
        world_size=_RANKS,
        collectives=_COLLECTIVES,
        steps=_STEPS,
    ).run(tmp_path)
    profiler = cProfile.Profile()
    profiler.enable()
    run = RunReader(tmp_path).read().run
    waits, kinds = waits_of(run), unseen(run)
    profiler.disable()
    assert (len(waits.pairs), len(kinds)) == (_RANKS * (_RANKS - 1), 0)
    calls: int = vars(pstats.Stats(profiler))["total_calls"]
    assert calls < _CALLS * _RANKS * _COLLECTIVES * _STEPS


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_is_not_looked_for_while_a_record_is_read(tmp_path: Path, *, is_on: bool) -> None:
    World(work_us=lambda rank, step: 900, world_size=8, collectives=24, steps=40).run(tmp_path)
    sweeps: list[int] = []

    def swept(phase: str, info: dict[str, Any]) -> None:
        sweeps.append(info["generation"])

    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(swept)
    try:
        source = RunReader(tmp_path).read()
        after_reading = gc.isenabled()
        document_of(source, "finished", 0)
        assert (after_reading, gc.isenabled()) == (is_on, is_on)
    finally:
        gc.callbacks.remove(swept)
        gc.enable()
    assert len(sweeps) < 20  # what happens between the two, and after


@pytest.mark.parametrize(
    "damaged",
    [
        {"ops": [[0, 0, 1, 2, 1]]},
        {"ops": [[0, 0, 1, 2, 1, 1, 7]]},
        {"ops": [[0, 0, 1, 2, 1, 1.5]]},
        {"ops": [[0, 0, 1, 2, 1, True]]},
        {"ops": [[]]},
        {"ops": [[5, 0, 1, 2, 1, 1]]},
        {"ops": 3},
        {"spans": [[1, 0, 3]]},
        {"spans": [[1]]},
        {"spans": [[]]},
        {"spans": [[6, 0]]},
        {"spans": ["ab"]},
        {"count": 0},
        {"phases_us": [1, 2]},
        {"other": 1},
    ],
    ids=str,
)
def test_a_line_that_is_not_whole_is_none(damaged: dict[str, Any]) -> None:
    words = {0: ("world", "all_reduce float32 [4] sum", "train.py:1", "", 16)}
    line = {"step": 3, "wall_us": 9, "phases_us": [0, 0, 9, 0, 0, 0], "ops": [[0, 2, 1, 5, 3, 2]], "spans": [[2, 0]]}
    ops = steps_of(dict(line), words, "a/0").ops
    assert ops is not None
    assert ops[0] == ("a/0", "world", 2, "all_reduce float32 [4] sum", "train.py:1", "", 16, 1, 5, 3, 2)
    assert ops[0].key == ("a/0", "world", 2)
    with pytest.raises((ValueError, TypeError, LookupError)):
        steps_of({**line, **damaged}, words, "a/0")
