"""Ranks that are started by hand, without a launcher: stock calls after `lockstep.init` quote who has gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import warm_programs

pytestmark = pytest.mark.limit_s(90)

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
    program = _BY_HAND + way + "".join(f"    {line}\n" for line in lines)
    _, said = warm_programs.run_by_hand(tmp_path, program, 60.0)
    assert re.search(pattern, said), said
