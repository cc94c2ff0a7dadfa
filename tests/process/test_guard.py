"""The guard of ranks that are processes: what they say when one of them leaves, stands still or does something else."""

from __future__ import annotations

import os
import re
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest

import warm_programs
from lockstep.comm.waiting import wait_until
from shm_ranks import named_memory, named_since

_LIMIT_S = 50.0
PROGRAM = """
import os, signal, sys, threading, time
import torch
import lockstep

case, file, backend = sys.argv[1:4]
rank = int(sys.argv[4])
comm = lockstep.init(rank=rank, world_size=2, file=file, backend=backend or None, timeout_s=50, verbose=False)
tensor = torch.ones(4)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
with comm:
    for step in range(3):
        comm.all_reduce(tensor)
        optimizer.step()
    if case == "save alone":
        checkpointer = lockstep.Checkpointer("checkpoints", comm)
        if rank == 0:
            checkpointer.save(3, {"a": torch.ones(3)})  # the culprit
        else:
            comm.all_reduce(tensor)
    elif case == "skip":
        for step in range(2000):
            if rank == 0 or step != 5:
                comm.all_reduce(tensor)
            optimizer.step()
    elif case == "raise":
        if rank == 1:
            raise ValueError("label 7")
        comm.all_reduce(tensor)
    elif case == "kill":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(tensor)
    elif case == "leave":
        if rank == 0:
            comm.barrier()
    elif case == "hang":
        if rank == 1:
            heard = threading.Event()
            signal.signal(signal.SIGUSR1, lambda *_: heard.set())
            heard.wait()
        comm.all_reduce(tensor)
    elif case == "late":
        if rank == 1:
            time.sleep(1.5)
        comm.all_reduce(tensor)
    elif case == "half way":
        pids = comm.all_gather_object(os.getpid())
        if rank == 0:
            time.sleep(1)  # meanwhile the guard of rank 1 has told that it is in there
            os.kill(pids[1], signal.SIGSTOP)
        comm.all_reduce(torch.ones(5_000_000))  # more than what is on its way holds
    elif case == "differ at last":
        comm.all_reduce(tensor.int() if rank else tensor)
    elif case == "stay well":
        comm.barrier()
"""


class Ended(NamedTuple):
    """How the two ranks ended."""

    codes: tuple[int | None, int | None]
    said: tuple[str, str]


def line_of(words: str) -> int:
    """Of the program."""
    return next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if words in line)


def start(folder: Path, case: str, backend: str, **variables: str) -> list[BaseProcess]:
    """Two ranks. What they say is in files."""
    (folder / "train.py").write_text(PROGRAM)
    plain = {"PATH": "/usr/bin:/bin", "LOCKSTEP_ENV": "off", "LOCKSTEP_HANG_S": "2", "OMP_NUM_THREADS": "1"}
    words = ["train.py", case, str(folder / "meeting"), backend]
    return [
        warm_programs.start(folder, [*words, str(rank)], {**plain, **variables}, folder / f"stderr-{rank}")
        for rank in range(2)
    ]


def end(folder: Path, processes: list[BaseProcess]) -> Ended:
    first, second = warm_programs.end(processes, _LIMIT_S)
    return Ended((first, second), (said(folder, 0), said(folder, 1)))


def said(folder: Path, rank: int) -> str:
    return (folder / f"stderr-{rank}").read_text()


def run(folder: Path, case: str, backend: str = "", **variables: str) -> Ended:
    return end(folder, start(folder, case, backend, **variables))


def last_error(text: str) -> str:
    """The last exception of what a rank has written, without prefixes."""
    plain = re.sub(r"^\[rank\d\]: ?", "", text, flags=re.MULTILINE)
    return plain[plain.rindex("\nlockstep.errors.") :]


def test_one_rank_alone_in_a_save_is_told_at_once_on_gloo_too(tmp_path: Path) -> None:
    ended = run(tmp_path, "save alone", "gloo")
    assert ended.codes == (1, 1)
    for text in ended.said:
        error = last_error(text)
        assert "CollectiveMismatch" in error
        assert f"train.py:{line_of('# the culprit')}" in text
        assert f"train.py:{line_of('# the culprit') + 2}" in text
    assert (tmp_path / ".lockstep").is_dir()


def test_a_skipped_collective_is_raised_at_the_end_of_a_step(tmp_path: Path) -> None:
    ended = run(tmp_path, "skip", "gloo", LOCKSTEP_EVIDENCE="")
    assert ended.codes == (1, 1)
    site = f"train.py:{line_of('if rank == 0 or step != 5') + 1}"
    for text in ended.said:
        error = last_error(text)
        assert "MISMATCH in step 9" in error
        assert "Culprit: rank 1" in error
        assert text.count(f"rank 1 skipped all_reduce float32 [4] sum at {site}") == 1  # also where it was said before
    assert not (tmp_path / ".lockstep").exists()


@pytest.mark.parametrize(
    ("case", "codes", "words"),
    [
        ("raise", (1, 1), f"rank 1 .*train.py:{line_of('label 7')}.*ValueError: label 7"),
        ("kill", (1, -9), r"rank 1 \(.*pid \d+\)"),
        ("leave", (1, 0), "rank 1 "),
    ],
    ids=["raise", "kill", "leave"],
)
def test_who_loses_a_rank_quotes_its_last_words(tmp_path: Path, case: str, codes: tuple[int, int], words: str) -> None:
    ended = run(tmp_path, case, LOCKSTEP_EVIDENCE="")
    assert ended.codes == codes, ended.said
    error = last_error(ended.said[0])
    assert "PeerFailed" in error
    assert re.search(words, ended.said[0], re.DOTALL)


def test_a_last_collective_that_differs_is_raised_by_who_closes_last(tmp_path: Path) -> None:
    ended = run(tmp_path, "differ at last", "gloo", LOCKSTEP_EVIDENCE="")
    assert 1 in ended.codes, ended.said
    for text in (text for code, text in zip(ended.codes, ended.said, strict=True) if code):
        assert "CollectiveMismatch" in last_error(text)
        assert f"train.py:{line_of('tensor.int()')}" in text


def until_it_is_said(folder: Path, case: str, backend: str, signal_: signal.Signals) -> tuple[str, Ended]:
    """Rank 0's words about rank 1, which gets this signal then; both ranks go on and end well."""
    processes = start(folder, case, backend)
    is_said = wait_until(lambda: re.search("^Evidence: .*\n", said(folder, 0), re.MULTILINE) is not None, _LIMIT_S)
    text = said(folder, 0)
    os.kill(processes[1].pid or 0, signal_)
    ended = end(folder, processes)
    assert is_said, ended
    assert ended.codes == (0, 0), ended.said
    return text, ended


@pytest.mark.parametrize("backend", ["", "gloo"])
def test_a_hang_is_said_and_may_pass(tmp_path: Path, backend: str) -> None:
    text, _ = until_it_is_said(tmp_path, "hang", backend, signal.SIGUSR1)
    assert text.startswith("lockstep: HANG")
    assert "Culprit: rank 1" in text
    assert f"train.py:{line_of('heard.wait()')}" in text
    assert f"train.py:{line_of('heard.wait()') + 1}" in text
    evidence = tmp_path / text.splitlines()[-1].removeprefix("Evidence: ")
    assert f"train.py:{line_of('heard.wait()')}" in (evidence / "rank-1.txt").read_text()
    assert (evidence / "rank-0.txt").exists()


@pytest.mark.parametrize("backend", ["", "gloo"])
def test_who_is_stopped_in_an_operation_that_all_have_begun_is_named(tmp_path: Path, backend: str) -> None:
    text, ended = until_it_is_said(tmp_path, "half way", backend, signal.SIGCONT)
    assert text.startswith("lockstep: STOPPED")
    assert f"Culprit: rank 1 (host {os.uname().nodename}, pid " in text
    site = f"train.py:{line_of('os.kill(pids[1]') + 1}"
    assert re.search(rf"rank 0 waits in all_reduce float32 \[5000000\] sum #\d+ of group world, {site}", text), text
    is_over = "lockstep: STOPPED, above, is over: rank 1 goes on\n"
    assert ended.said[0].removeprefix(text) in ("", is_over)  # nothing, if the ranks end before the next look
    assert ended.said[1] == ""


@pytest.mark.parametrize("backend", ["", "gloo"])
def test_nothing_is_said_of_a_wait_that_torch_ends_several_times_and_goes_on_with(tmp_path: Path, backend: str) -> None:
    """Over Gloo a long wait is many short ones; that each of those times out is no error of anybody's."""
    assert run(tmp_path, "late", backend) == Ended((0, 0), ("", ""))


@pytest.mark.parametrize("mode", ["on", "strict", "check", "off"])
def test_ranks_that_do_well_say_nothing(tmp_path: Path, mode: str) -> None:
    before = named_memory()
    ended = run(tmp_path, "stay well", LOCKSTEP_GUARD=mode)
    assert ended == Ended((0, 0), ("", ""))
    assert not named_since(before)
    assert not (tmp_path / ".lockstep").exists()
