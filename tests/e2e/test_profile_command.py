"""`lockstep profile` on real runs of two ranks, the second of which is 20 ms late in every step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_runs import Run
from lockstep.observe.profile.verdict import judge
from lockstep.observe.profile.waits import matched
from whole_records import read_run

pytestmark = pytest.mark.limit_s(120)

_STEPS = 24
_STOCK = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

def late(rows):
    if dist.get_rank() == 1:
        time.sleep(0.02)
    return torch.stack([row for row, in rows])

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(8 * {steps}, 32)), batch_size=8, collate_fn=late)
for rows in loader:
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
_OURS = """
import os, sys, time
from lockstep.cli import main
from lockstep.data.loader import TokenLoader

before = TokenLoader.step_at

def late(*words):
    if os.environ["RANK"] == "1":
        time.sleep(0.02)
    return before(*words)

TokenLoader.step_at = late
sys.exit(main('''train --data.path text --train.steps {steps} --train.batch 4 --train.sample_tokens 0 --out out
    --model.width 16 --model.layers 1 --model.heads 2 --model.context 16 --data.vocab_size 260'''.split()))
"""


_PAIRS = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
model = DDP(torch.nn.Linear(8, 8), process_group=pairs[rank // 2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    if rank == 3:
        time.sleep(0.02)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def go(*words: str) -> Run:
        runs.append(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="60"))
        return runs[-1]

    yield go
    for run in runs:
        run.close()


def check_late_rank(folder: Path, phase: str) -> None:
    """Rank 1 is named, with the time that it cost and the phase that it spent it in; the phases are the step."""
    run = read_run(folder)
    for record in run.ranks.values():
        assert [line.step for line in record.lines] == list(range(1, _STEPS + 1))
        assert all(line.wall_us == sum(line.phases_us) for line in record.lines)
        assert all(abs(line.wall_us - line.longest_us) <= len(line.phases_us) for line in record.lines)
    assert all(line.phase(phase) >= 20_000 for line in run.ranks[1].lines)
    verdict = judge(run)
    waited_s = sum(pair.waited_s for pair in verdict.waits.pairs if (pair.rank, pair.last) == (0, 1))
    assert waited_s > 0.2 * 0.020 * _STEPS  # while other programs run, rank 0 is late by itself too
    late = next(advice for advice in verdict.advice if advice.kind == "straggler")
    assert late.rank == 1
    assert f"in {phase}" in late.text
    answers = {answer.name: answer for answer in verdict.what_ifs}
    assert answers["data always there"].step_ms < answers["as recorded"].step_ms - 10
    assert answers["rank 1 as fast as the others"].step_ms < answers["as recorded"].step_ms - 10
    assert not any(answer.is_least for answer in verdict.what_ifs)


def test_ranks_that_average_among_themselves_wait_for_nobody_else(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(_PAIRS)
    said = start("run", "--nproc-per-node", "4", "pairs.py").end(0)
    folder = re.search(r"lockstep: report: (\S+)/report.html", said)
    assert folder is not None, said
    run = read_run(tmp_path / folder[1])
    waited_s = {(pair.rank, pair.last): pair.waited_s for pair in judge(run).waits.pairs}
    assert waited_s.keys() <= {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert waited_s[2, 3] > 0.1
    ends = {len(ops) for ops, _, _ in matched(run) if next(iter(ops.values())).site == "pairs.py:13 <module>"}
    assert ends == {2}


def test_stock_ddp(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "stock.py").write_text(_STOCK.replace("{steps}", str(_STEPS)))
    said = start("run", "--nproc-per-node", "2", "--profile", "steps=10:12", "stock.py").end(0)
    folder = re.search(r"lockstep: report: (\S+)/report.html", said)
    assert folder is not None, said
    check_late_rank(tmp_path / folder[1], "data")
    buckets = [note.fields for note in read_run(tmp_path / folder[1]).ranks[0].notes if note.kind == "buckets"]
    assert [note["step"] for note in buckets] == list(range(4, 12))
    size = 4 * 4 * (32 * 32 + 32)
    assert {(note["count"], note["bytes"], note["last_bytes"]) for note in buckets} == {(1, size, size)}
    trace = json.loads((tmp_path / folder[1] / "trace.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"] if event["name"] == "last to start"} == {"s", "f"}
    names = {(event["pid"], event["name"]) for event in trace["traceEvents"]}
    for rank in (0, 1):
        assert {(rank, "aten::addmm"), (rank, "all that DistributedDataParallel waits for")} <= names
    arrows = {(e["pid"], e["ph"]) for e in trace["traceEvents"] if e["name"] == "last to arrive"}
    assert {(1, "s"), (0, "f")} <= arrows
    shown = start("profile").end(0)  # the newest in runs/
    assert re.search(r"verdict  straggler: rank 1 is late", shown)
    assert re.search(r"rank 0 waited \d\.\d\d s for rank 1, mostly at stock\.py:16", shown)


def test_our_ddp_over_a_group_of_torchs(start: Callable[..., Run], tmp_path: Path) -> None:
    ours = _STOCK.replace('"gloo"', '"lockstep"').replace("from torch.nn.parallel import", "from lockstep import")
    (tmp_path / "ours.py").write_text(ours.replace("{steps}", str(_STEPS)))
    start("run", "--nproc-per-node", "2", "--record", "record", "ours.py").end(0)
    check_late_rank(tmp_path / "record", "data")
    ops = [op for line in read_run(tmp_path / "record").ranks[0].lines[2:] for op in line.ops or ()]
    assert {op.group for op in ops} == {"lockstep 0"}
    assert any(op.bytes == 4 * 4 * (32 * 32 + 32) and op.site.startswith("ours.py:16") for op in ops)


def test_our_trainer_under_run(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(_OURS.replace("{steps}", str(_STEPS)))
    (tmp_path / "text").write_text("the ranks of a run wait for the last of them. " * 400)
    said = start("run", "--nproc-per-node", "2", "ours.py").end(0)
    assert "nothing is recorded" not in said
    assert not list((tmp_path / "runs").glob("*/rank-*")) if (tmp_path / "runs").exists() else True
    check_late_rank(tmp_path / "out", "data")
    shown = start("profile", "out", "--peak_tflops", "0.1").end(0)
    assert re.search(r"MFU \d+\.\d% \(of 0\.1 TFLOP/s per rank, as given\)", shown)


def test_folder_without_a_record(start: Callable[..., Run]) -> None:
    assert "does not exist" in start("profile", "nowhere").end(2)
