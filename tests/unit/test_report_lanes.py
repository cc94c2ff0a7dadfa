"""The steps that are drawn: which, where on the common clock, and who came last."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled_worlds import World

from lockstep.observe.profile.notes import Note
from lockstep.observe.profile.run_record import TAIL_GROUP, Op, Run, Steps
from lockstep.observe.profile.waits import compare
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
    ops = {0: op(1, 0, 1100, 0, 1100), 1: op(1, 600, 1100, 600, 500), 2: op(1, 300, 1100, 300, 800)}
    assert join_of(4, ops, compare(ops), {}) == [4, 1, 500, 600 + 300, 2_000_000]
    hidden = join_of(0, {0: op(1, 0, 700), 1: op(1, 400, 700)}, None, {})
    assert hidden == [0, 1, 300, 0, round(1e9 / 300)]
    assert join_of(0, {0: op(1, 0, 700)}, None, {}) is None
    barrier = op(1, 5, 5)._replace(bytes=0)
    assert join_of(0, {0: barrier, 1: barrier}, None, {}) == [0, 0, 0, 0, None]


def test_each_rank_waits_until_the_last_has_come_though_a_ring_lets_them_go_at_different_times(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000 + 300 * rank, collectives=1, steps=9).run(tmp_path)

    def let_go_later(line: Steps) -> Steps:
        ops = tuple(one._replace(left_us=one.left_us + 50, waited_us=one.waited_us + 50) for one in line.ops or ())
        return replace(line, ops=ops, wall_us=line.wall_us + 50)

    lines = tuple(map(let_go_later, run.ranks[0].lines))
    run = replace(run, ranks={**run.ranks, 0: replace(run.ranks[0], lines=lines)})
    for lane in lanes_of(run, began_us(run))["steps"]:
        (one,), (other,) = (row["ops"] for row in lane["ranks"])
        came_us = other[2]
        assert (one[4] + one[6], other[6]) == (came_us, 0)
        assert lane["joins"][0][3] == one[6] == 300


@pytest.mark.parametrize("is_told", [True, False])
def test_buckets_of_torch_have_the_bytes_and_the_bandwidth_that_it_says(tmp_path: Path, *, is_told: bool) -> None:
    run = World(work_us=lambda rank, step: 1000, collectives=1, steps=5, moves_us=500).run(tmp_path)
    note = Note("buckets", 0, "a/0", {"step": 4, "count": 3, "bytes": 6000, "last_bytes": 1000, "hidden_us": 1500})
    for rank, record in run.ranks.items():
        lines = tuple(
            replace(line, ops=tuple(one._replace(group=TAIL_GROUP, text="all", bytes=0) for one in line.ops or ()))
            for line in record.lines
        )
        run = replace(run, ranks={**run.ranks, rank: replace(record, lines=lines, notes=(note,) * is_told)})
    lanes = lanes_of(run, began_us(run))
    (word,) = lanes["words"]
    assert (word["group"], word["label"], word["bytes"]) == (
        "that of DistributedDataParallel",
        *(("3 buckets", 6000) if is_told else ("", 0)),
    )
    for lane in lanes["steps"]:
        assert [join[4] for join in lane["joins"]] == [6000 * 500 if is_told else None]


def test_phases_have_their_own_times_or_come_in_their_usual_order() -> None:
    times = replace(line(1), spans=((1, 0), (2, 300), (1, 400), (2, 600), (4, 950), (5, 1000)))
    assert spans_of(times) == [
        ("forward", 0, 300),
        ("backward", 300, 400),
        ("forward", 400, 600),
        ("backward", 600, 950),
        ("optimizer", 950, 1000),
    ]
    one = Steps(1, 1, 0, 1000, 1000, (100, 300, 450, 50, 0, 100), ops=(op(1, 500, 650, 600, 50),))
    assert spans_of(one) == [
        ("data", 0, 100),
        ("forward", 100, 400),
        ("backward", 400, 850),
        ("exposed", 850, 900),
        ("other", 900, 1000),
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


def test_what_torch_gathers_has_the_bytes_of_all_parts(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000, collectives=1, moves_us=500, elements=250).run(tmp_path)

    def gathered(line: Steps) -> Steps:
        ops = tuple(one._replace(group="WORLD", text="all_gather float32 [250]", bytes=1000) for one in line.ops or ())
        return replace(line, ops=ops)

    lines = {rank: tuple(map(gathered, record.lines)) for rank, record in run.ranks.items()}
    run = replace(run, ranks={rank: replace(record, lines=lines[rank]) for rank, record in run.ranks.items()})
    lanes = lanes_of(run, began_us(run))
    assert [word["bytes"] for word in lanes["words"]] == [2000]
    assert {join[4] for lane in lanes["steps"] for join in lane["joins"]} == {2000 * 2000}


def test_of_what_nobody_sees_it_is_not_said_who_came_last(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000 + 300 * rank, collectives=3, steps=9).run(tmp_path)

    def unseen(line: Steps) -> Steps:
        ops = list(line.ops or ())
        ops[0] = ops[0]._replace(began_us=-1, waited_us=0)
        return replace(line, ops=tuple(ops))

    lines = {rank: tuple(map(unseen, record.lines)) for rank, record in run.ranks.items()}
    run = replace(run, ranks={rank: replace(record, lines=lines[rank]) for rank, record in run.ranks.items()})
    lanes: dict[str, Any] = lanes_of(run, began_us(run))
    assert [word["unseen"] for word in lanes["words"]] == [True, False, False]
    assert [row[:2] for row in lanes["steps"][0]["joins"]] == [[1, 1], [2, 1]]


def test_what_a_thread_stood_in_at_one_place_is_seen_whatever_the_last_of_a_step_was(tmp_path: Path) -> None:
    run = World(work_us=lambda rank, step: 1000 + 300 * rank, collectives=3, steps=9).run(tmp_path)

    def of_one_line(line: Steps) -> Steps:
        first, second, third = line.ops or ()
        same = {"text": first.text, "site": first.site}
        return replace(line, ops=(first, second._replace(**same), third._replace(**same, began_us=-1, waited_us=0)))

    lines = {rank: tuple(map(of_one_line, record.lines)) for rank, record in run.ranks.items()}
    run = replace(run, ranks={rank: replace(record, lines=lines[rank]) for rank, record in run.ranks.items()})
    lanes = lanes_of(run, began_us(run))
    assert [word["unseen"] for word in lanes["words"]] == [False]
    assert all(len(lane["joins"]) == 3 for lane in lanes["steps"])
