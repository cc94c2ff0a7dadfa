"""What init() opened is closed: at the end of the body, after an exception, beside a killed peer, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port

TALE = """
import atexit, os, pathlib, signal, sys
what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if what == "forgotten" and os.environ["RANK"] == "0":
    atexit.register(lambda: print("gone before rank 1 was done" if not (folder / "done").exists() else "gone last"))
import torch, torch.distributed as dist, lockstep
from lockstep.errors import CommError
if what == "forgotten":
    comm = lockstep.init(timeout_s=20)
    if comm.rank == 0:
        (folder / "at the end").touch()
    else:
        while not (folder / "at the end").exists():
            pass
        for _ in range(3000):   # some tenths of a second during which rank 0, without us, would be gone
            dist.distributed_c10d._get_default_store().add("late", 1)
        (folder / "done").touch()
elif what == "raises":
    with lockstep.init(timeout_s=20) as comm:
        if comm.rank == 1:
            raise KeyError("the user's own")
        comm.all_reduce(torch.ones(3))
elif what == "killed":
    with lockstep.init(timeout_s=20) as comm:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(torch.ones(3))
        except CommError as error:
            print("lost", type(error).__name__)
    print("closed", dist.is_initialized())
elif what == "torchrun":
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with lockstep.init(timeout_s=20) as comm:
        total = torch.tensor([10.0 ** comm.rank])
        comm.all_reduce(total)
        place = comm.place
        seen = f"{place.launcher} {place.restart_count} {torch.get_num_threads()}"
        sys.stdout.write(f"life {life} rank {comm.rank} total {total.item():g} {seen}\\n")
    if life == 0 and comm.rank == 1:
        sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(TALE)
    return path


@pytest.fixture
def port() -> int:
    return free_port()


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what a launcher or a user's settings may have put there; no evidence."""
    theirs = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMP_", "GLOO_", "LOCKSTEP_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(theirs)},
        "LOCKSTEP_EVIDENCE": "",
        **changes,
    }


def tell(script: Path, what: str, port: int) -> list[tuple[int, str, str]]:
    """Two processes of the script; exit code, stdout and stderr of each."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), what, str(script.parent)],
            env=environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=90)
            told.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for _, _, err in told:
        assert "terminate called" not in err
        assert "destroy_process_group" not in err
    return told


def test_forgotten_close_ends_well_and_the_store_goes_last(script: Path, port: int) -> None:
    (code0, out0, err0), (code1, out1, err1) = tell(script, "forgotten", port)
    assert (code0, out0, code1, out1) == (0, "gone last\n", 0, "")
    assert err0.count("\n") == 1
    assert err1 == ""


def test_exception_in_the_body_ends_both(script: Path, port: int) -> None:
    (code0, _, err0), (code1, _, err1) = tell(script, "raises", port)
    assert (code0, code1) == (1, 1)
    assert 'KeyError: "the user\'s own"' in err1
    assert "lockstep.errors.PeerFailed" in err0
    assert "KeyError" in err0  # rank 1's last words


def test_killed_peer_does_not_hang_the_teardown(script: Path, port: int) -> None:
    (code0, out0, _), (code1, _, _) = tell(script, "killed", port)
    assert (code0, out0, code1) == (0, "lost PeerFailed\nclosed False\n", -9)


def test_torchrun_and_its_restart(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    ended = subprocess.run(
        [*command, str(script), "torchrun", "."],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert f"life 1 rank {rank} total 11 torchrun 1 {threads}\n" in ended.stdout
    assert "lockstep: 2 ranks (torchrun: RANK, WORLD_SIZE), restart 1" in ended.stderr
