"""Programs for two NCCL ranks, which share one GPU: NCCL takes ranks that name different hosts for two machines'."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from command_runs import Run

if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)

_HEAD = """\
import os, sys, time
os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
os.environ["CUDA_VISIBLE_DEVICES"] = "0" + "," * int(os.environ["RANK"])  # the same one, by another name
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
RANK, GPU = int(os.environ["RANK"]), torch.device("cuda", 0)
torch.cuda.set_device(GPU)

def ticks_per_ms():
    torch.cuda._sleep(1000)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record(); torch.cuda._sleep(50_000_000); ended.record(); torch.cuda.synchronize()
    return 50_000_000 / began.elapsed_time(ended)

RATE = ticks_per_ms()

def keep_busy(ms):
    \"\"\"The GPU, for so long, in the order of the stream.\"\"\"
    torch.cuda._sleep(int(ms * RATE))

def layers(width=256, depth=4):
    torch.manual_seed(0)
    parts = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts).to(GPU)
"""


def start(folder: Path, program: str, *words: str, ranks: int = 2, hang_s: int = 3) -> Run:
    """`lockstep run` of a program that finds RANK, GPU, keep_busy and layers; words: flags."""
    (folder / "program.py").write_text(_HEAD + program)
    flags = ("--nproc-per-node", str(ranks), "--hang-limit-s", "15", *words)
    return Run(folder, "run", *flags, "program.py", LOCKSTEP_HANG_S=f"{hang_s}")


def ended(run: Run, exit_code: int) -> str:
    """All that `run` has said, which has to end like that."""
    with contextlib.closing(run):
        return run.end(exit_code)


def line_of(folder: Path, mark: str) -> str:
    """`program.py:7` of the first line that ends with this comment."""
    lines = (folder / "program.py").read_text().splitlines()
    return f"program.py:{next(at for at, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"
