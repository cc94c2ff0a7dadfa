"""The report of real runs of two ranks: while they go on, and however they end."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_runs import Run, wait_for
from lockstep.observe.report.writing import document_in

pytestmark = pytest.mark.limit_s(180)

_SCRIPT = """
import os, signal, sys, threading
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

how, rank = sys.argv[1], int(os.environ["RANK"])
if how == "early" and rank == 1:
    raise ValueError("no such corpus")
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 13):
    if step == 9 and rank == 1:
        if how == "raise":
            raise ValueError("a label of 77")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            threading.Event().wait()
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if how == "garbage" and rank == 1:
    with open(os.path.join(os.environ["LOCKSTEP_RUN"], "rank-1.jsonl"), "a") as file:
        file.write("no record\\n")
dist.destroy_process_group()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []
    (tmp_path / "train.py").write_text(_SCRIPT)

    def go(*words: str, **variables: str) -> Run:
        runs.append(Run(tmp_path, *words, warm=True, **variables))
        return runs[-1]

    yield go
    for run in runs:
        run.close()


def last_line(said: str) -> Path:
    found = re.fullmatch(r"lockstep: report: (\S+)", said.splitlines()[-1])
    assert found is not None, said
    return Path(found[1])


def titles(document: dict[str, Any], severity: str = "error") -> str:
    return "\n".join(card["title"] for card in document["cards"] if card["severity"] == severity)


def blamed(document: dict[str, Any]) -> list[tuple[int, int]]:
    """(rank, step) of who is marked in the step that was not ended."""
    lanes = [lane for lane in document["lanes"]["steps"] if lane["why"] == "open"]
    return [(rank["rank"], lane["step"]) for lane in lanes for rank in lane["ranks"] if rank["culprit"]]


def test_hang_is_shown_while_it_lasts(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("run", "--nproc-per-node", "2", "train.py", "hang", LOCKSTEP_HANG_S="2")
    wait_for(lambda: list(tmp_path.glob("runs/*/launch.jsonl")), "the run was recorded", run.text)
    watch = start("watch", "--no-terminal")
    watch.await_text(r"http://\S+/")
    address = re.search(r"http://\S+/", watch.text())
    assert address is not None

    def served() -> dict[str, Any]:
        with urllib.request.urlopen(f"{address[0]}document.json", timeout=60) as answer:
            return json.load(answer)

    wait_for(lambda: "rank 1" in titles(served()) + titles(served(), "warning"), "the page named rank 1", run.text)
    assert served()["run"]["status"] == "running"
    assert blamed(served()) == [(1, 9)]
    said = start("report").end(0)
    assert ": running, 2 ranks, 8 steps, " in said
    assert "rank 1" in said
    (page,) = tmp_path.glob("runs/*/report.html")
    run.signal(signal.SIGINT)
    assert tmp_path / last_line(run.end(130)) == page
    assert "lockstep: the run was stopped; " in watch.end(0)
    _, document = document_in(page.parent)
    assert document["run"]["status"] == "stopped"
    assert document["run"]["attempts"][0]["last_step"] == 8
    assert blamed(document) == [(1, 9)]
    waits = document["lanes"]["steps"][-1]["ranks"][0]
    assert waits["says"].startswith("waited for rank 1: ")
    assert waits["ops"][-1][3] == waits["ended_us"], "to the end"


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [("raise", 1, "a label of 77"), ("kill", 1, "SIGKILL"), ("early", 1, "no such corpus"), ("garbage", 0, "")],
)
def test_report_lies_there_however_the_run_ends(
    start: Callable[..., Run], tmp_path: Path, how: str, code: int, says: str
) -> None:
    page = last_line(start("run", "--nproc-per-node", "2", "train.py", how).end(code))
    assert len((tmp_path / page).read_text()) < 2_000_000
    _, document = document_in(tmp_path / page.parent)
    assert document["run"]["status"] == ("failed" if code else "finished")
    if how == "garbage":
        assert "Some of the record cannot be read" in titles(document, "warning")
    else:
        (fault,) = [card for card in document["cards"] if card["severity"] == "error"]  # and its end: one card
        assert "Culprit: rank 1" in fault["title"]
        found, _, end = fault["text"].partition("The run failed: rank 1 ")
        assert says in found
        assert says in end
        assert document["run"]["steps"] == (0 if how == "early" else 8)
        assert blamed(document) == [(1, 1 if how == "early" else 9)]


def test_run_that_is_watched_keeps_what_its_ranks_print(start: Callable[..., Run], tmp_path: Path) -> None:
    small = "--model.width 16 --model.layers 1 --model.heads 2 --model.context 16 --data.vocab_size 260"
    (tmp_path / "text").write_text("each run leaves a picture of itself. " * 400)
    words = (
        "run --watch --nproc-per-node 2 -m lockstep train --data.path text --train.steps 6 --train.batch 2 --out out"
    )
    said = start(*words.split(), *small.split(), "--train.sample_tokens", "0").end(0)
    assert "(Ctrl-C stops the run)" in said
    (page,) = tmp_path.glob("runs/*/report.html")
    assert tmp_path / last_line(said) == page
    assert "step 6/6" in (page.parent / "output.txt").read_text()
    _, document = document_in(page.parent)
    assert (document["run"]["steps"], document["run"]["status"]) == (6, "finished"), "though they record in out"


def test_training_run_has_its_report_in_its_folder(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("each run leaves a picture of itself. " * 400)
    words = "train -n 1 --restarts 0 --data.path text --train.steps 6 --train.batch 2 --train.sample_tokens 0 --out out"
    small = "--model.width 16 --model.layers 1 --model.heads 2 --model.context 16 --data.vocab_size 260"
    said = start(*words.split(), *small.split()).end(0)
    assert last_line(said) == Path("out/report.html")
    folder, document = document_in(tmp_path / "out" / "profile")
    assert folder == tmp_path / "out"
    assert (document["run"]["steps"], document["run"]["status"]) == (6, "finished")
    assert "loss" in [curve["name"] for curve in document["curves"]]
