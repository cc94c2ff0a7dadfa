"""A rank has half of what another one sends when that is killed or stopped: it gets on, though Gloo keeps the transfer.

Gloo ends it at its limit of minutes, and with it the calls that wait for it: a wait, and the end of the group.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import warm_programs
from command_runs import Run

_LIMIT_S = 60.0
pytestmark = pytest.mark.limit_s(_LIMIT_S + 30)

_OURS = """
import os, signal, sys
import torch, lockstep
rank = int(sys.argv[2])
comm = lockstep.init(rank=rank, world_size=2, file=sys.argv[1], backend="gloo", verbose=False)
broadcast, pids = comm.broadcast, comm.all_gather_object(os.getpid())
"""
_TORCHS = """
import os, signal, sys
import torch, torch.distributed as dist, lockstep
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
rank, comm = dist.get_rank(), lockstep.init(verbose=False)
broadcast, pids = dist.broadcast, comm.all_gather_object(os.getpid())
"""
_STOCK = """
import os, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, broadcast, pids = dist.get_rank(), dist.broadcast, [None, None]
dist.all_gather_object(pids, os.getpid())
"""
_HALF_WAY = """
tensor = torch.full((40_000_000,), float(rank))
work = broadcast(tensor, 1, async_op=True)
if rank == 0:
    while tensor[0] == 0:
        pass
    os.kill(pids[1], signal.{})
"""
_KILLED = _HALF_WAY.format("SIGKILL")
_HELD = len((_TORCHS + _KILLED).splitlines()) + 2  # line of the wait
_WAIT = "work.wait()"
_FAIL = "if rank == 0: raise ValueError('label 7')"


def in_finally(body: str, last: str) -> str:
    return f"try:\n    {body}\n    {_WAIT}\nfinally:\n    {last}\n"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_OURS + _KILLED + _WAIT, "PeerFailed: GONE in step 1.  Culprit: rank 1 "),
        (_OURS + _KILLED + in_finally(_WAIT, "comm.close()"), "PeerFailed: GONE in step 1.  Culprit: rank 1 "),
        (_OURS + _KILLED + in_finally(_FAIL, "comm.close()"), "ValueError: label 7"),
        (_OURS + _KILLED + f"{_FAIL}\n{_WAIT}", "ValueError: label 7"),
        (_TORCHS + _KILLED + f"{_FAIL}\n{_WAIT}", "ValueError: label 7"),
        (_TORCHS + _KILLED + in_finally(_FAIL, "dist.destroy_process_group()"), "ValueError: label 7"),
        (
            _TORCHS + _KILLED + in_finally(_WAIT, "dist.destroy_process_group()"),
            f"for 10 s it has stood at train.py:{_HELD} <module>, and Gloo does not let it go",
        ),
    ],
    ids=[
        "waits", "waits, and closes", "fails, and closes", "fails",
        "fails, torch's group", "fails, and destroys torch's", "waits, torch's group",
    ],
)  # fmt: skip
def test_whose_sender_is_killed_ends(program: str, words: str, tmp_path: Path) -> None:
    codes, text = warm_programs.run_by_hand(tmp_path, program, _LIMIT_S)
    assert codes == [1, -9], text
    assert words in text


def test_who_fails_under_a_launcher_is_named_though_its_sender_is_stopped(tmp_path: Path) -> None:
    stopped = _HALF_WAY.format("SIGSTOP")
    (tmp_path / "train.py").write_text(_STOCK + stopped + in_finally(_FAIL, "dist.destroy_process_group()"))
    run = Run(tmp_path, "run", "-n", "2", "train.py", warm=True)
    run.end(1)
    assert "failed at train.py:" in run.said()[0], run.text()
    assert run.said()[0].endswith(": ValueError: label 7; rank 1 was ended by the launcher"), run.text()
