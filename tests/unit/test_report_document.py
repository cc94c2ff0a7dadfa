"""A run's folder as one document: every section, its bounds, and runs in which something is missing."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import World
from reported_runs import SECOND, add_launch, add_notes, append_attempt, began_ns, full_run

from lockstep.observe.profile.run_record import Op, RankRecord, Run, Start, Steps, is_listed, steps_per_line
from lockstep.observe.report.curves import curves_of
from lockstep.observe.report.document import document_of
from lockstep.observe.report.heat import heat_of
from lockstep.observe.report.page import render
from lockstep.observe.report.single_file import to_json
from lockstep.observe.report.source import RunReader, Source
from lockstep.observe.report.step_bins import bins_of
from lockstep.observe.report.writing import document_in

_SECTIONS = {"version", "run", "cards", "curves", "heat", "lanes", "overlap", "owners", "coverage", "replicas"}
_PAGE_MAX = 2_000_000
_SLOW = World(work_us=lambda rank, step: 1000, steps=8)


def build(folder: Path, now_ns: int = 0) -> dict[str, Any]:
    return document_of(RunReader(folder).read(), "finished", now_ns)


def titles(document: dict[str, Any], severity: str) -> str:
    return "\n".join(card["title"] for card in document["cards"] if card["severity"] == severity)


# ------------------------------------------------------------------ a run that has everything


def test_every_section_of_a_run_that_has_everything(tmp_path: Path) -> None:
    document = build(full_run(tmp_path, world_size=3, steps=70))
    assert document.keys() == _SECTIONS
    assert all(document.values())
    run = document["run"]
    assert (run["world_size"], run["steps"], run["id"]) == (3, 70, tmp_path.name)
    assert run["wall_s"] == pytest.approx(1002)
    attempt = run["attempts"][0]
    assert (attempt["began_s"], attempt["ended_s"], attempt["code"]) == (0.5, 1001.0, 1)
    assert (attempt["first_step"], attempt["last_step"]) == (1, 70)
    rows = {(section, name): (value, origin) for section, name, value, origin in run["facts"]}
    assert rows["run", "command"] == ("train.py --lr 0.1", "")
    assert rows["environment", "OMP_NUM_THREADS"] == ("1", "launcher")
    assert rows["config", "train.steps"] == ("70", "")
    order = [card["severity"] for card in document["cards"]]
    assert order == sorted(order, key=["error", "warning", "note", "good"].index)
    assert set(order) == {"error", "warning", "note", "good"}
    names = [curve["name"] for curve in document["curves"]]
    assert names[0] == "loss"
    assert {"tokens/s", "steps/s", "lr"} <= set(names)
    assert document["owners"]["strategy"] == "fully_shard"
    assert [unit["ranks"].keys() for unit in document["owners"]["units"]] == [{"0", "1", "2"}] * 12
    assert [row["rank"] for row in document["owners"]["memory"]] == [0, 1, 2]
    assert document["overlap"]["waiting"][0]["last_rank"] == 2
    assert sum(row["share"] for row in document["overlap"]["waiting"]) == pytest.approx(1, abs=0.01)
    assert document["overlap"]["what_if"][0]["name"] == "as recorded"
    json.loads(to_json(document))
    assert "<script" in render(document)


def test_heat_means_are_those_of_the_steps(tmp_path: Path) -> None:
    world = World(work_us=lambda rank, step: 1000 * (1 + rank), data_us=lambda rank, step: step, steps=10, world_size=2)
    heat = heat_of(world.run(tmp_path))
    assert heat["first"] == heat["last"] == tuple(range(1, 11))
    assert [row[4] for row in heat["phases_us"]["data"]] == [5, 5]
    assert [row[0] for row in heat["phases_us"]["backward"]] == [3000, 6000]
    for at in range(10):
        assert heat["wall_us"][1][at] == sum(heat["phases_us"][name][1][at] for name in heat["phases"])


def test_curves_are_thinned_and_keep_what_sticks_out(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000, steps=3).run(tmp_path)
    losses = {step: 2.0 if step != 4321 else 77.0 for step in range(1, 5001)}
    add_notes(tmp_path, 0, *(("values", SECOND, {"step": s, "loss": v, "name": "text"}) for s, v in losses.items()))
    add_notes(tmp_path, 0, ("values", SECOND, {"step": 5000, "loss": 3.0}))
    curves = {curve["name"]: curve for curve in curves_of(RunReader(tmp_path).read())}
    assert "name" not in curves
    loss = curves["loss"]
    assert 900 < len(loss["steps"]) <= 1000
    assert loss["steps"][-1] == 5000
    assert max(loss["high"]) == 77.0
    assert min(loss["low"]) == 2.0
    assert loss["values"][-1] == pytest.approx((2 * 4 + 3) / 5, abs=0.2)  # the later line of a step holds
    assert curves["steps/s"]["low"] is None


def test_what_is_not_finite_is_kept_and_said(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000, steps=6).run(tmp_path)
    for rank in (0, 1):
        values = [("values", SECOND, {"step": s, "loss": math.nan if s + rank > 5 else 1.0}) for s in range(1, 7)]
        add_notes(tmp_path, rank, *values)
    document = build(tmp_path)
    assert "loss is not finite from step 5 on" in titles(document, "error")
    assert next(c for c in document["cards"] if "finite" in c["title"])["ranks"] == [1]
    loss = next(curve for curve in json.loads(to_json(document))["curves"] if curve["name"] == "loss")
    assert loss["values"] == [1.0] * 4 + [None] * 2


# ------------------------------------------------------------------ bounds


_LONG_US = 40_000_000  # so that every number has as many digits as it can be expected to have


def made_run(world_size: int, steps: int, ops: int) -> Run:
    """Thinned as a record is, but operations of few steps only."""
    ends = [step for step in range(1, steps + 1) if step % steps_per_line(step) == 0 or step == steps]
    lines = tuple(made_line(end, end - before, ops) for before, end in pairwise([0, *ends]))
    starts = {rank: Start(rank, world_size, "a/0", 100 + rank, "host", 10**18, 0) for rank in range(world_size)}
    ranks = {rank: RankRecord(rank, (start,), lines) for rank, start in starts.items()}
    return Run(Path("runs/made"), ranks)


def made_line(step: int, count: int, ops: int) -> Steps:
    wall_us = _LONG_US * count + step * 104_729 % 1_000_003
    listed = [made_op(step, at) for at in range(ops)] if is_listed(step) and (step > 200 or step < 40) else None
    listed = None if listed is None or count > 1 else tuple(listed)
    phases_us = (wall_us, 0, 0, 0, 0, 0)
    return Steps(step, count, _LONG_US * step, wall_us, wall_us, phases_us, ops=listed, attempt="a/0")


def made_op(step: int, at: int) -> Op:
    text, began_us = f"all_reduce float32 [{at}] sum", _LONG_US // 2 + 500 * at
    return Op("a/0", "world", 1000 * step + at, text, f"train.py:{at}", "", 4 * at, began_us, began_us + 9, began_us, 9)


@pytest.mark.parametrize(("world_size", "steps", "ops"), [(8, 10_000, 8), (64, 90, 64), (1, 3000, 0)])
def test_page_stays_below_two_megabytes(world_size: int, steps: int, ops: int) -> None:
    run = made_run(world_size, steps, ops)
    document = document_of(Source(Path("runs/made"), run, None, ()), "finished", 0)
    sizes = {name: len(to_json({name: value})) for name, value in document.items()}
    assert sum(sizes.values()) < 1_500_000, sizes
    assert len(render(document)) < _PAGE_MAX
    assert len(document["heat"]["last"]) > 50
    assert document["run"]["steps"] == steps
    if world_size > 1:
        assert len(document["lanes"]["words"]) == ops
        assert {"finding", "typical"} & {lane["why"] for lane in document["lanes"]["steps"]}


def test_notes_are_bounded_too(tmp_path: Path) -> None:
    full_run(tmp_path, world_size=2, steps=40, units=20_000)
    values = {f"metric {n}": 1.0 / 3 for n in range(60)}
    add_notes(tmp_path, 0, *(("values", SECOND, {"step": s, **values}) for s in range(1, 41)))
    add_notes(tmp_path, 1, *(("replicas", SECOND, {"step": s, "equal": s % 2 == 0}) for s in range(1, 5001)))
    document = build(tmp_path)
    assert len(to_json(document)) < 1_500_000
    assert len(document["curves"]) <= 30
    units = document["owners"]["units"]
    assert units[-1]["name"].endswith("smaller ones")
    assert sum(unit["numel"] for unit in units) == sum(4096 * (unit % 5 + 1) for unit in range(20_000))
    assert document["replicas"]["checks"][0] == [1, False]


@pytest.mark.parametrize(("first", "ends", "most"), [(1, range(1, 11), 400), (5, range(8, 1000, 4), 7), (1, [9], 3)])
def test_bins_part_the_steps_between_lines(first: int, ends: Any, most: int) -> None:
    bins = bins_of(first, ends, most)
    assert len(bins.last) <= most
    assert bins.first[0] == first
    assert bins.last[-1] == max(ends)
    assert set(bins.last) <= set(ends)
    assert [at + 1 for at in bins.last[:-1]] == list(bins.first[1:])
    assert all(bins.first[bins.of(step)] <= step <= bins.last[bins.of(step)] for step in ends)


# ------------------------------------------------------------------ runs in which something is missing


def test_run_without_any_rank(tmp_path: Path) -> None:
    launched = {"launch": "a", "command": ["train.py"], "time_ns": 10**18, "pid": 1, "host": "elsewhere"}
    add_launch(tmp_path, launched, {"attempt": "a/0", "world_size": 3, "time_ns": 10**18 + 1})
    document = build(tmp_path)
    assert document["run"]["world_size"] == 3
    assert document["run"]["attempts"][0]["last_step"] is None
    assert "Ranks 0-2 of 3 left no record" in titles(document, "warning")
    assert document["run"]["facts"] == [["run", "command", "train.py", ""]]
    assert document["lanes"]["steps"] == document["curves"] == document["heat"]["ranks"] == []
    assert render(document)


def test_rank_that_never_came_to_a_step(tmp_path: Path) -> None:
    _SLOW.run(tmp_path)
    begun = (tmp_path / "rank-1.jsonl").read_text().splitlines(True)[0]
    (tmp_path / "rank-1.jsonl").write_text(begun + '{"step":1,"count":1,"wa')
    document = build(tmp_path)
    assert document["heat"]["ranks"] == [0, 1]
    assert document["heat"]["wall_us"][1] == [None] * 8
    assert [share["rank"] for share in document["overlap"]["ranks"]] == [0]
    (tmp_path / "rank-1.jsonl").unlink()
    assert "Rank 1 of 2 left no record" in titles(build(tmp_path), "warning")


def test_run_without_steps_says_so(tmp_path: Path) -> None:
    _SLOW.run(tmp_path)
    for path in tmp_path.glob("rank-*"):
        path.write_text(path.read_text().splitlines(True)[0])
    document = build(tmp_path)
    assert "No step was ended" in titles(document, "note")
    assert document["lanes"]["steps"] == []
    assert render(document)


def test_one_rank_only(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000, world_size=1, moves_us=0).run(tmp_path)
    document = build(tmp_path)
    assert document["run"]["world_size"] == 1
    assert [lane["joins"] for lane in document["lanes"]["steps"]] == [[]] * len(document["lanes"]["steps"])
    assert not titles(document, "warning")


def test_run_that_went_on_with_fewer_ranks(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000, world_size=3, steps=10).run(tmp_path)
    later = World(work_us=lambda rank, step: 1000, world_size=2, steps=20).run(tmp_path / "later").folder
    for rank in (0, 1):
        append_attempt(tmp_path, rank, later, "a/1", cut='{"step":11,"cou')  # it was killed while it wrote
    add_notes(tmp_path, 0, ("replicas", SECOND, {"step": 20, "equal": True, "what": "parameters"}))
    began = began_ns(tmp_path)
    add_launch(
        tmp_path,
        {"launch": "a", "command": [], "time_ns": began - 5, "pid": 1, "host": "elsewhere"},
        {"attempt": "a/0", "world_size": 3, "time_ns": began - 4},
        {"ended": "a/0", "code": -9, "causes": ["rank 2 was killed by SIGKILL"], "time_ns": began + 10**11},
        {"attempt": "a/1", "world_size": 2, "time_ns": began + 2 * 10**11},
    )
    document = build(tmp_path)
    assert [attempt["world_size"] for attempt in document["run"]["attempts"]] == [3, 2]
    assert document["run"]["world_size"] == 2
    assert "Start 1 of 2 failed, and the run was started again" in titles(document, "warning")
    assert "left no record" not in titles(document, "warning")
    assert document["heat"]["ranks"] == [0, 1, 2]
    assert document["heat"]["wall_us"][2][-1] is None
    for lane in document["lanes"]["steps"]:  # rank 2 did these steps too, at another time
        assert [rank["rank"] for rank in lane["ranks"]] == [0, 1]


def test_folder_of_a_training_run_is_found_from_both_ends(tmp_path: Path) -> None:
    full_run(tmp_path / "runs" / "out" / "profile", steps=8)
    for given in (tmp_path / "runs" / "out", tmp_path / "runs" / "out" / "profile", None):
        folder, document = document_in(given, tmp_path / "runs")
        assert folder == tmp_path / "runs" / "out"
        assert document["run"]["steps"] == 8
