"""The Checkpointer on ranks that are threads: what is saved is what is loaded, or an error says why not."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint import saving
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.generation import Generation, names_in
from lockstep.checkpoint.rng import rng_state, set_rng_state
from lockstep.comm.communicator import Communicator
from lockstep.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
    ConfigError,
    StaleGeneration,
)
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

WORLDS = (1, 2, 3, 5)


def state_of(step: int) -> dict[str, Any]:
    """Odd shapes, odd dtypes, a tie, and everything that torch's optimizers and schedulers have."""
    generator = torch.Generator().manual_seed(step)
    big = torch.randn(400, 1001, generator=generator)  # cut between rows
    return {
        "model": {
            "big": big,
            "tied": big,
            "odd": torch.randn(7, 3, 5, generator=generator).transpose(0, 2),
            "half": torch.randn(33, generator=generator).bfloat16(),
            "count": torch.tensor(step),
            "none": torch.empty(0, 4),
            "a/b~c": torch.arange(5) > 2,
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 7: {}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "step": step,
        "best": float("inf"),
        "name": "é",
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("commit", ["rename", "marker"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_what_was_saved_is_loaded_by_any_number_of_ranks(tmp_path: Path, world_size: int, commit: Any) -> None:
    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, commit=commit) as checkpointer:
            path = checkpointer.save(3, state_of(3))
            assert path == checkpointer.path_of(3)
            checkpointer.save_async(4, state_of(4)).wait()

    def load(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        assert (checkpointer.steps(), checkpointer.latest()) == ([3, 4], 4)
        checkpointer.verify(3)
        whole = checkpointer.load()
        assert whole is not None
        assert (whole.step, whole.skipped) == (4, ())
        assert_same(whole.state, state_of(4))
        assert whole.state["model"]["tied"] is whole.state["model"]["big"]
        into = state_of(0)
        tensors = dict(into["model"])
        found = checkpointer.load(into, step=3)
        assert found is not None
        assert_same(found.state, state_of(3))
        for name, tensor in tensors.items():
            assert found.state["model"][name] is tensor

    run_threads(world_size, save)
    files = sorted(path.name for path in (tmp_path / "step-00000004-g1").iterdir())
    assert len(files) == world_size + 1  # every rank has written its share
    for other in (1, world_size + 1):
        run_threads(other, load)


def test_a_save_in_the_background_holds_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        state = state_of(1)
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            for step in range(1, 6):
                state["step"] = step
                state["model"]["count"].fill_(step)
                state["model"]["big"].fill_(step)
                pending = checkpointer.save_async(step, state)
                state["model"]["big"].fill_(-1.0)
                assert pending.step == step

    def check(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        for step in range(1, 6):
            found = checkpointer.load(step=step)
            assert found is not None
            assert (found.state["model"]["big"] == step).all()
            assert found.state["step"] == found.state["model"]["count"] == step

    run_threads(2, save)
    run_threads(1, check)


def test_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def save(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        checkpointer.save(1, state_of(1))
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(saving, "write_tensor_file", full)
        comm.barrier()
        checkpointer.save_async(2, state_of(2))
        with pytest.raises(CheckpointError, match=r"cannot save step 3 .*cannot save step 2 .*No space left"):
            checkpointer.save(3, state_of(3))
        checkpointer.save_async(4, state_of(4))
        with pytest.raises(CheckpointError, match=r"cannot save step 4.*No space left"):
            checkpointer.close()
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.undo()
        comm.barrier()
        assert checkpointer.steps() == [1]
        checkpointer.save(5, state_of(5))
        checkpointer.close()

    run_threads(2, save)
    assert [name.step for name in names_in(tmp_path)] == [5, 1]
    assert not list(next(tmp_path.glob(".generation-*")).iterdir())


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, first, real = threading.Event(), threading.Event(), saving.write_tensor_file

    def slow(*args: Any) -> Any:
        first.set()
        assert go.wait(20)
        return real(*args)

    monkeypatch.setattr(saving, "write_tensor_file", slow)
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        one = checkpointer.save_async(1, state_of(1))
        assert first.wait(20)
        assert not one.is_done()
        threading.Timer(0.05, go.set).start()
        two = checkpointer.save_async(2, state_of(2))
        assert one.is_done()
        assert one.path == checkpointer.path_of(1)
        assert two.wait() == checkpointer.path_of(2)
    checkpointer.verify(1)


def damage(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("world_size", [1, 2])
def test_damaged_ones_are_named_and_passed_over(tmp_path: Path, world_size: int) -> None:
    def save(comm: Communicator) -> None:
        with Checkpointer(tmp_path, comm, keep=None) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state_of(step))

    def load(comm: Communicator, good: int) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        model = state_of(0)
        if not good:
            with pytest.raises(CheckpointDamaged, match=r"no checkpoint in .* is good: .*step-00000003-g1.*g1"):
                checkpointer.load(model)
            assert_same(model, state_of(0))  # not a tensor was touched
            return
        found = checkpointer.load(model)
        assert found is not None
        assert found.step == good
        assert len(found.skipped) == 3 - good
        assert_same(found.state, state_of(good))

    run_threads(world_size, save)
    damage(tmp_path / "step-00000003-g1" / f"rank-{world_size - 1:05}.safetensors")
    with pytest.warns(UserWarning, match=r"model/.*The next older checkpoint is tried"):
        run_threads(world_size, load, 2)
    (tmp_path / "step-00000002-g1" / "manifest.json").unlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_threads(world_size, load, 1)
    texts = [str(warning.message) for warning in said if "checkpoint" in str(warning.message)]
    assert [text.count(f"step-0000000{step}-g1") > 0 for step, text in zip((3, 2), texts, strict=True)] == [
        True,
        True,
    ], texts
    damage(tmp_path / "step-00000001-g1" / "manifest.json", 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_threads(world_size, load, 0)
        with pytest.raises(CheckpointMissing, match=r"no checkpoint of step 9: it has \[1, 2, 3\]"):
            Checkpointer(tmp_path).load(step=9)
        with pytest.raises(CheckpointDamaged, match="rank-0000"):
            Checkpointer(tmp_path).verify(3)


def test_nothing_to_load(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "none")
    assert checkpointer.load() is None
    assert checkpointer.load(state_of(1)) is None
    assert (checkpointer.latest(), checkpointer.steps()) == (None, [])
    assert not (tmp_path / "none").exists()
    with pytest.raises(CheckpointMissing, match="has no checkpoint"):
        checkpointer.verify()


def test_only_the_newest_stay_and_only_after_one_was_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step))
        assert checkpointer.steps() == [2, 3]
        real = saving.write_tensor_file

        def bad_disk(path: Path, *args: Any) -> Any:
            record = real(path, *args)
            damage(path)
            return record

        monkeypatch.setattr(saving, "write_tensor_file", bad_disk)
        with pytest.raises(CheckpointDamaged, match="no older one was deleted"):
            checkpointer.save(4, state_of(4))
        assert checkpointer.steps() == [2, 3, 4]
    with pytest.warns(UserWarning, match="step-00000004"):
        found = Checkpointer(tmp_path).load()
    assert found is not None
    assert found.step == 3


def test_later_generations_are_newer_whatever_their_steps(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state_of(step))
    with Checkpointer(tmp_path, keep=3) as again:
        found = again.load(step=10)
        assert found is not None
        again.save(15, state_of(15))
        assert again.latest() == 15
        again.save(15, state_of(16))  # the same step once more: the old one goes when the new one is there
        loaded = again.load()
        assert loaded is not None
        assert_same(loaded.state, state_of(16))


@pytest.mark.parametrize("commit", ["rename", "marker"])
def test_a_process_that_was_left_over_changes_nothing(tmp_path: Path, commit: Any) -> None:
    old = Checkpointer(tmp_path, commit=commit)
    old.save(1, state_of(1))
    new = Checkpointer(tmp_path, commit=commit)
    assert new.load() is not None
    new.save(2, state_of(2))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StaleGeneration, match="generation 2 has taken over"):
        old.save(3, state_of(3))
    with pytest.raises(StaleGeneration):
        old.save_async(3, state_of(3)).wait()
    assert sorted(os.listdir(tmp_path)) == before
    new.save(3, state_of(3))
    new.save(4, state_of(4))
    assert new.steps() == [3, 4]
    old.close()
    new.close()


def test_left_over_in_the_middle_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes over when the files are written and only the rename is missing."""
    real = Generation.publish

    def late(self: Generation, unfinished: Path) -> Path:
        monkeypatch.undo()
        with Checkpointer(tmp_path) as other:
            other.save(2, state_of(5))
        return real(self, unfinished)

    old = Checkpointer(tmp_path)
    old.save(1, state_of(1))
    monkeypatch.setattr(Generation, "publish", late)
    with pytest.raises(StaleGeneration):
        old.save(2, state_of(2))
    found = Checkpointer(tmp_path).load()
    assert found is not None
    assert_same(found.state, state_of(5))
    assert len(list(tmp_path.glob(".generation-*"))) == 1
    old.close()


def test_one_rank_alone_is_an_error(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        if comm.rank == 0:
            checkpointer.save(1, state_of(1))
        else:
            comm.all_reduce(torch.ones(3))

    with pytest.raises(RankFailed, match="checkpoint"):
        run_threads(2, save)
    assert not list(tmp_path.iterdir())


def test_ranks_that_save_different_things_are_told_what(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        other = comm.rank == 1
        with pytest.raises(CheckpointMismatch, match=r"ranks \[0, 2\] save step 1 in .*; ranks \[1\] save step 2"):
            checkpointer.save(2 if other else 1, {"x": torch.ones(2)})
        with pytest.raises(CheckpointMismatch, match=r"ranks \[1\] have other tensors than rank 0: m/x\."):
            checkpointer.save(1, {"m": {"x": torch.ones(3 if other else 2)}})
        with pytest.raises(CheckpointMismatch, match=r"ranks \[1\] have other values than rank 0: m/rank.*shards="):
            checkpointer.save(1, {"m": {"rank": comm.rank if other else 0, "x": 3}})
        with pytest.raises(CheckpointMismatch, match="ranks 0 and 1 both have shard 5"):
            checkpointer.save(1, {}, shards={5: {}})
        with pytest.raises(CheckpointError, match=r"rank 1: .*function"):
            checkpointer.save(1, {"f": print if other else 1})
        with pytest.raises(CheckpointError, match="'shards' cannot be a key"):
            checkpointer.save(1, {"shards": {}})
        with pytest.raises(CheckpointError, match="step=-1"):
            checkpointer.save(-1, {})
        checkpointer.save(1, {})

    run_threads(3, save)


def test_shards_go_where_they_are_needed(tmp_path: Path) -> None:
    """Four virtual shards with random numbers of their own, on 2 ranks, then 4, then 1."""

    def draw(comm: Communicator, step: int) -> list[list[float]]:
        checkpointer = Checkpointer(tmp_path, comm)
        mine = range(comm.rank * 4 // comm.world_size, (comm.rank + 1) * 4 // comm.world_size)
        generators = {shard: torch.Generator().manual_seed(shard) for shard in mine}
        found = checkpointer.load({}, shards=mine)
        if found is not None:
            assert found.shards.keys() == set(mine)
            for shard, generator in generators.items():
                generator.set_state(found.shards[shard]["rng"])
                assert found.shards[shard]["of"] == [shard]
        drawn = [torch.rand(2, generator=generators[shard]).tolist() for shard in mine]
        checkpointer.save(step, {}, shards={s: {"rng": g.get_state(), "of": [s]} for s, g in generators.items()})
        checkpointer.close()
        return drawn

    found = [[numbers for rank in run_threads(world, draw, step) for numbers in rank]
             for step, world in enumerate((2, 4, 1))]  # fmt: skip
    expected = [torch.Generator().manual_seed(shard) for shard in range(4)]
    assert found == [[torch.rand(2, generator=generator).tolist() for generator in expected] for _ in range(3)]
    with pytest.raises(CheckpointMismatch, match="shards/4 is not in the checkpoint"):
        Checkpointer(tmp_path).load({}, shards=[4])


def test_differences_are_errors_unless_they_are_named(tmp_path: Path) -> None:
    saved = {"m": {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5)}, "n": 1}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)

        def into() -> dict[str, Any]:
            return {
                "m": {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.float64), "d": torch.zeros(1)},
                "n": 0,
                "p": 7,
            }

        with pytest.raises(CheckpointMismatch) as raised:
            checkpointer.load(into())
        for words in (
            "m/a is [3, 2], the checkpoint has [2, 3] (allow='shape')",
            "m/b is torch.float64, the checkpoint has torch.float32 (allow='dtype')",
            "m/c is in the checkpoint only (allow='extra')",
            "m/d is not in the checkpoint (allow='missing')",
            "p is not in the checkpoint (allow='missing')",
        ):
            assert words in str(raised.value)
        with pytest.raises(CheckpointMismatch, match=r"^[^;]*m/c is in the checkpoint only[^;]*$"):
            checkpointer.load(into(), allow=("dtype", "missing:m/*", "missing:p", "shape:m/a"))
        found = checkpointer.load(into(), allow=("dtype", "missing", "extra:m/c", "shape"))
        assert found is not None
        expected = {"m": {"a": torch.zeros(3, 2), "b": torch.ones(4).double(), "d": torch.zeros(1)}, "n": 1, "p": 7}
        assert_same(found.state, expected)
        with pytest.raises(ConfigError, match="allow='everything': use dtype"):
            checkpointer.load(into(), allow=["everything"])


def test_objects_of_torch_are_saved_and_loaded(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> Tensor:
        for _ in range(steps):
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    parts = build(0)
    train(*parts, 3)
    named = dict(zip(("model", "optimizer", "scheduler"), parts, strict=True))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, {**named, "deep": {"scheduler": parts[2]}}, shards={0: rng_state()})
    expected = train(*parts, 4)

    fresh = dict(zip(named, build(1), strict=True))
    found = checkpointer.load({**fresh, "deep": {"scheduler": fresh["scheduler"]}}, shards=[0])
    assert found is not None
    assert found.state["model"] is fresh["model"]
    set_rng_state(found.shards[0])
    assert torch.equal(train(*fresh.values(), 4), expected)
    with pytest.raises(CheckpointMismatch, match="another is not in the checkpoint"):
        checkpointer.load({**fresh, "another": fresh["scheduler"]}, allow=["extra"])
    checkpointer.close()


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        Checkpointer("x", keep=0)
    with pytest.raises(ConfigError, match="commit='copy'"):
        Checkpointer("x", commit="copy")  # pyright: ignore[reportArgumentType]


def test_a_process_that_was_left_over_does_not_take_over_again(tmp_path: Path) -> None:
    """Not even by saving a step once more that it has saved before."""
    old, new = Checkpointer(tmp_path), Checkpointer(tmp_path)
    old.save(1, {"x": torch.ones(1)})
    new.save(2, {"x": torch.ones(2)})
    with pytest.raises(StaleGeneration):
        old.save(1, {"x": torch.ones(3)})
    new.save(3, {"x": torch.ones(4)})
    assert new.steps() == [2, 3]
    old.close()
    new.close()
