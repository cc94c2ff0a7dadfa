"""What `lockstep train` leaves of a run beside its steps, for every way to cut the model; ranks are threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401 (which cannot be imported first by two threads)

from lockstep.comm.communicator import Communicator
from lockstep.observe.layout import UNITS_MAX, folded, held_bytes, layout_of, strategy_of
from lockstep.observe.profile.run_facts import run_facts
from lockstep.observe.profile.run_record import Run
from lockstep.observe.tally import Tally, tally_from, whole_tally
from lockstep.parallel.strategy import Sharding
from lockstep.testing.worlds import run_threads
from lockstep.train.config import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.train.loop import train
from whole_records import read_run


class Never:
    def arm(self) -> None:
        pass

    def is_set(self) -> bool:
        return False


def trained(folder: Path, world_size: int, sharding: Sharding, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i % 97} bottles\n" for i in range(30)))
    run = RunConfig(
        out=folder / "out",
        model=ModelConfig(layers=1, heads=1, width=8, context=8),
        data=DataConfig(path=folder / "text.txt", val_fraction=0.1),
        train=TrainConfig(steps=6, batch=24, log_every=1, eval_every=4, sample_tokens=0, sharding=sharding),
        optim=OptimConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(every=3),
    )

    def one(comm: Communicator) -> None:
        train(run, comm, Never())

    run_threads(world_size, one, timeout_s=60)
    return read_run(run.out)


def notes_of(run: Run, rank: int, kind: str) -> list[dict[str, Any]]:
    return [dict(one.fields) for one in run.ranks[rank].notes if one.kind == kind]


@pytest.mark.parametrize("sharding", [s for s in get_args(Sharding) if s != "hybrid"])
def test_layout_says_what_each_rank_keeps(sharding: Sharding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3
    run = trained(tmp_path, size, sharding, monkeypatch)
    layouts = [notes_of(run, rank, "layout") for rank in range(size)]
    assert all(len(found) == 1 and found[0]["step"] == 1 for found in layouts)
    rows = [{name: (whole, here) for name, _, _, whole, here in found[0]["units"]} for found in layouts]
    memory = [found[0]["memory"] for found in layouts]
    state = sum(one["optimizer"] for one in memory)
    whole = sum(whole for whole, _ in rows[0].values())
    assert {name.split(".")[0] for name in rows[0]} == {"transformer"}
    for name in rows[0]:
        held = [row[name][1] for row in rows]
        assert sum(held) == rows[0][name][0] * (1 if sharding in ("gradients", "full") else size)
    assert [one["parameters"] for one in memory] == [sum(here for _, here in row.values()) for row in rows]
    copies = size if sharding == "none" else 1
    assert 2 * whole * copies <= state < 2 * whole * copies + 100 * size * len(rows[0])  # two moments, and step counts
    words = {"none": "DistributedDataParallel", "optimizer": "DistributedDataParallel + ShardedOptimizer"}
    assert layouts[0][0]["strategy"] == words.get(sharding, "fully_shard + ShardedOptimizer")


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_coverage_replicas_and_facts(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path, world_size, "none", monkeypatch)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines if "loss" in line}
    values = notes_of(run, 0, "values")
    seen = {one["step"]: one for one in values if "loss" in one}
    assert list(seen) == list(logged) == list(range(1, 7))
    for step, one in seen.items():
        for name in ("loss", "lr", "grad_norm"):
            assert one[name] == pytest.approx(logged[step][name], rel=1e-6)
    assert {one["step"] for one in values if "val_loss" in one} == {4, 6}
    assert [one["step"] for one in notes_of(run, 0, "replicas")] == ([] if world_size == 1 else [3, 6])
    assert all(one["equal"] for one in notes_of(run, 0, "replicas"))

    last = [{one["epoch"]: one for one in notes_of(run, rank, "coverage")} for rank in range(world_size)]
    whole = whole_tally(last[0][0]["length"])
    assert len(last[0]) >= 2  # the text is passed over more than once
    for epoch, one in last[0].items():
        own = [tally_from(bytes.fromhex(each[epoch]["digest"])) for each in last]
        total = tally_from(bytes.fromhex(one["total"]["digest"]))
        assert sum(own, Tally()) == total
        assert [sum(each[epoch]["bins"]) for each in last] == [tally.count for tally in own]
        assert tally_from(bytes.fromhex(one["whole"])) == whole
        assert (one["total"]["verdict"] == "exact") == (total == whole)
        if total != whole:
            assert (epoch, one["total"]["verdict"]) == (max(last[0]), f"{total.count} of {whole.count} samples so far")

    facts = [notes_of(run, rank, "facts") for rank in range(world_size)]
    assert all(len(found) == 1 for found in facts)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert facts[0][0]["config"] == config
    assert facts[0][0]["config_sha256"] == run_facts({}, [], config=config)["config_sha256"]
    assert len(facts[0][0]["data"]) == 64


def test_units_of_a_large_model_are_its_modules() -> None:
    rows = [[f"layers.{n}.{part}.weight", 3, "float32", 12, 6] for n in range(90) for part in ("a", "b", "c")]
    found = folded(rows)
    assert found == folded(found)
    assert [row[0] for row in found] == [f"layers.{n}" for n in range(90)]
    assert found[0] == ["layers.0", 9, "float32", 36, 18]
    flat = folded([[f"p{n}", 1, "int8" if n % 2 else "int64", 1, 1] for n in range(1000)])
    assert len(flat) == UNITS_MAX
    assert flat[-1] == ["others", 801, "int8, int64", 801, 801]
    assert folded(rows[:5]) == rows[:5]


def test_layout_without_a_module_has_what_the_optimizer_has() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    named, unnamed = layout_of(model, optimizer), layout_of(None, optimizer)
    assert [row[0] for row in named["units"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [row[0] for row in unnamed["units"]] == [f"parameter {n}" for n in range(4)]
    assert named["memory"]["gradients"] == named["memory"]["parameters"] == 4 * (15 + 5 + 5 + 5)
    assert named["memory"]["optimizer"] == 2 * 120 + 4 * 4
    assert named["memory"]["buffers"] == 4 * 5 * 2 + 8
    assert (unnamed["memory"]["buffers"], unnamed["strategy"], named["device"]) == (0, "", "cpu")
    assert strategy_of([nn.DataParallel(model)], optimizer) == ""
    assert held_bytes({"a": [torch.zeros(3), None, 5], "b": (torch.zeros(2, dtype=torch.int8),)}) == 14
