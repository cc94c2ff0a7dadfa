"""Are the grid of the data and the rates on a page true? Counted once more, by the script and as it was promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from figured_runs import (
    BATCH,
    BEFORE,
    CONTEXT,
    SAMPLES,
    SEED,
    STEPS,
    WARM_UP,
    assert_grid_shows,
    document_in,
    resumed_training,
    stock_run,
    windows_dealt,
)

pytestmark = pytest.mark.limit_s(120)


def test_page_of_a_stock_script_has_what_it_counted_itself(tmp_path: Path) -> None:
    document = document_in(stock_run(tmp_path))
    counted = [json.loads((tmp_path / f"counted-{rank}.json").read_text()) for rank in (0, 1)]
    epochs = document["coverage"]["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2]
    for number, epoch in enumerate(epochs):
        due: dict[int, list[int]] = {}
        for rank, (used, _) in enumerate(counted):
            due[rank] = [sample for each, samples in used if each == number for sample in samples]
            sampler = DistributedSampler(TensorDataset(torch.arange(SAMPLES)), 2, rank, seed=SEED)
            sampler.set_epoch(number)
            assert due[rank] == list(sampler)
        assert_grid_shows(epoch["cells"], due)
        assert (epoch["sealed"], epoch["length"], epoch["repeated"]) == (True, SAMPLES, 1)
        assert epoch["samples"] == len(due[0]) + len(due[1]) == SAMPLES + 1

    curves = {curve["name"]: curve for curve in document["curves"]}
    rates, walls = curves["samples/s"], document["heat"]["wall_us"]
    assert rates["steps"] == list(range(1, 22))
    for at, rate in enumerate(rates["values"]):
        due_rate = sum(len(used[at][1]) / (walls[rank][at] / 1e6) for rank, (used, _) in enumerate(counted))
        assert rate == pytest.approx(due_rate, rel=1e-3), f"step {at + 1}"
    by_own_clocks = 0.0
    for used, ended_s in counted:
        samples = sum(len(ids) for _, ids in used[WARM_UP:])
        by_own_clocks += samples / (ended_s[-1] - ended_s[WARM_UP - 1])
    assert document["overlap"]["samples_per_s"] == pytest.approx(by_own_clocks, rel=0.3)  # half, or twice, is neither


def test_page_of_a_training_that_went_on_with_more_ranks_has_what_was_promised(tmp_path: Path) -> None:
    out = resumed_training(tmp_path)
    document = document_in(out / "report.html")
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    length, seed = lines[0]["length"], lines[0]["seed"]
    assert length % BATCH
    assert length % 2, "else no epoch ends within a step, or in a whole one"
    due = windows_dealt(length, seed)
    epochs = document["coverage"]["epochs"]
    assert len(epochs) == len(due) == 3
    for epoch, by_rank in zip(epochs, due, strict=True):
        assert_grid_shows(epoch["cells"], {rank: used for rank, used in enumerate(by_rank) if used})
        assert epoch["samples"] == sum(map(len, by_rank))
        assert epoch["sealed"] == (epoch["samples"] == length)

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row for row in rows if "loss" in row}
    assert [logged[step]["tokens"] for step in logged] == [CONTEXT * BATCH * step for step in range(1, STEPS + 1)]
    overlap = document["overlap"]
    counted = STEPS - BEFORE - WARM_UP  # of steps that all ranks know, none of those that warm up
    assert [rank["steps"] for rank in overlap["ranks"]] == [counted] * 3
    fastest_s = min(rank["wall_us"] for rank in overlap["ranks"]) / 1e6
    assert overlap["tokens_per_s"] == pytest.approx(CONTEXT * BATCH / fastest_s, rel=1e-3)
    training_s = sum(CONTEXT * BATCH / logged[step]["tokens_per_s"] for step in range(STEPS - counted + 1, STEPS + 1))
    assert overlap["tokens_per_s"] == pytest.approx(CONTEXT * BATCH * counted / training_s, rel=0.4)
