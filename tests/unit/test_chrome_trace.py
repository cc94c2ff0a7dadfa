"""One trace of all ranks: what chrome://tracing and Perfetto accept, at one time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import World

from lockstep.errors import ConfigError
from lockstep.observe.profile.chrome_trace import align, merge, merge_files, moments_of
from lockstep.observe.profile.run_record import TAIL_GROUP
from lockstep.observe.profile.window import Window, read_window, trace_of
from trace_format import check_trace


def kineto(rank: int, at_us: int) -> dict[str, Any]:
    """What torch.profiler writes: numbers and words for processes and threads, times since a base."""
    return {
        "baseTimeNanoseconds": 7_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 4000 + rank, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": 4000 + rank, "tid": 81, "args": {"name": "thread 81"}},
            {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 4000 + rank, "tid": 81, "ts": at_us - 7, "dur": 5},
            {"ph": "X", "name": "step", "pid": "Spans", "tid": "PyTorch Profiler", "ts": at_us - 7, "dur": 9},
            {"ph": "s", "id": 5, "name": "ac2g", "cat": "ac2g", "pid": 4000 + rank, "tid": 81, "ts": at_us - 7},
            {"ph": "f", "id": 5, "name": "ac2g", "cat": "ac2g", "pid": 0, "tid": 7, "ts": at_us - 5, "bp": "e"},
            {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": at_us - 5, "dur": 3},
        ],
    }


AHEAD = (0, 5_000_000, 5_000_000)


def world() -> World:
    return World(work_us=lambda rank, step: 1000 + 700 * ((rank + step) % 3), world_size=3, steps=9, ahead_us=AHEAD)


def test_clocks_of_machines_are_brought_together(tmp_path: Path) -> None:
    run = world().run(tmp_path)
    fix = {rank: record.starts[0] for rank, record in run.ranks.items()}
    moments = [
        {
            rank: m._replace(zero_us=m.zero_us - fix[rank].time_ns / 1e3 + fix[rank].clock_ns / 1e3)
            for rank, m in ops.items()
        }
        for ops in moments_of(run, range(3, 7))
    ]
    assert len(moments) == 4 * 3
    hosts = {0: "a", 1: "b", 2: "b"}
    clocks = align(moments, hosts)
    assert dict(clocks.ahead_us) == pytest.approx({0: 0, 1: 5_000_000, 2: 5_000_000}, abs=1)
    assert clocks.residual_us <= 1
    trace = merge({}, moments, hosts)
    check_trace(trace)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0 (a)", "rank 1 (b)", "rank 2 (b)"}
    arrows = [event for event in trace["traceEvents"] if event["name"] == "last to arrive"]
    assert len(arrows) == 2 * 2 * 12  # from the last of three, begun and ended
    lasts = {event["pid"] for event in arrows if event["ph"] == "s"}
    assert lasts == {0, 1, 2}
    for event in arrows:
        if event["ph"] == "f":  # inside a slice, or viewers draw it nowhere
            slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == event["pid"]]
            assert any(e["ts"] - 1 <= event["ts"] <= e["ts"] + e["dur"] + 1 for e in slices)


def test_profilers_are_put_beside_each_other(tmp_path: Path) -> None:
    run = world().run(tmp_path)
    hosts = dict.fromkeys(run.ranks, "a")
    start_us = run.ranks[0].starts[0].time_ns // 1000
    trace = merge({rank: kineto(rank, start_us + 100 * rank) for rank in (0, 2)}, moments_of(run, range(2, 4)), hosts)
    check_trace(trace)
    ops = {event["pid"]: event for event in trace["traceEvents"] if event["name"] == "aten::mm"}
    assert set(ops) == {0, 2}
    assert ops[2]["ts"] - ops[0]["ts"] == pytest.approx(200)
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"thread 81", "PyTorch Profiler", "stands in collectives"} <= named


def bucket_slices(at_us: int, late_us: int, names: tuple[str, ...], takes_us: float = 5000) -> dict[str, Any]:
    """As kineto has collectives that C++ starts: where that happens, and until they have ended, in another thread.

    takes_us: until then, from 3 us after the first rank's beginning.
    """
    events: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        here = at_us + late_us + 100 * number
        common = {"ph": "X", "pid": 4000}
        events.append({**common, "name": name, "cat": "cpu_op", "tid": 81, "ts": here, "dur": 9})
        done = {"name": "gloo:all_reduce", "cat": "user_annotation", "tid": 90, "ts": here + 3}
        events.append({**common, **done, "dur": max(0.1, at_us + takes_us + 100 * number - here)})
    return {"baseTimeNanoseconds": 0, "traceEvents": events}


@pytest.mark.parametrize(("is_alike", "takes_us"), [(True, 5000), (False, 5000), (True, 37.6)], ids=str)
def test_each_bucket_has_an_arrow_from_the_rank_that_started_it_last(
    tmp_path: Path, is_alike: bool, takes_us: float
) -> None:
    """Also where it has ended within a microsecond of that: the arrow does not point back."""
    run = world().run(tmp_path)
    moments = [
        {rank: moment._replace(op=moment.op._replace(group=TAIL_GROUP)) for rank, moment in ops.items()}
        for ops in moments_of(run, range(3, 4))
    ]
    names = ("c10d::allreduce_",) * 3
    at_us = int(moments[0][0].zero_us)
    traces = {
        rank: bucket_slices(at_us, late_us, names if is_alike or rank else names[:2], takes_us)
        for rank, late_us in ((0, 0), (1, 40), (2, 20))
    }
    trace = merge(traces, moments, dict.fromkeys(run.ranks, "a"))
    check_trace(trace)
    arrows = [event for event in trace["traceEvents"] if event["name"] == "last to start"]
    assert len(arrows) == (2 * 2 * 3 if is_alike else 0)
    assert {event["pid"] for event in arrows if event["ph"] == "s"} == ({1} if is_alike else set())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for arrow in arrows:
        inside = [e for e in slices if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
        assert sum(e["ts"] <= arrow["ts"] < e["ts"] + e["dur"] for e in inside) >= 1


def test_what_ends_in_the_middle_of_another_slice_has_a_thread_beside_it(tmp_path: Path) -> None:
    """As a message of Gloo's does, which ends when it is there; times as kineto has them, whose sums are not exact."""
    run = world().run(tmp_path)
    common = {"ph": "X", "pid": 4000, "tid": 81, "cat": "cpu_op"}
    events = [
        {**common, "name": "c10d::recv_", "ts": 0.127, "dur": 80.301},
        {**common, "name": "gloo:recv", "ts": 74.257, "dur": 11249.424},
        {**common, "name": "gloo:recv", "ts": 90.001, "dur": 12000.5},
        {**common, "name": "aten::mm", "ts": 100.1, "dur": 20.2},
        {**common, "name": "aten::mul", "ts": 100.2, "dur": 20.1},
        {**common, "name": "aten::add", "ts": 11300, "dur": 40},
    ]
    trace = merge(
        {1: {"baseTimeNanoseconds": run.ranks[0].starts[0].time_ns, "traceEvents": events}},
        [],
        dict.fromkeys(run.ranks, "a"),
    )
    check_trace(trace)
    threads = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    slices = [(threads[event["tid"]], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(slices) == [
        ("81", "aten::add"),
        ("81", "aten::mm"),
        ("81", "aten::mul"),
        ("81", "c10d::recv_"),
        ("81 (beside it)", "gloo:recv"),
        ("81 (beside it)", "gloo:recv"),
    ]


def test_rank_that_went_on_before_the_last_came_has_no_arrow_from_it(tmp_path: Path) -> None:
    (ops,) = moments_of(World(work_us=lambda rank, step: 1000, collectives=1, steps=3).run(tmp_path), range(3, 4))
    early = {0: ops[0]._replace(op=ops[0].op._replace(entered_us=0, began_us=0, waited_us=900, left_us=900))}
    late = {1: ops[1]._replace(op=ops[1].op._replace(entered_us=1000, began_us=1000, waited_us=500, left_us=1500))}
    trace = merge({}, [{**early, **late}], {0: "a", 1: "a"})
    check_trace(trace)
    assert not [event for event in trace["traceEvents"] if event["ph"] in "sf"]


def test_files_are_merged_where_there_are_some(tmp_path: Path) -> None:
    run = world().run(tmp_path)
    assert merge_files(run, range(2, 5)) is None
    trace_of(tmp_path, 1).write_text(json.dumps(kineto(1, run.ranks[1].starts[0].time_ns // 1000)))
    found = merge_files(run, range(2, 5))
    assert found is not None
    path, ranks, residual_us = found
    assert (ranks, path) == (1, tmp_path / "trace.json")
    assert residual_us >= 0
    check_trace(json.loads(path.read_text()))


@pytest.mark.parametrize("text", ["10:13", "steps=1:3", "steps=5:4", "steps=a:b", "steps=2"])
def test_window_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="steps=10:13"):
        read_window(text)


def test_window_is_written_with_what_torch_saw(tmp_path: Path) -> None:
    import torch

    window = Window(read_window("steps=2:3"), tmp_path, 1)
    changes = []
    for step in range(1, 6):
        torch.ones(3, 3).mm(torch.ones(3, 3))
        changes.append(window.step_done(step))
    assert changes == [True, False, True, False, False]
    events = json.loads(trace_of(tmp_path, 1).read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["trace-1.json"]


@pytest.mark.parametrize(("group", "size"), [("WORLD", 3 * 16), ("world", 16)])
def test_what_torch_gathers_has_the_bytes_of_all_parts_and_ours_says_them_itself(
    group: str, size: int, tmp_path: Path
) -> None:
    run = world().run(tmp_path)
    moments = [
        {r: m._replace(op=m.op._replace(text="all_gather float32 [4]", group=group)) for r, m in ops.items()}
        for ops in moments_of(run, range(2, 4))
    ]
    slices = [
        e for e in merge({}, moments, dict.fromkeys(run.ranks, "a"))["traceEvents"] if e.get("cat") == "collective"
    ]
    assert {e["args"]["bytes"] for e in slices if "args" in e} == {size}
