"""Checkpoints on disk: whole or absent, newest found, older ones pruned, the same answer on every rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import store
from lockstep.comm.communicator import Communicator
from lockstep.errors import CheckpointError
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads


def state_of(step: int) -> dict[str, object]:
    return {"step": step, "model": {"w": torch.full((4,), float(step))}}


def save(directory: Path, step: int, keep: int = 2, world_size: int = 1) -> Path:
    return run_threads(world_size, lambda comm: store.save(comm, directory, step, state_of(step), keep))[0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_save_then_load_and_only_rank_0_writes(tmp_path: Path, world_size: int) -> None:
    def one(comm: Communicator) -> Path:
        mine = state_of(7) if comm.rank == 0 else {"step": "ignored"}
        return store.save(comm, tmp_path / "new" / "folder", 7, mine, keep=1)

    paths = run_threads(world_size, one)
    assert len(set(paths)) == 1
    assert os.listdir(tmp_path / "new" / "folder") == ["step-00000007.safetensors"]
    back = store.load(paths[0])
    assert back["step"] == 7
    assert torch.equal(back["model"]["w"], torch.full((4,), 7.0))


def test_newest_is_found_by_number_and_the_rest_is_pruned(tmp_path: Path) -> None:
    assert store.latest(tmp_path) is None
    for step in (9, 10, 99_999_999, 100_000_000):  # the last name is one digit longer
        save(tmp_path, step, keep=2)
        newest = store.latest(tmp_path)
        assert newest is not None
        assert store.load(newest)["step"] == step
    assert {store.step_of(path) for path in tmp_path.iterdir()} == {99_999_999, 100_000_000}


def test_what_a_crash_left_is_ignored_then_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    torn = tmp_path / ".step-00000002.tmp"
    torn.write_bytes(b"half")
    newest = store.latest(tmp_path)
    assert newest is not None
    assert store.step_of(newest) == 1
    save(tmp_path, 3)
    assert not torn.exists()


def test_a_failed_write_is_the_same_error_on_every_rank_and_harms_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".step-00000002.tmp").mkdir()  # nobody can write here, root included
    with pytest.raises(RankFailed) as caught:
        save(tmp_path, 2, world_size=2)
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():
        assert error.kind == "CheckpointError"
        assert "step-00000002" in error.message
    assert store.load(tmp_path / "step-00000001.safetensors")["step"] == 1


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text", "foreign"])
def test_damaged_file_is_a_checkpoint_error(tmp_path: Path, damage: str) -> None:
    path = save(tmp_path, 1)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "foreign":
        from safetensors.torch import save_file

        save_file({"w": torch.ones(1)}, path)
    else:
        path.write_bytes({"empty": b"", "cut": data[:-3], "text": b"hello" * 10}[damage])
    with pytest.raises(CheckpointError, match="step-00000001"):
        store.load(path)
