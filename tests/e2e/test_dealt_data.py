"""How stock programs share out their samples under `lockstep run`: what loses some is said, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_runs import Run

_EPOCHS = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset
from torch.utils.data import WeightedRandomSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
data = TensorDataset(torch.arange(400.0).reshape(100, 4))


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(24):
            yield torch.full((4,), float(number * size + rank)), torch.ones(1)


class Drawing(Sampler):
    def __init__(self, seed):
        self.seed, self.epoch, self.shuffle = seed, 0, True

    def __iter__(self):
        return iter(torch.randint(100, (24,), generator=torch.Generator().manual_seed(self.seed)).tolist())

    def __len__(self):
        return 24


class Curriculum(DistributedSampler):
    def __iter__(self):
        return iter(torch.randperm(100)[:24].tolist())

    def __len__(self):
        return 24


def sampler_of(way):
    if way == "seed":
        return DistributedSampler(data, seed=40 + rank)
    if way in ("epoch", "dealt"):
        return DistributedSampler(data, seed=7)
    if way == "shuffle":
        return DistributedSampler(data, shuffle=rank == 0)
    if way == "weighted":
        return WeightedRandomSampler(torch.rand(100), 24, generator=torch.Generator().manual_seed(rank))
    if way in ("alone", "all"):  # each rank shuffles for itself
        return DistributedSampler(data, num_replicas=1, rank=0, seed=rank)
    return Drawing(rank) if way == "drawing" else Curriculum(data, seed=rank)


model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for way in sys.argv[1].split(","):
    if way == "alone":  # and has data of its own
        data = TensorDataset(1000.0 * rank + torch.arange(400.0).reshape(100, 4))
    sampler = None if way == "stream" else sampler_of(way)
    loader = DataLoader(Stream(), 8) if sampler is None else DataLoader(data, 8, sampler=sampler)
    for epoch in range(2):
        if isinstance(sampler, DistributedSampler) and (way != "epoch" or rank == 0):
            sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            model(batch[0]).sum().backward()
            optimizer.step()
dist.destroy_process_group()
"""
_HEAD = "lockstep: DATA: ranks share out the samples by different rules."


def said(folder: Path, ways: str) -> str:
    (folder / "script.py").write_text(_EPOCHS)
    return " ".join(Run(folder, "run", "--nproc-per-node", "2", "script.py", ways).end(0).split())


@pytest.mark.limit_s(90)
@pytest.mark.parametrize(
    ("way", "number", "rules"),
    [
        ("seed", 1, "rank 0 by seed 40 in epoch 0 of {0}, rank 1 by seed 41 in epoch 0 of {0}"),
        ("epoch", 2, "rank 0 by seed 7 in epoch 1 of {0}, rank 1 by seed 7 in epoch 0 of {0}"),
        ("shuffle", 1, "rank 0 by seed 0 in epoch 0 of {0}, rank 1 by no shuffle of {0}"),
    ],
    ids=["seed", "epoch", "shuffle"],
)
def test_rules_that_differ_are_said(way: str, number: int, rules: str, tmp_path: Path) -> None:
    output = said(tmp_path, way)
    assert output.count(_HEAD) == 1
    assert f"{_HEAD} in pass {number} of the loop at script.py:65 <module>" in output
    assert rules.format("100 samples") in output


@pytest.mark.limit_s(90)
def test_ranks_that_each_read_all_are_named(tmp_path: Path) -> None:
    output = said(tmp_path, "all")
    assert "lockstep: DATA: ranks each read the whole dataset. in the loop at script.py:65 <module>" in output
    assert "ranks 0, 1: each goes over all 100 samples in an order of its own: every sample counts 2 times." in output


@pytest.mark.limit_s(90)
def test_what_is_meant_so_is_left_alone(tmp_path: Path) -> None:
    assert "DATA" not in said(tmp_path, "dealt,weighted,drawing,curriculum,stream,alone")
