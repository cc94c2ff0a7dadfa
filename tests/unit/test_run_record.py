"""The record on disk: what is written is read, also after a kill, and a long run stays small."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiled_worlds import World, read_rank, reader

from lockstep.errors import ConfigError
from lockstep.observe.flight import Record
from lockstep.observe.pace import EVERY, FIRST, one_of_each
from lockstep.observe.profile.listed_operations import covered_ns
from lockstep.observe.profile.phases import BACKWARD, FORWARD, OTHER, PHASES, TAIL, Step, forwards_found, worked_out
from lockstep.observe.profile.run_record import (
    OPERATIONS_MAX,
    bytes_of,
    file_of,
    is_listed,
    last_in_line,
    listed_after,
    steps_per_line,
    without_wholes,
)
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.writer import RunWriter
from lockstep.observe.report.heat import heat_of
from lockstep.observe.scene import FROM_CPP
from whole_records import read_run


def world(**changes: object) -> World:
    return World(work_us=lambda rank, step: 100 + 10 * rank, **changes)  # pyright: ignore[reportArgumentType]


def test_steps_are_read_as_they_were(tmp_path: Path) -> None:
    run = world(steps=9, tokens=64).run(tmp_path)
    assert run.world_size == 2
    for rank, record in run.ranks.items():
        assert [line.step for line in record.lines] == list(range(1, 10))
        for line in record.lines:
            assert sum(line.phases_us) == line.wall_us == line.longest_us
            assert (line.tokens, line.samples, line.operations, line.hidden_us) == (64, 8, 3, 0)
            assert line.phase("backward") == 3 * (100 + 10 * rank)
            assert [op.site for op in line.ops or ()] == ["train.py:0", "train.py:1", "train.py:2"]
            assert sum(op.waited_us for op in line.ops or ()) == line.phase("exposed")
            assert {op.bytes for op in line.ops or ()} == {4 * 65536}
            assert [PHASES[phase] for phase, _ in line.spans] == ["backward", "exposed"] * 3
            assert [at for _, at in line.spans[1::2]] == [op.began_us for op in line.ops or ()]
        assert [op.seq for line in record.lines for op in line.ops or ()] == list(range(27))


def test_file_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    world(steps=4).run(tmp_path)
    text = file_of(tmp_path, 1).read_text()
    whole = read_rank(text.splitlines(True))
    assert whole is not None
    first = text.index("\n") + 1
    for end in range(len(text)):
        record = read_rank(text[:end].splitlines(True))
        assert (record is None) == (end < first)
        if record is not None:
            assert record.lines == whole.lines[: len(record.lines)]
            again = read_rank((text[:end] + text).splitlines(True))  # killed there, and started again
            assert again is not None
            assert again.lines == whole.lines


@pytest.mark.parametrize("line", ["[1]x", '{"step":3,"wall":1}', '{"start":2}', '{"word":1}'])
def test_foreign_line_is_refused(tmp_path: Path, line: str) -> None:
    world(steps=2).run(tmp_path)
    text = file_of(tmp_path, 0).read_text()
    bad = line + "\n" + text if line != '{"word":1}' else text + '{"step":5,"ops":[[99,0,0,0,0,0]]}\n' + text
    with pytest.raises(ConfigError, match="line"):
        read_rank(bad.splitlines(True))


def test_later_start_replaces_the_steps_it_does_again(tmp_path: Path) -> None:
    world(steps=6).run(tmp_path)
    text = file_of(tmp_path, 0).read_text()
    start, *lines = text.splitlines(True)
    later = start.replace('"a/0"', '"a/1"')
    again = [line for line in lines if not line.startswith('{"step"') or json.loads(line)["step"] in (4, 5)]
    record = read_rank([start, *lines, later, *again])
    assert record is not None
    assert [(line.step, line.attempt) for line in record.lines] == [
        (1, "a/0"), (2, "a/0"), (3, "a/0"), (4, "a/1"), (5, "a/1")
    ]  # fmt: skip
    assert {op.attempt for op in record.lines[-1].ops or ()} == {"a/1"}


def test_what_ended_no_step_takes_the_place_of_none(tmp_path: Path) -> None:
    world(steps=3, world_size=2).run(tmp_path)
    start, *lines = file_of(tmp_path, 0).read_text().splitlines(True)
    later, whole = start.replace('"a/0"', '"a/1"'), '{"step":1,"wall_us":5,"phases_us":[0,0,0,0,0,5],"whole":1}\n'
    again, alone, other = (read_rank(text) for text in ([start, *lines, later, whole], [start, whole], [start, *lines]))
    assert again is not None
    assert alone is not None
    assert other is not None
    assert [line.step for line in again.lines] == [1, 2, 3]
    assert [(line.step, line.whole) for line in alone.lines] == [(1, 1)]
    assert without_wholes({0: alone, 1: other}) == {0: replace(alone, lines=()), 1: other}


def test_long_run_stays_small_and_loses_no_step(tmp_path: Path) -> None:
    run = world(steps=10_000, world_size=1, collectives=8, tokens=3).run(tmp_path)
    assert file_of(tmp_path, 0).stat().st_size < 700 << 10
    for record in run.ranks.values():
        assert sum(line.count for line in record.lines) == 10_000
        assert sum(line.tokens for line in record.lines) == 30_000
        listed = [line.step for line in record.lines if line.ops is not None]
        assert listed == [step for step in range(1, 10_001) if is_listed(step)]
        assert all(line.count == 1 for line in record.lines if line.ops is not None)
        assert max(line.count for line in record.lines) == 16


def test_lines_end_where_the_next_one_begins() -> None:
    """Each step is in one line: up to a multiple of its length, or to a step that is listed."""
    alone = [step for step in range(1, 20_000) if not is_listed(step)]
    for step, following in itertools.pairwise(alone):
        is_last = step % steps_per_line(step) == 0 or is_listed(step + 1)
        assert (last_in_line(step) == step) == is_last
        assert is_last or last_in_line(step) == last_in_line(following)


def test_the_next_step_that_is_listed() -> None:
    listed = [step for step in range(1, 40_000) if is_listed(step)]
    following = iter(listed)
    due = next(following)
    for step in range(30_000):
        if step == due:
            due = next(following)
        assert listed_after(step) == due


def test_what_is_listed_was_looked_at_closely() -> None:
    """None is looked at for that alone. Once lines are long, of half of them and fewer the operations are listed."""
    listed = [step for step in range(FIRST + 1, 70_000) if is_listed(step)]
    assert all(one_of_each(step - 1) == step for step in listed)
    for longest in range(11, 17):  # lines of 2, 4, .. steps, from step 1024 on
        many, size = 1 << (longest - 1), 1 << (longest - 10)
        assert sum(step in range(many, 2 * many) for step in listed) == many // EVERY // max(1, size // 2)


def test_steps_that_are_counted_anew_begin_a_line(tmp_path: Path) -> None:
    """A program that goes on from an older checkpoint within one process."""
    clock = StepClock()
    writer = RunWriter(tmp_path, clock, rank=0, world_size=1, attempt="a/0", window=range(5003, 5005))
    clock.close_reader = writer.close
    for step in (*range(4090, 4096), 4098, *range(5000, 5006), *range(1034, 1037)):
        clock.step_done(step, operations=0)
        writer.look()
    writer.close()
    texts = [json.loads(line) for line in file_of(tmp_path, 0).read_text().splitlines()]
    lines = [(text["step"], text.get("count")) for text in texts if "step" in text]
    assert lines == [
        (4092, 3),
        (4095, 3),
        (4098, 1),
        (5000, 1),
        (5002, 2),
        (5003, 1),
        (5004, 1),
        (5005, 1),
        (1034, 1),
        (1036, 2),
    ]


def test_steps_that_were_only_counted_are_said_to_be(tmp_path: Path) -> None:
    clock = StepClock()
    writer = RunWriter(tmp_path, clock, rank=0, world_size=1, attempt="a/0")
    clock.close_reader = writer.close
    for step in range(2057, 2065):
        clock.is_brief = step not in (2058, 2064)
        clock.step_done(step, operations=0)
    writer.close()
    run = read_run(tmp_path)
    lines = [(line.step, line.count, line.counted) for line in run.ranks[0].lines]
    assert lines == [(2060, 4, 3), (2064, 4, 3)]
    assert heat_of(run)["counted"] == 6


@given(st.integers(1, 1 << 40))
def test_lines_per_octave_are_bounded(step: int) -> None:
    assert step / 1024 < steps_per_line(step) <= max(1, step / 512)
    assert steps_per_line(step + 1) >= steps_per_line(step)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("all_reduce float32 [4, 2] sum", 32),
        ("all_reduce bfloat16 [] sum", 2),
        ("all_reduce float32 [0] sum", 0),
        ("broadcast int64 [3] root=0", 24),
        ("all_gather float64 4 x [5]", 160),
        ("reduce_scatter float32 sum [3, 4, 5]", 48),
        ("all_gather complex64 [2, 2]", 32),
        ("all_gather bool 2 x [7]", 14),
        ("barrier", 0),
        ("all_gather float32 [1, 2, 3].. 0a1b2c3d", 24),
        (FROM_CPP, 0),
        ("allreduce float32[262144]", 4 * 262144),
        ("broadcast bfloat16[3,4]", 24),
        ("allreduce[262144]", 0),
    ],
)
def test_bytes_from_the_text(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("group", ["WORLD", "WORLD'2", "3 [0, 2, 4]"])
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("all_gather float32 [5]", 3 * 20),
        ("all_gather float32 [4, 2, 3]", 3 * 96),
        ("reduce_scatter bfloat16 [4, 2, 1] mean", 3 * 16),
        ("all_reduce float32 [4, 2] sum", 32),
        ("broadcast int64 [3] root=0", 24),
    ],
)
def test_what_torch_gathers_or_scatters_has_the_bytes_of_all_parts(text: str, size: int, group: str) -> None:
    assert bytes_of(text, 3, group) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("all_gather float64 3 x [5]", 120),
        ("reduce_scatter float32 sum [3, 4, 5]", 48),
        ("all_gather float32 [1, 2, 3, 4].. 0a1b2c3d", 40),
    ],
)
def test_ours_says_them_all(text: str, size: int) -> None:
    assert [bytes_of(text, 3, group) for group in ("world", "world #2", "ranks 0-4:2")] == [size] * 3


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: (min(ends), max(ends))))


@given(SPANS, st.integers(0, 60), st.integers(0, 60))
def test_covered_time_is_that_of_every_moment(spans: list[tuple[int, int]], began: int, ended: int) -> None:
    moments = {moment for first, last in spans for moment in range(first, last)}
    assert covered_ns(spans, began, ended) == len(moments & set(range(began, ended)))


def test_backwards_that_wait_for_nobody_are_not_listed(tmp_path: Path) -> None:
    """Gradients are accumulated: nothing was sent. The last one has its number on ranks that listed another one too."""
    clock = StepClock()
    waits = [(TAIL, at_ns, at_ns + took_ns) for at_ns, took_ns in ((1, 8_000), (50_000, 8_000), (90_000, 3_000_000))]
    clock.steps.append(worked_out(Step(1, 0, 4_000_000, 0, 0, (0, 0), waits, ((BACKWARD, 0),))))
    with_another = StepClock()
    waits = [(TAIL, at_ns, at_ns + 100_000) for at_ns in (1, 200_000, 400_000)]
    with_another.steps.append(worked_out(Step(1, 0, 4_000_000, 0, 0, (0, 0), waits, ((BACKWARD, 0),))))
    for rank, each in enumerate((clock, with_another)):
        writer = RunWriter(tmp_path, each, rank=rank, world_size=2, attempt="a/0")
        writer.look()
        writer.close()
    one, other = (
        [op.seq for line in record.lines for op in line.ops or ()] for record in read_run(tmp_path).ranks.values()
    )
    assert one == other[-1:]
    assert len(other) == 3


def test_many_operations_are_thinned_alike_and_messages_left_out(tmp_path: Path) -> None:
    clock = StepClock()
    texts = {0: "send float32 [1] to 1", 1: FROM_CPP}
    records = [
        Record(n, n, 1, 1000 * n, 0, 0, n == 0, "world", texts.get(n, "barrier"), "a.py:1", "") for n in range(300)
    ]
    clock.steps.append(
        worked_out(Step(1, 0, 400_000, 0, 0, (0, 300), [(8, 8000, 9000), (8, 9500, 10_500)], [(OTHER, 0)]))
    )
    writer = RunWriter(tmp_path, clock, rank=0, world_size=1, attempt="", records=reader(records))
    writer.close()
    (line,) = read_run(tmp_path).ranks[0].lines
    assert line.ops is not None
    assert (line.operations, line.every) == (300, 8)
    assert [op.seq for op in line.ops] == list(range(8, 300, 8))
    assert len(line.ops) <= OPERATIONS_MAX
    assert (line.ops[0].began_us, line.ops[0].waited_us, line.ops[0].left_us) == (8, 2, 400)
    assert line.ops[1].began_us == -1
    assert line.hidden_us == 398


def test_what_is_not_told_of_a_step_is_not_made_up(tmp_path: Path) -> None:
    clock = StepClock()
    sent = Record(0, 0, 1, 4_000_000, 9_000_000, 0, False, "WORLD", FROM_CPP, "", "")  # times at which it was seen
    marks = [(FORWARD, 0), (BACKWARD, 2_000_000), (OTHER, 3_000_000), (BACKWARD, 6_000_000)]  # two microbatches
    clock.steps.append(worked_out(forwards_found(Step(1, 0, 10_000_000, 0, 0, (0, 1), [], marks))))
    RunWriter(tmp_path, clock, rank=0, world_size=1, attempt="", records=reader([sent])).close()
    (line,) = read_run(tmp_path).ranks[0].lines
    assert line.hidden_us == 0
    assert line.phases_us == (0, 5000, 5000, 0, 0, 0)


def test_disk_that_takes_nothing_ends_the_record_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    clock = StepClock()
    writer = RunWriter(tmp_path / "file", clock, rank=3, world_size=4, attempt="")
    for step in (1, 2):
        clock.steps.append(worked_out(Step(step, 0, 6, 0, 0, (0, 0), [], [(OTHER, 0)])))
        writer.look()
    writer.close()
    why = f"{tmp_path}/file/rank-3.jsonl: File exists"
    assert capsys.readouterr().err == f"lockstep: rank 3 is not recorded any more: {why}\n"


def test_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()
    writer = RunWriter(tmp_path, clock, rank=0, world_size=1, attempt="")
    clock.steps.append(worked_out(Step(1, 0, 6, 0, 0, (0, 0), [], [(OTHER, 0)])))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    writer.close()
    assert not list(tmp_path.iterdir())
