"""Faults and waits that are not in the table: who is named, and what is not said."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

import warm_programs
from command_runs import Run, complaints

pytestmark = pytest.mark.limit_s(90)

_HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""
_TRAIN = """
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(1, 41):
    try:
        if rank == 1 and step == 1:
            raise ValueError("broken sample")
        ddp(torch.randn(8, 4)).square().mean().backward()
    except ValueError:
        pass
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""
_SAID = {  # name -> ranks, program, what is said
    "a model of another dtype, whose rank Gloo aborts": (
        2, "DDP(torch.nn.Linear(4, 4, dtype=torch.float64 if rank == 0 else torch.float32))  # here\ntime.sleep(1)",
        r"MODELS differ.*Culprits: ranks 0,1\n.*'weight'(?s:.*)wrapped at train\.py:HERE",
    ),
    "other buffers": (
        4, "norm = torch.nn.BatchNorm1d(4, track_running_stats=rank != 3)\nmodel = torch.nn.Sequential(norm)\n"
        "DDP(model)  # here\ntime.sleep(1)",
        r"MODELS differ.*Culprit: rank 3 (?s:.*)wrapped at train\.py:HERE",
    ),
    "one call too many at the end of a step": (
        3, "weight = torch.nn.Parameter(torch.ones(2, 4))\noptimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for step in range(1, 80):\n    weight.grad = torch.ones(2, 4)\n    dist.all_reduce(weight.grad)\n"
        "    if rank == 1 and step == 50:\n        dist.all_reduce(torch.ones(3))  # here\n"
        "    optimizer.step()\n    time.sleep(0.01)",
        r"MISMATCH in step 50.*Culprit: rank 1 "
        r"(?s:.*)rank 1 alone issued all_reduce float32 \[3\] sum at train\.py:HERE",
    ),
    "a call of a few ranks that one skips": (
        3, "group = dist.new_group([1, 2])\nweight = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\nfor step in range(1, 60):\n    dist.all_reduce(torch.ones(2))\n"
        "    if rank == 1 or rank == 2 and step != 10:\n        dist.all_reduce(torch.ones(5), group=group)  # here\n"
        "    weight.grad = torch.ones(3)\n    optimizer.step()",
        r"DEADLOCK in step 11.*Culprit: rank 2\n(?s:.*)rank 1 waits in .* of group 1 \[1, 2\], train\.py:HERE"
        r"(?s:.*)rank 2 is in step 11 already",
    ),
    "groups made for other ranks": (
        3, "dist.new_group([0, 1] if rank != 1 else [1, 2])  # here",
        r"MISMATCH.*Culprit: rank 1 (?s:.*)differ in ranks\n(?s:.*)rank 1: new_group \[1, 2\] at train\.py:HERE",
    ),
    "a backward that is left out in the first step": (3, _TRAIN, r"STEPS differ since step 1.*Culprit: rank 1 "),
}  # fmt: skip


@pytest.mark.parametrize("name", _SAID)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    ranks, body, pattern = _SAID[name]
    source = _HEAD + body + "\n"
    (tmp_path / "train.py").write_text(source)
    here = [number for number, line in enumerate(source.splitlines(), 1) if "# here" in line]
    words = ("run", "--record=off", f"--nproc-per-node={ranks}", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="2", LOCKSTEP_EVIDENCE="")) as run:
        run.await_text(pattern.replace("HERE", "".join(map(str, here))))


_QUIET = {
    "accumulation that waits for each sample": (
        "ddp = DDP(torch.nn.Linear(4, 2))\nfor _ in range(2):\n    with ddp.no_sync():\n        for _ in range(5):\n"
        "            ddp(torch.randn(8, 4)).square().mean().backward(); time.sleep(0.7 * rank)\n"
        "    ddp(torch.randn(8, 4)).square().mean().backward()"
    ),
    "a checkpoint into what takes nothing for long": (
        "import subprocess\nif rank == 0:\n"
        "    to = subprocess.Popen(['sh', '-c', 'sleep 5; cat > /dev/null'], stdin=subprocess.PIPE)\n"
        "    torch.save({'weights': torch.zeros(3_000_000)}, to.stdin)\ndist.barrier()"
    ),
}


@pytest.mark.parametrize("name", _QUIET)
def test_nothing_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{_HEAD}{_QUIET[name]}\ndist.destroy_process_group()\n")
    words = ("run", "--record=off", "--nproc-per-node=2", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="1", LOCKSTEP_EVIDENCE="")) as run:
        assert complaints(run.end(0)) == []


_BY_HAND = """
import os, signal, sys
import torch, torch.distributed as dist, lockstep
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
rank, comm = dist.get_rank(), lockstep.init(verbose=False)
"""


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ("if rank == 0: dist.barrier()", "PeerFailed: FINISHED too early.*Culprit: rank 1 "),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()", "PeerFailed: GONE in.*Culprit: rank 1 "),
    ],
)
@pytest.mark.parametrize("way", ["with comm:\n", "if True:\n"])
def test_stock_calls_after_init_quote_who_has_gone(way: str, body: str, pattern: str, tmp_path: Path) -> None:
    lines = f"dist.all_reduce(torch.ones(4))\n{body}".splitlines()
    (tmp_path / "train.py").write_text(_BY_HAND + way + "".join(f"    {line}\n" for line in lines))
    environ = {
        "PATH": os.environ["PATH"],
        "LOCKSTEP_EVIDENCE": "",
        "OMP_NUM_THREADS": "1",
        "RANK": "",
        "WORLD_SIZE": "",
    }
    environ = {name: value for name, value in environ.items() if value or name == "LOCKSTEP_EVIDENCE"}
    words = ["train.py", str(tmp_path / "meeting")]
    ranks = [
        warm_programs.start(tmp_path, [*words, str(rank)], environ, tmp_path / f"stderr-{rank}") for rank in range(2)
    ]
    for process in ranks:
        process.join(60.0)
    said = (tmp_path / "stderr-0").read_text()
    assert re.search(pattern, said), said
