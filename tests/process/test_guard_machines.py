"""A stock script on two machines, which are two launchers that meet on loopback: each guard sees the other's rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_runs import Run
from ports import free_port

pytestmark = pytest.mark.limit_s(120)

_PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist

case = sys.argv[1]
dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
tensor = torch.ones(4)
for step in range(300 if case == "skip" else 9):
    is_culprit = (dist.get_rank(), step) == (0 if case == "kill 0" else 1, 5)
    if is_culprit and "kill" in case:
        os.kill(os.getpid(), signal.SIGKILL)
    while is_culprit and case == "hang" and not os.path.exists("go"):
        time.sleep(0.1)
    if not (is_culprit and case == "skip"):
        dist.all_reduce(tensor)  # all
    time.sleep(0.02)
    optimizer.step()
"""
_LINE = next(number for number, line in enumerate(_PROGRAM.splitlines(), 1) if "# all" in line)
Pair = tuple[Run, Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Pair]]:
    """One launcher with rank 0 and the store, one with rank 1."""
    (tmp_path / "train.py").write_text(_PROGRAM)
    runs: list[Run] = []

    def both(case: str) -> Pair:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        words = ("run", "--nnodes=2", "--rdzv-backend=c10d", endpoint, "--rdzv-id=two")
        words = (*words, "--local-addr=127.0.0.1", "--record=off")
        for holds in ("true", "false"):
            with_store = f"--rdzv-conf=is_host={holds}"
            runs.append(
                Run(
                    tmp_path, *words, with_store, "train.py", case, warm=True, LOCKSTEP_HANG_S="2", LOCKSTEP_EVIDENCE=""
                )
            )
        return runs[0], runs[1]

    yield both
    for run in runs:
        run.close()


def test_a_skipped_collective_is_named_on_both_machines(start: Callable[[str], Pair]) -> None:
    texts = [run.end(1) for run in start("skip")]
    assert all("MISMATCH in step 6, group WORLD.  Culprit: rank 1" in text for text in texts)
    assert all(f"rank 1 skipped all_reduce float32 [4] sum at train.py:{_LINE} <module>" in text for text in texts)


@pytest.mark.parametrize("victim", [0, 1], ids=["with the store", "the other"])
def test_who_is_killed_alone_on_its_machine_is_named_on_the_other(start: Callable[[str], Pair], victim: int) -> None:
    runs = start(f"kill {victim}")
    texts = [run.end(1) for run in runs]
    assert re.search(rf"rank {victim} \(pid \d+, .+\) was killed by SIGKILL$", texts[victim], re.M)
    text = " ".join(texts[1 - victim].split())
    assert f"PeerFailed: GONE in step 6. Culprit: rank {victim} (host " in text
    assert re.search(rf"  rank {victim} \(pid \d+\) was killed by SIGKILL\n", texts[1 - victim])


def test_a_hang_is_named_across_machines(start: Callable[[str], Pair], tmp_path: Path) -> None:
    holder, other = start("hang")
    holder.await_text(r"HANG: nothing has moved for .* in step 6\.  Culprit: rank 1 \(host .*, pid \d+\)\n")
    holder.await_text(rf"rank 1 is not there: at train\.py:{_LINE - 2} <module>")
    holder.await_text(rf"rank 0 waits in all_reduce .*train\.py:{_LINE} <module>")
    (tmp_path / "go").touch()
    for run in (holder, other):
        run.end(0)
