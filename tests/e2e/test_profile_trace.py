"""The trace of real runs, as chrome://tracing and Perfetto must have it: of torch's classes and ours, and cut short."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_runs import Run
from trace_format import check_trace

pytestmark = pytest.mark.limit_s(120)

_SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
from {module} import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]), bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, {steps} + 1):
    time.sleep(0.005 * rank)
    model(torch.ones(4, 64)).square().mean().backward()
    there = torch.zeros(8)
    coming = dist.irecv(there, (rank - 1) % size)  # under way, while the rank works on
    dist.send(torch.ones(8), (rank + 1) % size)
    if step == {killed} and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.ones(64, 64).mm(torch.ones(64, 64))
    coming.wait()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """The trace of steps 4 to 6 of a run, which is checked, and what the run said."""
    runs: list[Run] = []

    def go(size: int, module: str, steps: int = 8, killed: int = 0, code: int = 0) -> dict[str, Any]:
        text = _SCRIPT.format(module=module, steps=steps, killed=killed)
        (tmp_path / "traced.py").write_text(text)
        words = ("--nproc-per-node", str(size), "--profile", "steps=4:6", "--record", "record", "traced.py")
        runs.append(Run(tmp_path, "run", *words, warm=True, LOCKSTEP_HANG_S="60"))
        said = runs[-1].end(code)
        assert "Exception" not in said
        trace = json.loads((tmp_path / "record" / "trace.json").read_text())
        check_trace(trace)
        return trace

    yield go
    for run in runs:
        run.close()


def slices_of(trace: dict[str, Any], name: str) -> list[int]:
    """How many of that name each rank has."""
    found = [event["pid"] for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == name]
    return [found.count(rank) for rank in range(trace["otherData"]["ranks"])]


@pytest.mark.parametrize(("size", "module"), [(3, "torch.nn.parallel"), (2, "lockstep")])
def test_trace_of_some_steps(traced: Callable[..., dict[str, Any]], size: int, module: str) -> None:
    trace = traced(size, module)
    assert slices_of(trace, "gloo:recv") == [3] * size
    assert slices_of(trace, "aten::mm")[0] >= 3
    arrows = [event for event in trace["traceEvents"] if event["name"] == "last to arrive"]
    assert {event["pid"] for event in arrows} == set(range(size))


def test_trace_of_a_run_that_ends_within_the_window(traced: Callable[..., dict[str, Any]]) -> None:
    trace = traced(2, "torch.nn.parallel", steps=5)
    assert slices_of(trace, "gloo:recv") == [2, 2]


def test_trace_of_a_run_one_of_whose_ranks_was_killed_in_the_window(traced: Callable[..., dict[str, Any]]) -> None:
    trace = traced(3, "torch.nn.parallel", killed=5, code=1)
    counts = slices_of(trace, "aten::addmm")
    assert counts[1] == 0, "whoever is killed writes nothing"
    assert counts[0] >= 3
    assert counts[2] >= 3
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == ["rank 0", "rank 1", "rank 2"]
