"""The harness itself: what it returns, and what it says when ranks fail, hang or die."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from leaks import Snapshot, process_stacks
from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.waiting import wait_until
from lockstep.errors import PeerLost
from lockstep.testing import pool
from lockstep.testing.failures import RankFailed, RankTimeout
from lockstep.testing.worker import serve
from lockstep.testing.worlds import close_pools, run_processes, run_threads


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def state_of_a_rank(comm: Communicator, factor: int, *, offset: int) -> dict[str, object]:
    tensor = torch.tensor([float(comm.rank)])
    dist.all_reduce(tensor)  # torch's own, over the default group
    return {
        "sum": tensor.item(),
        "value": comm.rank * factor + offset,
        "random": torch.rand(1).item(),
        "threads": torch.get_num_threads(),
        "process": os.getpid(),
        "variable": os.environ.get("LOCKSTEP_TEST"),
        "rank": os.environ.get("RANK"),
        "directory": os.getcwd(),
    }


def test_jobs_share_processes_but_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_processes(2, state_of_a_rank, 10, offset=5)
    assert [state["value"] for state in first] == [5, 15]
    assert [state["sum"] for state in first] == [1.0, 1.0]
    assert [state["threads"] for state in first] == [1, 1]
    assert first[0]["random"] != first[1]["random"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_TEST", "here")
    second = run_processes(2, state_of_a_rank, 1, offset=0, env=[{"RANK": "0"}, {"RANK": "1", "LOCKSTEP_TEST": None}])
    assert [state["process"] for state in first] == [state["process"] for state in second]
    assert [state["random"] for state in first] == [state["random"] for state in second]
    assert [(state["rank"], state["variable"]) for state in second] == [("0", "here"), ("1", None)]
    assert {state["directory"] for state in second} == {str(tmp_path)}
    third = run_processes(2, state_of_a_rank, 1, offset=0)
    assert [state["rank"] for state in third] == [os.environ.get("RANK")] * 2


def without_a_group(rank: int) -> tuple[int, bool]:
    return rank, dist.is_initialized()


def sum_over_an_axis(comm: Communicator, groups_before: int) -> list[float]:
    for _ in range(groups_before):
        dist.new_group(list(range(comm.world_size)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    return (DTensor.from_local(torch.full((2,), float(comm.rank)), mesh, [Shard(0)]) + 1).full_tensor().tolist()


def test_torch_keeps_no_mesh_of_an_earlier_job() -> None:
    first, second = [1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 4.0, 4.0]
    for groups_before in (1, 0):
        assert run_processes(4, sum_over_an_axis, groups_before) == [first, first, second, second]


def test_a_job_may_make_its_own_group() -> None:
    assert run_processes(3, without_a_group, connect=False) == [(0, False), (1, False), (2, False)]


def raises_on_some(comm: Communicator) -> str:
    if comm.rank == 1:
        raise ValueError("no such file")
    if comm.rank == 2:
        comm.barrier()
    with pytest.raises(PeerLost):
        comm.barrier()
    return "fine"


def raises_what_cannot_be_pickled(comm: Communicator) -> None:
    raise Unpicklable("one", "two")


def returns_what_cannot_be_pickled(comm: Communicator) -> object:
    return threading.Lock()


def exits(comm: Communicator) -> None:
    print("last words", flush=True)
    os._exit(3)


def test_the_first_failure_is_raised_and_the_others_are_listed() -> None:
    for run in (run_processes, run_threads):
        with pytest.raises(RankFailed, match="rank 1 of 3 in raises_on_some: ValueError: no such file") as raised:
            run(3, raises_on_some)
        assert isinstance(raised.value.__cause__, ValueError)
        assert 'raise ValueError("no such file")' in str(raised.value)
        assert "then rank 2: PeerLost: barrier" in str(raised.value)
        assert raised.value.results == {0: "fine"}
    assert run_processes(3, without_a_group, connect=False)[2] == (2, False)  # new processes


def returns_while_another_connects(rank: int, folder: str) -> bool:
    """Rank 0 is still at it when the others are through."""
    connect, done = dist.init_process_group, Path(folder, "done")

    def late(*args: Any, **kwargs: Any) -> None:
        connect(*args, **kwargs)
        if rank == 0:
            threading.Event().wait(0.3)
            done.touch()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "init_process_group", late)
        transport = TorchTransport.fresh(Path(folder, "rendezvous").as_uri(), rank, 3, 30.0)
    was_done = done.exists()
    transport.close()
    return was_done


def test_no_rank_begins_before_all_are_connected(tmp_path: Path) -> None:
    """Else one that fails at once ends connections that others are about to make, and they fail of another reason."""
    assert run_processes(3, returns_while_another_connects, str(tmp_path), connect=False) == [True] * 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (raises_what_cannot_be_pickled, "rank . of 1 in raises_what_cannot_be_pickled: Unpicklable: onetwo"),
        (returns_what_cannot_be_pickled, "cannot pickle '_thread.lock' object"),
        (exits, "ProcessDied: exited with code 3\nlast words"),
    ],
)
def test_failures_that_cannot_be_carried_over(body: object, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        run_processes(1, body)  # type: ignore[arg-type]


def never_returns(comm: Communicator) -> None:
    if comm.rank == 1:
        threading.Event().wait()


def test_a_rank_that_hangs_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_GRACE_S", 0.0)
    with pytest.raises(RankTimeout, match=r"never_returns: rank\(s\) 1 did not finish within 1 s") as raised:
        run_processes(2, never_returns, timeout_s=1)
    assert raised.value.missing == (1,)
    stacks = str(raised.value)
    assert "--- rank 0 ---" in stacks
    assert "in never_returns" in stacks.split("--- rank 1 ---")[1]


def test_stacks_of_processes_that_are_idle() -> None:
    close_pools()
    assert process_stacks() == ""
    run_processes(1, without_a_group, connect=False)
    assert "in serve" in process_stacks()


def takes_the_signal(rank: int) -> None:
    signal.signal(pool.STACKS, lambda *_: None)
    signal.signal(pool.STACKS, signal.SIG_DFL)


def test_stacks_after_a_job_that_had_the_signal_for_itself() -> None:
    close_pools()
    run_processes(1, takes_the_signal, connect=False)
    assert "in serve" in process_stacks()
    run_processes(1, own_pid, connect=False)


def own_pid(rank: int) -> int:
    return os.getpid()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_rank_that_died_between_two_jobs_is_named() -> None:
    pids = run_processes(2, own_pid, connect=False)
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: is_gone(pids[1]), 10)
    with pytest.raises(RankFailed, match=r"rank 1 of 2 in waiting for own_pid: ProcessDied: killed by SIGKILL"):
        run_processes(2, own_pid, connect=False)
    assert pids[0] not in run_processes(2, own_pid, connect=False)


def serves_late(rank: int, world_size: int, pipe: Connection, log: str) -> None:
    threading.Event().wait(3)  # longer than the job's limit and the grace
    serve(rank, world_size, pipe, log)


def test_starting_the_processes_is_no_part_of_a_jobs_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    close_pools()
    monkeypatch.setattr(pool, "serve", serves_late)
    monkeypatch.setattr(pool, "_GRACE_S", 1.0)
    assert len(run_processes(2, own_pid, connect=False, timeout_s=1.0)) == 2
    close_pools()
    monkeypatch.setattr(pool, "_START_S", 0.5)
    with pytest.raises(RankTimeout, match=r"start before own_pid: rank\(s\) 0 did not finish within 0.5 s"):
        run_processes(2, own_pid, connect=False)


def test_processes_die_with_their_parent(tmp_path: Path) -> None:
    """Also when it is killed: nobody is left to tell them."""
    script = (
        "import os, signal, sys, test_worlds\n"
        "from lockstep.testing.worlds import run_processes\n"
        "if __name__ == '__main__':\n"
        "    print(*run_processes(2, test_worlds.own_pid, connect=False), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    parent = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=50)
    pids = [int(word) for word in parent.stdout.split()]
    assert len(pids) == 2, parent.stderr
    assert wait_until(lambda: all(is_gone(pid) for pid in pids), timeout_s=10)


def test_closed_pools_leave_nothing() -> None:
    pids = run_processes(2, own_pid, connect=False)
    close_pools()
    assert all(is_gone(pid) for pid in pids)


def test_every_kind_of_leak_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaks._PATIENCE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    before = Snapshot()
    assert before.leaks() == []
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten", daemon=True)
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sock = socket.socket()
    monkeypatch.setenv("LOCKSTEP_LEAK", "1")
    monkeypatch.delenv("PATH")
    torch.set_default_dtype(torch.float64)
    (tmp_path / "result.txt").touch()
    found = "\n".join(before.leaks())
    torch.set_default_dtype(torch.float32)
    for words in (
        "new thread: forgotten",
        f"new child process: {child.pid}",
        "-> socket:",
        "new environment variable: LOCKSTEP_LEAK 1",
        "environment variable gone: PATH",
        "setting changed: default dtype from torch.float32 to torch.float64",
        "new file in the working directory: result.txt",
    ):
        assert words in found
    stop.set()
    thread.join()
    child.kill()
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    sock.close()
    monkeypatch.undo()
    gc.collect()


SAMPLE = """
import threading, leaks, pytest

leaks._PATIENCE_S = 0.1

@pytest.mark.limit_s(0.5)
def test_hangs():
    threading.Event().wait()

def test_leaks_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True, name="left").start()

def test_good():
    pass
"""


def test_the_conftest_fails_what_hangs_or_leaks(tmp_path: Path) -> None:
    for name in ("conftest.py", "leaks.py", "process_tree.py", "shared_segments.py", "slow_tests.txt"):
        (tmp_path / name).write_text((Path(__file__).parents[1] / name).read_text())
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert "1 failed, 2 passed, 1 error" in result.stdout
    assert "the test ran longer than 0.5 s" in result.stdout
    assert "threading.Event().wait()" in result.stdout
    assert "new thread: left" in result.stdout
