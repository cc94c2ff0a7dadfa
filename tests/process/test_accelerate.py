"""A script of Hugging Face's Accelerate under `lockstep run`: nothing is in its way, and its samples are counted."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from command_runs import Run
from lockstep.observe.report.proofs import coverage_of, replicas_of
from lockstep.observe.report.source import RunReader

pytestmark = [
    pytest.mark.limit_s(120),
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed"),
]

_SCRIPT = """
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(67, 5))
model = torch.nn.Linear(5, 3)
model, optimizer, loader, held_out = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), DataLoader(data, 4, shuffle=True), DataLoader(data, 4)
)

def train(batches):
    for (x,) in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

train(loader)
with torch.no_grad():
    found = [accelerator.gather_for_metrics(model(x)) for (x,) in held_out]
assert len(torch.cat(found)) == 67
accelerator.save_state("saved")
accelerator.wait_for_everyone()
accelerator.load_state("saved")
train(skip_first_batches(loader, 5))
train(loader)
accelerator.end_training()
"""


def test_samples_of_accelerates_loaders_are_counted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    run = Run(tmp_path, "run", "--nproc-per-node", "2", "script.py", warm=True, LOCKSTEP_HANG_S="60")
    try:
        said = run.end(0)
    finally:
        run.close()
    assert re.fullmatch(r"\s*lockstep: report: runs/\S+/report.html\s*", said), said
    (folder,) = (tmp_path / "runs").iterdir()
    assert "Each sample was used exactly once in 2 epochs" in (folder / "report.html").read_text()
    source = RunReader(folder).read()
    coverage, replicas = coverage_of(source), replicas_of(source)
    assert coverage is not None
    assert replicas is not None
    assert replicas["sealed_until"] == 5 + 2 + 5  # two batches a step, and what is left at the end of a pass
    names = ("epoch", "length", "samples", "repeated", "earlier", "twice", "missing", "sealed", "running")
    epochs: list[tuple[Any, ...]] = [tuple(epoch[name] for name in names) for epoch in coverage["epochs"]]
    assert epochs == [
        (0, 67, 72, 5, 0, 0, 0, True, False),
        (1, 67, 32, 5, 40, 0, 0, False, False),
        (2, 67, 72, 5, 0, 0, 0, True, False),
    ]
