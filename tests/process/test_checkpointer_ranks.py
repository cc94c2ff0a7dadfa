"""Checkpoints of real processes: written behind training, by ranks that die, by one rank alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint import saving
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.comm.communicator import Communicator
from lockstep.errors import CheckpointError, CollectiveMismatch, CommError
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes
from shm_ranks import LIMIT_S, share

STEPS = 25


def sharded(seed: int, mesh: Any) -> nn.Module:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 1), nn.Linear(1, 301))
    for layer in model:
        lockstep.fully_shard(layer, mesh=mesh)
    return lockstep.fully_shard(model, mesh=mesh)


def train_and_save(comm: Communicator, folder: str, is_shared: bool) -> None:
    """Every step is saved in the background while the next ones talk over the same transport."""
    ours = share(comm) if is_shared else comm
    model = sharded(0, ours)
    with Checkpointer(folder, ours, keep=None) as checkpointer:
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(step)
            checkpointer.save_async(step, {"model": model, "step": step}, shards={ours.rank: {"rank": ours.rank}})
            model(torch.ones(2, 7)).sum().backward()
            total = torch.full((1000,), float(step))
            ours.all_reduce(total)
            assert (total == step * ours.world_size).all()
    if is_shared:
        ours.close()


def load_all(comm: Communicator, folder: str, saved_by: int) -> None:
    model = sharded(1, comm)
    checkpointer = Checkpointer(folder, comm)
    assert checkpointer.steps() == list(range(1, STEPS + 1))
    for step in (1, STEPS // 2, STEPS):
        found = checkpointer.load({"model": model}, step=step, shards=range(saved_by))
        assert found is not None
        assert found.state["step"] == step
        assert found.shards == {rank: {"rank": rank} for rank in range(saved_by)}
        for param in model.parameters():
            assert (param.to_local() == step).all()


@pytest.mark.parametrize("is_shared", [False, True])
def test_saved_behind_training_and_loaded_by_other_numbers_of_ranks(tmp_path: Path, is_shared: bool) -> None:
    run_processes(3, train_and_save, str(tmp_path), is_shared)
    for world_size in (1, 2, 3):
        run_processes(world_size, load_all, str(tmp_path), 3)


def alone(comm: Communicator, folder: str) -> str:
    ours = share(comm)
    checkpointer = Checkpointer(folder, ours)
    tensor = torch.ones(5)
    with pytest.raises(CollectiveMismatch) as raised:
        checkpointer.save(1, {"x": tensor}) if ours.rank == 1 else ours.all_reduce(tensor)
    ours.close()
    return str(raised.value)


def test_one_rank_alone_is_an_error_at_once(tmp_path: Path) -> None:
    for text in run_processes(2, alone, str(tmp_path)):
        assert "rank 0: all_reduce" in text
        assert "rank 1: all_gather" in text
    assert not list(tmp_path.iterdir())


def die_while_writing(comm: Communicator, folder: str, victim: int, is_shared: bool) -> str:
    ours = share(comm, timeout_s=LIMIT_S) if is_shared else comm
    checkpointer = Checkpointer(folder, ours)
    checkpointer.save(1, {"x": torch.arange(1_000_000)})
    if ours.rank == victim:
        saving.write_tensor_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    pending = checkpointer.save_async(2, {"x": torch.arange(1_000_000) + 1})
    with pytest.raises((CheckpointError, CommError)):
        pending.wait()
    assert checkpointer.steps() == [1]
    checkpointer.verify(1)
    (Path(folder) / f"survivor-{comm.rank}").touch()
    return "survived"


@pytest.mark.parametrize(("victim", "is_shared"), [(0, True), (1, True), (1, False)])
def test_rank_that_dies_while_it_writes(tmp_path: Path, victim: int, is_shared: bool) -> None:
    with pytest.raises(RankFailed, match=f"rank {victim}.*SIGKILL"):
        run_processes(2, die_while_writing, str(tmp_path), victim, is_shared)
    assert (tmp_path / f"survivor-{1 - victim}").exists()
    found = Checkpointer(tmp_path).load()
    assert found is not None
    assert torch.equal(found.state["x"], torch.arange(1_000_000))
    with Checkpointer(tmp_path) as after:
        after.save(2, {"x": torch.zeros(2)})
    (generation,) = tmp_path.glob(".generation-*")
    assert not list(generation.iterdir())  # what was left over is gone


_EXIT = """
import sys, torch, lockstep
from lockstep.checkpoint import saving
checkpointer = lockstep.Checkpointer(sys.argv[1])
if len(sys.argv) > 2:
    def full(*_):
        raise OSError(28, "No space left on device")
    saving.write_tensor_file = full
checkpointer.save_async(7, {"x": torch.ones(300, 300)})
"""


def test_process_that_ends_without_looking(tmp_path: Path) -> None:
    """What is being written is finished; what has failed makes the process fail."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", _EXIT, str(tmp_path), *words], capture_output=True, text=True)

    failed = run("full disk")
    assert failed.returncode == 1
    assert "a save in the background has failed: cannot save step 7" in failed.stderr
    assert "No space left" in failed.stderr
    assert Checkpointer(tmp_path).latest() is None
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    Checkpointer(tmp_path).verify(7)
