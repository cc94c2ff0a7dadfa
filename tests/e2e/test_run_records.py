"""What `lockstep run` leaves of stock scripts: of one that is killed and goes on, of sampled data, of one process."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_runs import Run
from lockstep.observe.profile.run_record import RankRecord
from lockstep.observe.report.lanes import lanes_of
from lockstep.observe.report.source import RunReader
from lockstep.observe.tally import Tally, tally_from
from whole_records import read_run

pytestmark = pytest.mark.limit_s(120)

# a logger whose import or login takes longer than the run: until well after another rank has gone
_SLOW_WANDB = """
import os, time

class Run:
    def log(self, values, step):
        print("logged", step, values, flush=True)

    def finish(self, exit_code):
        print("finished", exit_code, flush=True)

def init(**about):
    while not os.path.exists("gone"):
        time.sleep(0.02)
    time.sleep(3)
    return Run()
"""

_LOGS = """
import os, pathlib, signal, torch, torch.distributed as dist, lockstep
dist.init_process_group("gloo")
for step in range(1, 9):
    dist.all_reduce(torch.ones(3))
    lockstep.log(step, loss=1.0 / step)
    if step == 3:
        dist.barrier()
        if dist.get_rank() == 1:
            pathlib.Path("gone").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""

_COLLECTIVES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for each in range(300):
    dist.all_reduce(torch.ones(3))
for each in range(80):
    dist.send(torch.ones(3), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(3), 0)
dist.barrier()
raise SystemExit(dist.get_rank() * {code})
"""

_LOOKED_AT = """
import threading
from lockstep.observe.process_guard import current_guard
lookout, is_over = current_guard()._lookout, threading.Event()

def look():
    while not is_over.is_set():
        lookout.keep_up()

looking = threading.Thread(target=look)
looking.start()
"""

_KILLED = """
import os, signal, sys, torch, torch.distributed as dist, lockstep
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1))
for part in [*model, model]:
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5 if again else 1, 13):
    loss = model(torch.randn(5, 7)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == 9 and rank == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    lockstep.log(accuracy=rank + again / 4)
dist.destroy_process_group()
"""
_SAMPLED = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if {several}:
    dist.init_process_group("gloo")
data = TensorDataset(torch.randn(103, 5))
sampler = DistributedSampler(data, *([] if {several} else [1, 0]))
model = torch.nn.Linear(5, 3)
model = DDP(model) if {several} else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (rows,) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (epoch, number) == (2, 2):
            break
if {several}:
    dist.destroy_process_group()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def go(script: str, *words: str) -> Run:
        (tmp_path / "stock.py").write_text(script)
        variables = {"LOCKSTEP_HANG_S": "60", "API_TOKEN": "s3cret", "NCCL_DEBUG": "WARN", "MY_KEY": "s3cret"}
        runs.append(Run(tmp_path, "run", *words, "stock.py", "--password", "s3cret", warm=True, **variables))
        return runs[-1]

    yield go
    for run in runs:
        run.close()


def folder_of(said: str, place: Path) -> Path:
    found = re.search(r"lockstep: report: (\S+)/report.html", said)
    assert found is not None, said
    return place / found[1]


def fields_of(record: RankRecord, kind: str, attempt: str = "") -> list[dict[str, Any]]:
    return [dict(one.fields) for one in record.notes if one.kind == kind and attempt in one.attempt]


def launch_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "launch.jsonl").read_text().splitlines()]


def test_sharded_model_whose_rank_is_killed(start: Callable[..., Run], tmp_path: Path) -> None:
    said = start(_KILLED, "--nproc-per-node", "2", "--max-restarts", "1", "--guard", "on").end(0)
    folder = folder_of(said, tmp_path)
    begun, first, left, killed, second, done, over = launch_of(folder)
    assert begun["flags"] == {"nproc_per_node": "2", "max_restarts": 1, "guard": "on"}
    assert (first["world_size"], second["world_size"], over["code"], over["over"]) == (2, 2, 0, begun["launch"])
    assert (left["left"], {one[0] for one in left["ranks"]}) == (first["attempt"], {0, 1})
    assert (killed["ended"], killed["code"], done["ended"]) == (first["attempt"], -9, second["attempt"])
    assert killed["causes"][0] == "rank 1 was killed by SIGKILL"
    assert (done["code"], done["causes"]) == (0, [])

    ranks = read_run(folder).ranks
    for rank, record in ranks.items():
        assert [start.attempt for start in record.starts] == [first["attempt"], second["attempt"]]
        facts = fields_of(record, "facts")
        assert len(facts) == 2
        assert facts[0]["command"] == ["stock.py", "--password", "(not written down)"]
        assert facts[0]["variables"]["LOCKSTEP_GUARD"] == ["on", "--guard"]
        assert facts[0]["variables"]["NCCL_DEBUG"] == ["WARN", "environment"]
        assert facts[0]["variables"]["RANK"] == [str(rank), "launcher"]
        again = {one["step"]: one["accuracy"] for one in fields_of(record, "values", "/1") if "accuracy" in one}
        assert again == dict.fromkeys(range(1, 9), rank + 0.25)  # steps of an attempt are counted from 1
        losses = {one["step"]: (one["loss"], one["lr"]) for one in fields_of(record, "values", "/1") if "lr" in one}
        assert all(loss > 0 and rate == 1e-3 for loss, rate in losses.values())
        assert list(losses) == list(again)
    assert [fields_of(record, "layout")[0]["strategy"] for record in ranks.values()] == ["fully_shard"] * 2
    held = [{row[0]: row[3:] for row in fields_of(record, "layout")[0]["units"]} for record in ranks.values()]
    assert {name: whole for name, (whole, _) in held[0].items()} == {
        "0.weight": 924,
        "0.bias": 132,
        "2.weight": 132,
        "2.bias": 4,
    }
    for name, (whole, here) in held[0].items():
        assert here + held[1][name][1] == whole
    (finding,) = fields_of(ranks[0], "finding", "/0")
    assert (finding["kind"], finding["culprits"]) == ("gone", [1])
    assert finding["text"].splitlines()[0] in said
    text = "".join(path.read_text() for path in folder.glob("*.jsonl"))
    assert "s3cret" not in text


def check_samples(ranks: list[RankRecord]) -> None:
    """Two epochs are whole, of the third each rank has had three batches."""
    epochs = [{one["epoch"]: one for one in fields_of(record, "coverage")} for record in ranks]
    assert [sorted(each) for each in epochs] == [[0, 1, 2]] * len(ranks)
    for epoch in (0, 1):
        used = sum((tally_from(bytes.fromhex(each[epoch]["digest"])) for each in epochs), Tally())
        whole, again = (tally_from(bytes.fromhex(epochs[0][epoch].get(name, "00" * 24))) for name in ("whole", "again"))
        assert used == whole + again
        assert (whole.count, again.count) == (103, 1 if len(ranks) == 2 else 0)
    assert [each[2]["samples"] for each in epochs] == [12] * len(ranks)


@pytest.mark.parametrize("home", ["torch", "lockstep"])
def test_sampled_data_of_two_ranks(start: Callable[..., Run], tmp_path: Path, home: str) -> None:
    script = _SAMPLED.replace("{several}", "True")
    if home == "lockstep":
        script = script.replace("torch.nn.parallel", "lockstep").replace("DistributedSampler,", "", 1)
        script = script.replace("import sys", "from lockstep import DistributedSampler\nimport sys")
    said = start(script, "--nproc-per-node", "2").end(0)
    ranks = list(read_run(folder_of(said, tmp_path)).ranks.values())
    check_samples(ranks)
    (layout,) = fields_of(ranks[0], "layout")
    assert (layout["strategy"], [row[0] for row in layout["units"]]) == ("DistributedDataParallel", ["weight", "bias"])
    replicas = fields_of(ranks[0], "replicas")
    assert [(one["step"], one["equal"]) for one in replicas] == [(1, True), (8, True), (29, True)]
    assert not fields_of(ranks[1], "replicas")


def test_one_process(start: Callable[..., Run], tmp_path: Path) -> None:
    said = start(_SAMPLED.replace("{several}", "False"), "--nproc-per-node", "1").end(0)
    folder = folder_of(said, tmp_path)
    run = read_run(folder)
    assert (run.world_size, [line.step for line in run.ranks[0].lines]) == (1, list(range(1, 56)))
    check_samples([run.ranks[0]])
    values = fields_of(run.ranks[0], "values")
    assert [one["step"] for one in values] == list(range(1, 56))
    assert all(one["loss"] >= 0 and one["lr"] == 0.5 for one in values)
    assert [next(iter(line)) for line in launch_of(folder)] == ["launch", "attempt", "ended", "over"]


@pytest.mark.parametrize("code", [0, 3])
def test_program_without_a_step_is_told_as_one(start: Callable[..., Run], tmp_path: Path, code: int) -> None:
    """One that fails as its launcher has seen it: where each rank stood."""
    said = start(_COLLECTIVES.replace("{code}", str(code)), "--nproc-per-node", "2").end(int(code > 0))
    run = RunReader(folder_of(said, tmp_path)).read().run
    lanes = lanes_of(run, 0)
    if code:
        assert not any(record.lines for record in run.ranks.values())
        return
    assert [(lane["step"], lane["why"]) for lane in lanes["steps"]] == [(1, "whole")]
    words = [word["text"] for word in lanes["words"]]
    joined = Counter(words[row[0]] for row in lanes["steps"][0]["ranks"][0]["ops"])
    assert joined == {"all_reduce float32 [3] sum": 175, "send float32 [3] to rank 1 tag 0": 80, "barrier": 1}
    assert len(lanes["steps"][0]["joins"]) == 256


def test_what_the_guard_sees_ending_first_is_waited_for_all_the_same(start: Callable[..., Run], tmp_path: Path) -> None:
    script = _LOOKED_AT + _COLLECTIVES.replace("raise", "is_over.set()\nlooking.join()\nraise").format(code=0)
    said = start(script, "--nproc-per-node", "2").end(0)
    run = RunReader(folder_of(said, tmp_path)).read().run
    stood = {rank: [op.began_us >= 0 for op in record.lines[0].ops or ()] for rank, record in run.ranks.items()}
    assert stood == {rank: [True] * 256 for rank in range(2)}


def test_loggers_that_are_still_beginning_get_all_where_another_rank_fails(tmp_path: Path) -> None:
    (tmp_path / "logs.py").write_text(_LOGS)
    (tmp_path / "wandb.py").write_text(_SLOW_WANDB)
    words = ("run", "--nproc-per-node=2", "--record=kept", "--log=wandb", "logs.py")
    text = Run(tmp_path, *words, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])).end(1)
    assert re.findall(r"^(?:logged|finished) .*", text, re.MULTILINE) == [
        *(f"logged {step} {{'loss': {1.0 / step}}}" for step in (1, 2, 3)), "finished 1"
    ]  # fmt: skip
    assert re.search(r"rank 1 \(pid \d+\) was killed by SIGKILL", text)


def test_run_that_a_rank_starts_has_a_record_of_its_own(tmp_path: Path) -> None:
    nested = (
        "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-m', 'lockstep', 'run', 'inner.py']))\n"
    )
    (tmp_path / "outer.py").write_text(nested)
    (tmp_path / "inner.py").write_text("print('inner')\n")
    said = Run(tmp_path, "run", "--record", "ours", "outer.py").end(0)
    assert re.search(r"lockstep: report: runs/inner-\S+/report.html", said)
    starts = [line for line in (tmp_path / "ours" / "launch.jsonl").read_text().splitlines() if '"launch"' in line]
    assert len(starts) == 1


_SLEEPS = """
import time, torch, lockstep
with lockstep.init() as comm:
    comm.barrier()
    time.sleep(60 * comm.rank)  # here
    comm.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("shm", ["on", "off"])
def test_who_waits_with_a_record_open_does_not_seem_to_move(tmp_path: Path, shm: str) -> None:
    """Over Gloo a wait is many short ones: the record must not take the end of each for something that was done."""
    (tmp_path / "train.py").write_text(_SLEEPS)
    words, variables = ("run", "--nproc-per-node=2", "train.py"), {"LOCKSTEP_HANG_S": "2", "LOCKSTEP_EVIDENCE": ""}
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_SHM=shm, **variables)) as run:
        run.await_text(r"HANG: .*Culprit: rank 1 (?s:.*)rank 1 is not there: at train\.py:5 ")
