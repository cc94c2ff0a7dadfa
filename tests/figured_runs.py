"""Real runs of odd sizes that count for themselves what the page of their report has to show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from command_runs import Run
from lockstep.data.permutation import KeyedPermutation

SAMPLES, SEED = 103, 5  # of the stock run
STEPS, BEFORE, CONTEXT, BATCH = 18, 7, 8, 6  # of the training; by two ranks, then by three
WARM_UP = 2
_SCRIPT = f"""
import json, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = range({SAMPLES})
loader = DataLoader(data, 8, sampler=(sampler := DistributedSampler(data, seed={SEED})))
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
used, ended_s = [], []
for epoch in range(3):
    sampler.set_epoch(epoch)
    for ids in loader:
        used.append([epoch, ids.tolist()])
        model(ids[:, None].float()).mean().backward()
        time.sleep(0.02)
        optimizer.step()
        ended_s.append(time.perf_counter())
with open(f"counted-{{dist.get_rank()}}.json", "w") as file:
    json.dump([used, ended_s], file)
dist.destroy_process_group()
"""


def document_in(page: Path) -> dict[str, Any]:
    """What the page of a report shows."""
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def stock_run(folder: Path) -> Path:
    """The page of two ranks of stock torch, with 103 samples in batches of 8, the last one of 4. Each leaves
    counted-RANK.json: the samples of each step with their epoch, and when each step had ended.
    """
    (folder / "script.py").write_text(_SCRIPT)
    Run(folder, "run", "--nproc-per-node=2", "--record=kept", "script.py", warm=True).end(0)
    return folder / "kept" / "report.html"


def resumed_training(folder: Path) -> Path:
    """The folder of a training: 7 steps by two ranks, 11 by three, through two epochs of 49 windows and a bit."""
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_bytes(bytes(97 + n * n % 97 % 26 for n in range(400)))
    words = [
        *("train", "--data.path=text", "--data.val_fraction=0.02", "--out=out", "--resume=auto"),
        *("--model.layers=1", "--model.width=8", f"--model.context={CONTEXT}", f"--train.batch={BATCH}"),
        *("--train.log_every=1", "--train.eval_every=0", "--train.sample_tokens=0", "--checkpoint.every=1000"),
    ]
    Run(folder, *words, "-n", "2", f"--train.steps={BEFORE}", warm=True).end(0)
    Run(folder, *words, "-n", "3", f"--train.steps={STEPS}", warm=True).end(0)
    return folder / "out"


def windows_dealt(length: int, seed: int) -> list[list[list[int]]]:
    """By epoch and rank, what `resumed_training` has to use: the stream of shuffled epochs, dealt place by place."""
    epochs = -(-STEPS * BATCH // length)
    due: list[list[list[int]]] = [[[], [], []] for _ in range(epochs)]
    orders = [KeyedPermutation(length, seed, epoch)(np.arange(length)).tolist() for epoch in range(epochs)]
    for place in range(STEPS * BATCH):
        step, within = divmod(place, BATCH)
        epoch, at = divmod(place, length)
        due[epoch][within // (BATCH // (2 if step < BEFORE else 3))].append(orders[epoch][at])
    return due


def assert_grid_shows(cells: Sequence[Sequence[float]], due: Mapping[int, Sequence[int]]) -> None:
    """Each cell (rank, first, last, uses of each) of a grid says how often that rank used these samples: see `due`."""
    seen = dict.fromkeys(due, 0)
    for rank, first, last, times in cells:
        uses = sum(first <= sample <= last for sample in due[int(rank)])
        assert round(times * (last - first + 1), 3) == uses, f"rank {rank}, samples {first} to {last}"
        seen[int(rank)] += uses
    assert seen == {rank: len(samples) for rank, samples in due.items()}
