"""The steps that are drawn: which, where on the common clock, and who came last."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled_worlds import World

from lockstep.observe.profile.run_record import Op, Run, Steps
from lockstep.observe.profile.step_clock import PHASES
from lockstep.observe.report.lanes import choose, join_of, lanes_of, spans_of


def began_us(run: Run) -> float:
    return min(record.starts[0].time_ns for record in run.ranks.values()) / 1e3


def op(seq: int, entered_us: int, left_us: int, began_us: int = -1, waited_us: int = 0) -> Op:
    return Op(
        "a", "world", seq, "all_reduce float32 [250] sum", "a.py:1", "", 1000, entered_us, left_us, began_us, waited_us
    )


def line(step: int, wall_us: int = 1000) -> Steps:
    return Steps(step, 1, 0, wall_us, wall_us, (0, 0, wall_us, 0, 0, 0), ops=())


def test_each_step_that_is_worth_seeing_is_chosen_once_and_the_most_telling_first() -> None:
    steps = {n: {0: line(n), 1: line(n, 9000 if n == 30 else 8000 if n == 31 else 1000 + n)} for n in range(1, 101)}
    steps[1] = {0: line(1, 10**9)}  # warming up is not the slowest
    chosen = {choice.step: choice.why for choice in choose(steps, [70, 31])}
    assert list(chosen)[:2] == [70, 31]
    assert chosen[30] == "slowest"
    assert chosen[31] == "finding"
    assert chosen[100] == "last"
    assert chosen[53] == "typical"
    assert 1 not in chosen
    assert len(chosen) <= 12
    assert choose({}, [4]) == []
    assert [choice.step for choice in choose({7: {0: line(7)}}, [3])] == [7]


@given(
    st.lists(st.integers(0, 10**9), min_size=3, max_size=3),
    st.lists(st.integers(0, 4000), min_size=9, max_size=9),
)
@settings(max_examples=30, deadline=None)
def test_ranks_of_several_machines_stand_on_one_clock(ahead: list[int], work: list[int]) -> None:
    run = made(ahead, work)
    lanes = lanes_of(run, began_us(run))
    for lane in lanes["steps"]:
        ends = {rank["rank"]: [row[4] + row[5] for row in rank["ops"]] for rank in lane["ranks"]}
        for others in ends.values():
            assert others == pytest.approx(ends[0], abs=3)
        assert min(rank["began_us"] for rank in lane["ranks"]) == 0


def made(ahead: list[int], work: list[int]) -> Run:
    """Three ranks on two machines, whose clocks are apart: a rank's start says another time than it was."""
    world = World(work_us=lambda rank, step: work[(rank + 2 * step) % 9], world_size=3, steps=12, ahead_us=ahead)
    with tempfile.TemporaryDirectory() as folder:
        run = world.run(Path(folder))
    ranks = {}
    for rank, record in run.ranks.items():
        ticks = 0 if rank == 2 else 1  # the first two share a clock
        begun = 10**18 + 10**9 * rank * ticks + 1000 * ahead[0 if ticks else 2]
        start = replace(record.starts[0], time_ns=begun if rank == 2 else 10**18, host=f"machine {rank // 2}")
        ranks[rank] = replace(record, starts=(start,))
    return Run(run.folder, ranks)


def test_join_names_the_last_and_counts_what_the_others_waited() -> None:
    late = join_of(4, {0: op(1, 0, 1100, 0, 1100), 1: op(1, 600, 1100, 600, 500), 2: op(1, 300, 1100, 300, 800)})
    assert late == [4, 1, 500, 600 + 300, 2_000_000]
    hidden = join_of(0, {0: op(1, 0, 700), 1: op(1, 400, 700)})
    assert hidden == [0, 1, 300, 0, round(1e9 / 300)]
    assert join_of(0, {0: op(1, 0, 700)}) is None
    barrier = op(1, 5, 5)._replace(bytes=0)
    assert join_of(0, {0: barrier, 1: barrier}) == [0, 0, 0, 0, None]


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 400)), max_size=5),
    st.lists(st.integers(0, 700), min_size=6, max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_spans_fill_the_step_and_keep_each_wait(waits: list[tuple[int, int]], phases: list[int]) -> None:
    ops: list[Op] = []
    at = 0
    for seq, (gap, took) in enumerate(waits):
        ops.append(op(seq, at + gap, at + gap + took, at + gap, took))
        at += gap + took
    phases[PHASES.index("exposed")] += sum(took for _, took in waits)
    wall_us = max(at, sum(phases))
    phases[PHASES.index("other")] += wall_us - sum(phases)
    spans = spans_of(Steps(1, 1, 0, wall_us, wall_us, tuple(phases), ops=tuple(ops)))
    assert [begin for _, begin, _ in spans] == [0, *(end for _, _, end in spans)][: len(spans)]
    assert (spans[-1][2] if spans else 0) == wall_us
    for one in ops:
        middle = one.began_us + one.waited_us / 2
        assert one.waited_us == 0 or next(n for n, begin, end in spans if begin <= middle < end) == "exposed"
    assert all(a[0] != b[0] for a, b in pairwise(spans))


def test_phases_have_their_own_times_or_come_in_their_usual_order() -> None:
    times = replace(line(1), spans=((1, 0), (2, 300), (1, 400), (2, 600), (4, 950), (5, 1000)))
    assert spans_of(times) == [
        ("forward", 0, 300),
        ("backward", 300, 400),
        ("forward", 400, 600),
        ("backward", 600, 950),
        ("optimizer", 950, 1000),
    ]
    one = Steps(1, 1, 0, 1000, 1000, (100, 300, 400, 50, 100, 50), ops=(op(1, 500, 650, 600, 50),))
    assert spans_of(one) == [
        ("data", 0, 100),
        ("forward", 100, 400),
        ("backward", 400, 600),
        ("exposed", 600, 650),
        ("backward", 650, 850),
        ("optimizer", 850, 950),
        ("other", 950, 1000),
    ]


def test_words_are_said_once_and_rows_point_at_them(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000 + 300 * rank, collectives=3, steps=9).run(tmp_path)
    lanes: dict[str, Any] = lanes_of(run, began_us(run), [6])
    assert [word["site"] for word in lanes["words"]] == ["train.py:0", "train.py:1", "train.py:2"]
    assert [lane["step"] for lane in lanes["steps"]] == sorted(lane["step"] for lane in lanes["steps"])
    lane = next(lane for lane in lanes["steps"] if lane["why"] == "finding")
    assert lane["step"] == 6
    assert lane["ended_us"] - lane["began_us"] == max(rank["ended_us"] for rank in lane["ranks"])
    assert not lane["estimated"]
    for rank in lane["ranks"]:
        assert [row[:2] for row in rank["ops"]] == [[0, 0], [1, 1], [2, 2]]
        assert rank["spans"][0][1] == rank["began_us"]
        assert rank["spans"][-1][2] == rank["ended_us"]
    assert [row[:4] for row in lane["joins"]] == [[key, 1, 500, 300] for key in range(3)]
