"""A rank of a stock script that leaves in some way: the others quote how, and where; and no wrong run ends with 0."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from command_runs import Run
from whole_records import read_run

pytestmark = pytest.mark.limit_s(120)

_PROGRAM = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
case, is_culprit, tensor = sys.argv[1], dist.get_rank() == 1, torch.ones(4)
for _ in range(3):
    dist.all_reduce(tensor)
if case == "another reduction":
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX if is_culprit else dist.ReduceOp.SUM)
    sys.exit(0)
if is_culprit:
    {"exit 0": lambda: sys.exit(0), "exit 3": lambda: sys.exit(3), "leave": lambda: os._exit(0)}[case]()  # leaves
dist.all_reduce(tensor)  # waits
"""
_LEAVES, _WAITS = (
    next(n for n, line in enumerate(_PROGRAM.splitlines(), 1) if word in line) for word in ("# l", "# w")
)
_AT_EXIT = """
import atexit
import torch
import torch.distributed as dist

def save():
    if dist.get_rank() == 1:
        raise ValueError("disk 7 is full")
    dist.all_reduce(torch.ones(4))

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
atexit.register(save)
"""
_IN_THREAD = """
import threading
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    for step in range(60):
        if step == 5 and dist.get_rank() == 1:
            raise ValueError("label 7")  # ends the thread
        model(torch.ones(5, 3)).sum().backward()
        optimizer.step()

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""

_HELD_UP = """
import os, signal, subprocess, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    launcher = int(os.environ["LOCKSTEP_AGENT_PID"])
    subprocess.Popen(["sh", "-c", f"sleep {sys.argv[1]}; kill -CONT {launcher}"])
    os.kill(launcher, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(4))
"""


_FROM_ANY = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, tensor = dist.get_rank(), torch.ones(4)
for _ in range(3 if rank == 0 else rank):
    dist.send(tensor, 0) if rank else dist.recv(tensor)
if rank == 0:
    dist.recv(tensor)  # nobody sends
"""


def _output(folder: Path, case: str, program: str = _PROGRAM, code: int = 1) -> str:
    (folder / "train.py").write_text(program)
    words = ("run", "--record=off", "--nproc-per-node=2", "train.py", case)
    with contextlib.closing(Run(folder, *words, LOCKSTEP_EVIDENCE="")) as run:
        return run.end(code)


def test_what_is_found_at_the_very_end_is_an_error(tmp_path: Path) -> None:
    """Both have come to the end of the program with other numbers, and would exit with 0."""
    text = _output(tmp_path, "another reduction")
    assert text.count("first difference: collective #3: they differ in reduction") == 1
    raised = re.findall(r"^\[rank\d\]: (.+)$", text, re.MULTILINE)
    assert raised[0].startswith("lockstep.errors.CollectiveMismatch: MISMATCH in step 1")  # no trace: nothing ran


@pytest.mark.parametrize(
    ("case", "head", "words"),
    [
        ("exit 0", "FINISHED too early", rf"rank 1 finished normally at train\.py:{_LEAVES} after 3 collectives,"),
        ("exit 3", "RAISED", rf"rank 1 raised at train\.py:{_LEAVES}:\n    SystemExit: 3"),
        ("leave", "GONE", r"rank 1 \(pid \d+\) ended with exit code 0"),
    ],
    ids=["exit 0", "exit 3", "leave"],
)
def test_how_a_rank_left_is_said(tmp_path: Path, case: str, head: str, words: str) -> None:
    text = _output(tmp_path, case)
    assert re.search(rf"^lockstep: {head}.* in step 1\.  Culprit: rank 1 \(", text, re.MULTILINE), text
    assert re.search(rf"^  {words}\n", text, re.MULTILINE), text
    assert f"rank 0 waits in all_reduce float32 [4] sum #3 of group WORLD, train.py:{_WAITS} <module>" in text


def test_what_a_handler_at_the_exit_raised_is_said_and_not_taken_for_a_broken_network(tmp_path: Path) -> None:
    """Python's exit code stays 0. Rank 0, which waits in its own handler, is told of rank 1 in place of its network."""
    text = _output(tmp_path, "", _AT_EXIT, 0)
    said = r"^lockstep: rank 1 raised at \S*train\.py:8: ValueError: disk 7 is full; no exit code tells of it\n"
    assert len(re.findall(said, text, re.MULTILINE)) == 1, text
    assert re.search(r"^lockstep: rank 0 raised at \S*train\.py:9: PeerFailed: .*rank 1\b", text, re.MULTILINE), text
    assert "CAUGHT" not in text


def test_training_that_ends_in_a_thread_is_an_error_of_the_run(tmp_path: Path) -> None:
    """Python ends by 0 then, on each rank: the job would count as finished."""
    text = _output(tmp_path, "", _IN_THREAD)
    line = next(number for number, line in enumerate(_IN_THREAD.splitlines(), 1) if "# ends" in line)
    assert re.search(rf"rank 1 raised at train\.py:{line}:\s+ValueError: label 7", text), text
    assert re.search(r"^(lockstep\.errors\.)?PeerFailed: ", text, re.MULTILINE), text  # in the thread of rank 0
    assert "CAUGHT" not in text  # nobody has
    assert f" with exit code 0, after it raised at train.py:{line}: ValueError: label 7" in text


@pytest.mark.parametrize("held_s", ["1", "4"])
def test_killed_rank_is_found_also_where_the_launcher_is_held_up(tmp_path: Path, held_s: str) -> None:
    """It tells of the end after torch's error has come up on the other rank, or so late that this one looks itself."""
    (tmp_path / "train.py").write_text(_HELD_UP)
    with contextlib.closing(Run(tmp_path, "run", "--record=kept", "--nproc-per-node=2", "train.py", held_s)) as run:
        text = run.end(1)
    head = re.search(r"lockstep: GONE in step 1\.  Culprit: rank 1 \(", text)
    assert head is not None, text
    assert re.search(
        r"^\[rank0\]: lockstep.errors.PeerFailed: GONE in step 1\.  Culprit: rank 1 ", text, re.MULTILINE
    ), text
    (finding,) = [dict(note.fields) for note in read_run(tmp_path / "kept").ranks[0].notes if note.kind == "finding"]
    assert (finding["kind"], finding["culprits"]) == ("gone", [1])


def test_a_receive_that_nobody_is_left_to_send_is_ended(tmp_path: Path) -> None:
    """From any rank: Gloo waits on though all others have ended, and the ranks to blame cannot be ended again."""
    (tmp_path / "train.py").write_text(_FROM_ANY)
    words = ("run", "--record=off", "--nproc-per-node=3", "--hang-limit-s=4", "train.py")
    with contextlib.closing(Run(tmp_path, *words, LOCKSTEP_EVIDENCE="", LOCKSTEP_HANG_S="2")) as run:
        text = run.end(1)
    assert re.search(r"^lockstep: HANG: nothing has moved for .* in step 1\.  Culprits: ranks 1,2$", text, re.MULTILINE)
    assert "Likely fix: as many receives from any rank as sends: nobody is left who could send." in text
    ended = r"^lockstep: rank 0 \(pid \d+\) was ended by its launcher: no progress for 4 s"
    assert re.search(ended, text, re.MULTILINE), text
