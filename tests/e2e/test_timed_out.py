"""An operation of stock torch that times out names the rank it waited for, at work as that may be."""

from __future__ import annotations

import contextlib
import re
import signal
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


_GIVES_UP = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=2 if sys.argv[1] == "collective" else 60))
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
if rank == 1:
    time.sleep(60)
store = dist.distributed_c10d._get_default_store()
store.set_timeout(timedelta(seconds=2))
dist.all_reduce(torch.ones(4)) if sys.argv[1] == "collective" else store.get("of rank 1")
"""


@pytest.mark.parametrize(
    ("what", "waits"),
    [
        ("collective", r"  ranks 0,2 wait in all_reduce float32 \[4\] sum #1 of group WORLD, script\.py:13 <module>"),
        ("key", r"  rank [02] waits in the store \(wait timeout after 2000ms, keys: .*of rank 1\), script\.py:13"),
    ],
    ids=["collective", "key"],
)
def test_what_torch_gives_up_before_it_is_a_hang_names_who_was_not_there(what: str, waits: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_GIVES_UP)
    words = ("run", "--record=off", "--nproc-per-node=3", "script.py", what)
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_EVIDENCE="")) as run:
        said = run.end(1)
    where = r"  rank 1 is not there: at script\.py:10 <module>, unmoved for \d.*\n    issued last: .*\n"
    assert re.search(rf"^lockstep: TIMEOUT in step 1\.  Culprit: rank 1 .*\n{where}{waits}", said, re.MULTILINE), said
    assert said.count("lockstep: TIMEOUT") == 1, said
    assert re.search(r"^lockstep: rank [02] .* failed at script\.py:13: CollectiveTimeout: TIMEOUT", said, re.MULTILINE)


_WAITS = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
print("ready", flush=True)
if dist.get_rank() == 1:
    while True: time.sleep(0.1)  # a signal that comes just before a sleep is handled after it
dist.all_reduce(torch.ones(4))
"""


def test_a_stop_by_the_user_is_nobodys_fault(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_WAITS)
    words = ("run", "--record=off", "--nproc-per-node=3", "script.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_EVIDENCE="")) as run:
        run.await_text(r"(ready\s+){3}")
        run.signal(signal.SIGINT)
        said = run.end(130)
    places = dict(re.findall(r"rank (\d) was interrupted at script\.py:(\d+)$", said, re.MULTILINE))
    assert sorted(places) == ["0", "1", "2"], said
    for rank, line in places.items():  # or on its way there from what it printed: a machine may be busy
        assert line in ("7", "8", "9" if rank == "1" else "10"), said
    assert "Traceback" not in said
    assert "ulprit" not in said
    assert said.endswith("lockstep: stopped\n")
