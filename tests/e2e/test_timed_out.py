"""An operation of stock torch that times out names the rank it waited for, at work as that may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_runs import Run

_LOOPS = """
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=16))
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    while True:
        pass
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.limit_s(120)
def test_a_loop_without_an_end_is_blamed_by_the_last_line_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_LOOPS)
    said = Run(tmp_path, "run", "--nproc-per-node", "2", "script.py", LOCKSTEP_HANG_S="2").end(1)
    assert "lockstep: waiting for rank 1 for" in said
    assert "Likely fix: end that loop" in said
    failed = next(line for line in said.splitlines() if "failed at script.py:12" in line)
    assert "CollectiveTimeout: timed out waiting for rank 1 for" in failed
    assert "is that a loop without an end?" in failed
