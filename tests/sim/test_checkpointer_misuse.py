"""The Checkpointer used wrongly, interrupted, or beside others: an error that says so, or the right checkpoint."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint import loading, saving
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.together import together
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import Part, TensorPieces
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.testing.worlds import run_threads


def small(step: int) -> dict[str, Any]:
    big = torch.full((300, 1001), float(step))  # cut between rows
    return {"big": big, "tied": big, "odd": torch.arange(7.0) + step, "step": step}


def assert_is(found: dict[str, Any], step: int) -> None:
    assert found["step"] == step
    assert all(torch.equal(found[key], small(step)[key]) for key in ("big", "tied", "odd"))


def test_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    """What is saved last is what counts, and it is not what `keep` deletes."""
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(10, small(10))
        for step in (4, 7, 7, 6):
            assert checkpointer.save(step, small(step)).is_dir()
            assert checkpointer.steps() == [step]
        found = checkpointer.load()
        assert found is not None
        assert_is(found.state, 6)


def test_steps_that_no_folder_is_named_by(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(10**18 - 1, {})
    for step in (10**18, True, 1.0, "3"):
        with pytest.raises(CheckpointError, match="a number from 0 up, of at most 18 digits"):
            checkpointer.save(step, {})  # pyright: ignore[reportArgumentType]
    assert checkpointer.steps() == [10**18 - 1]
    with pytest.raises(ConfigError, match="step='1'"):
        checkpointer.load(step="1")  # pyright: ignore[reportArgumentType]


def test_closed_and_used_again(tmp_path: Path) -> None:
    def save(comm: Communicator | None) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        checkpointer.close()  # never used
        for step in (1, 3):
            checkpointer.save(step, small(step))
            checkpointer.save_async(step + 1, small(step + 1))
            checkpointer.close()
            checkpointer.close()
        found = checkpointer.load()
        assert found is not None
        assert found.step == 4

    save(None)
    run_threads(2, save)


def test_waiting_that_a_signal_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save still reads its copy: the next one may not take the memory before it has ended."""
    go, real = threading.Event(), saving.write_tensor_file

    def slow(*args: Any) -> Any:
        assert go.wait(20)
        return real(*args)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "write_tensor_file", slow)
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        one = checkpointer.save_async(1, small(1))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "join", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.wait()
        assert not one.is_done()
        threading.Timer(0.05, go.set).start()
        checkpointer.save_async(2, small(2))
        assert one.is_done()
        found = checkpointer.load(step=1)
        assert found is not None
        assert_is(found.state, 1)


def test_no_memory_for_the_copy_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank hears of it, and the next save works."""
    real = Snapshot.take
    ranks = threading.local()

    def take(*args: Any) -> Any:
        if ranks.rank == 1 and not ranks.is_over:
            raise RuntimeError("can't allocate memory")
        return real(*args)

    monkeypatch.setattr(Snapshot, "take", take)

    def save(comm: Communicator) -> None:
        ranks.rank, ranks.is_over = comm.rank, False
        with Checkpointer(tmp_path, comm) as checkpointer:
            pending = checkpointer.save_async(1, small(1))
            with pytest.raises(CheckpointError, match="rank 1: RuntimeError: can't allocate memory"):
                pending.wait()
            ranks.is_over = True
            checkpointer.save_async(2, small(2))

    run_threads(2, save)
    assert Checkpointer(tmp_path).steps() == [2]


def test_ranks_at_different_calls(tmp_path: Path) -> None:
    def call(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm, keep=None)
        checkpointer.save(1, {})
        checkpointer.save(2, {})
        with pytest.raises(
            CheckpointMismatch, match=r"ranks \[0\] load the newest checkpoint; ranks \[1\] save step 3"
        ):
            checkpointer.save(3, {}) if comm.rank else checkpointer.load()
        with pytest.raises(CheckpointMismatch, match=r"ranks \[0\] load step 1; ranks \[1\] load step 2"):
            checkpointer.load(step=comm.rank + 1)
        checkpointer.close()

    run_threads(2, call)


def test_warnings_that_are_errors(tmp_path: Path) -> None:
    """Rank 0 alone warns: the others do not go on without it."""

    def load(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match=r"rank 0: UserWarning: .*The next older checkpoint is tried"):
            Checkpointer(tmp_path, comm).load()

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small(1))
        (checkpointer.save(2, small(2)) / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_threads(2, load)


@pytest.mark.parametrize("world_size", [1, 2])
def test_loading_while_another_process_prunes(tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pruned between looking and opening is no damage: the newer one is found."""
    writer = Checkpointer(tmp_path, keep=1)
    writer.save(1, small(1))
    real, one_by_one = loading.open_checkpoint, threading.Lock()

    def open_late(path: Path) -> Any:
        with one_by_one:
            if path.exists() and "step-00000001" in path.name:
                writer.save(2, small(2))
        return real(path)

    def load(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        found = checkpointer.load()
        assert found is not None
        assert (found.step, found.skipped) == (2, ())
        assert_is(found.state, 2)

    monkeypatch.setattr(loading, "open_checkpoint", open_late)
    run_threads(world_size, load)


def test_a_directory_that_is_none_or_goes_away(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(tmp_path / "file")
    for call in (checkpointer.latest, checkpointer.steps, checkpointer.verify, checkpointer.load):
        with pytest.raises(CheckpointError, match=r"cannot look for checkpoints in .*file.*Not a directory"):
            call()
    with pytest.raises(CheckpointError, match=r"cannot save step 1 in .*file"):
        checkpointer.save(1, {})
    checkpointer = Checkpointer(tmp_path / "gone")
    checkpointer.save(1, {})
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"generation-1, in which this run writes, is gone.*start the run again"):
        checkpointer.save(2, {})
    (tmp_path / "gone").mkdir()
    with pytest.raises(CheckpointError, match="in which this run writes, is gone"):
        checkpointer.save(2, {})


def test_objects_under_any_keys(tmp_path: Path) -> None:
    """By numbers, in dicts of other classes; and shards that are one tensor."""

    class Clock:
        def __init__(self, time: int) -> None:
            self.time = time

        def state_dict(self) -> dict[str, Any]:
            return {"time": self.time}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.time = state["time"]

    checkpointer = Checkpointer(tmp_path)
    saved = {"a": {0: Clock(1), 7: Clock(2)}, "b": OrderedDict({"x/y": Clock(3)})}
    checkpointer.save(1, saved, shards={3: torch.ones(2)})  # pyright: ignore[reportArgumentType]
    clocks = [Clock(0) for _ in range(3)]
    found = checkpointer.load({"a": {0: clocks[0], 7: clocks[1]}, "b": OrderedDict({"x/y": clocks[2]})}, shards=[3])
    assert found is not None
    assert [clock.time for clock in clocks] == [1, 2, 3]
    assert found.state["a"][7] is clocks[1]
    assert torch.equal(found.shards[3], torch.ones(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match="load into a dict"):
        checkpointer.load(nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]


def test_tensors_that_are_lazily_negative_or_conjugate(tmp_path: Path) -> None:
    """Their memory does not hold their elements: it may not be filled as it is."""
    checkpointer = Checkpointer(tmp_path)
    saved = {"neg": torch._neg_view(torch.arange(5.0)), "conj": torch.randn(4, dtype=torch.complex64).conj()}
    checkpointer.save(1, saved)
    into = {"neg": torch._neg_view(torch.zeros(5)), "conj": torch.zeros(4, dtype=torch.complex64).conj()}
    checkpointer.load(into)
    assert torch.equal(into["neg"], -torch.arange(5.0))
    assert torch.equal(into["conj"], saved["conj"])


def test_what_ranks_say_may_be_long() -> None:
    """Digests of a hundred thousand pieces are more than objects between ranks usually may be."""

    def say(comm: Communicator) -> None:
        mine = [comm.rank] * 2_000_000
        _, said = together(comm, "cannot talk", lambda: (None, mine))
        assert [set(one) for one in said] == [{0}, {1}]

    run_threads(2, say)


def test_shards_hold_no_cut_tensors(tmp_path: Path) -> None:
    row = torch.ones(1, 3)
    cut = TensorPieces(row.dtype, (2, 3), ((Part((0, 0), (1, 3)), row),))
    with pytest.raises(CheckpointError, match="shards/4/x is cut over ranks"):
        Checkpointer(tmp_path).save(1, {}, shards={4: {"x": cut}})


OVERLAPPING = {
    "expanded": lambda: torch.zeros(3, 1).expand(3, 4),
    "expanded from nothing": lambda: torch.zeros(()).expand(3, 4),
    "windows": lambda: torch.arange(6.0).unfold(0, 4, 1),
    "both ways": lambda: torch.zeros(11).as_strided((3, 4), (2, 2)),
}
APART = {
    "turned": lambda: torch.zeros(4, 3).t(),
    "every other": lambda: torch.zeros(3, 8)[:, ::2],
    "interleaved": lambda: torch.zeros(20).as_strided((3, 4), (3, 4)),
    "one row": lambda: torch.zeros(3, 4),
}


@pytest.mark.parametrize("name", [*OVERLAPPING, *APART])
def test_a_tensor_whose_elements_share_memory_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    """Also where only one rank has it."""
    saved = {"a": torch.ones(2), "m": {"x": torch.arange(12.0).view(3, 4)}, "z": torch.ones(2)}

    def load(comm: Communicator) -> None:
        checkpointer = Checkpointer(tmp_path, comm)
        strange = (OVERLAPPING | APART)[name]() if comm.rank == 1 else torch.zeros(3, 4)
        before = strange.clone()
        into = {"a": torch.zeros(2), "m": {"x": strange}, "z": torch.zeros(2)}
        if name in APART:
            checkpointer.load(into)
            assert torch.equal(strange, saved["m"]["x"])
            return
        with pytest.raises(CheckpointMismatch, match=r"rank 1: m/x has elements that share memory.*clone\(\)$"):
            checkpointer.load(into, allow=["dtype", "shape", "missing", "extra"])
        assert not into["a"].any()
        assert not into["z"].any()
        assert torch.equal(strange, before)

    Checkpointer(tmp_path).save(1, saved)
    run_threads(2, load)


def test_a_module_whose_parameter_is_expanded_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"m": module})
    module.weight = nn.Parameter(torch.zeros(1, 4).expand(3, 4))
    with pytest.raises(CheckpointMismatch, match="m/weight has elements that share memory"):
        checkpointer.load({"m": module})
