"""Sharded checkpoints: any way of cutting is saved, any other loads it, failures are the same on every rank."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from lockstep.checkpoint import pieces, sharded
from lockstep.checkpoint.state import State
from lockstep.comm.communicator import Communicator
from lockstep.errors import CheckpointError
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads
from sharded_tensors import cut, expected_part, local_parts, mesh_of

Shape = tuple[int, ...]
GRIDS: tuple[Shape, ...] = ((1,), (2,), (3,), (2, 2))


def whole_state() -> State:
    """Uneven tensors, one with fewer rows than ranks, an empty one, bf16, integers, ties, scalars, values."""
    generator = torch.Generator().manual_seed(3)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    model["half"] = torch.randn(5, 3, generator=generator).bfloat16()
    model["head"] = model["embedding"]
    moments = {name: {"exp_avg": t * 2, "step": torch.tensor(7.0)} for name, t in model.items() if name != "head"}
    rest = {"groups": [{"lr": 0.1, "betas": [0.9, 0.95]}], "nothing": None, "counts": torch.arange(4), "flag": True}
    twin = {"cube": model["cube"]}
    return {"model": model, "optimizer": {"state": moments, **rest}, "epoch": 3, "none": {}, "twin": twin}


SHAPES: dict[str, Shape] = {"embedding": (7, 4), "cube": (4, 5, 3), "bias": (2,), "empty": (0, 3), "one": (1, 6)}


def cut_state(state: State, shape: Shape, rank: int, dim: int = 0) -> State:
    """As a sharded model and its optimizer have it: parameters and moments in pieces, scalars and counts whole."""
    mesh = mesh_of(shape, rank)
    made: dict[int, DTensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if not isinstance(value, Tensor) or value.ndim == 0 or value.dtype == torch.int64:
            return value
        return made.setdefault(id(value), cut(value, mesh, min(dim, value.ndim - 1)))

    return walk(state)


def blank(state: State) -> State:
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if not isinstance(state, Tensor):
        return None
    return torch.full_like(state, -1)


def leaves_equal(found: Any, expected: Any, part: Callable[[Tensor], Tensor]) -> None:
    if isinstance(expected, dict) and expected:
        assert found.keys() == expected.keys()
        for key in expected:
            leaves_equal(found[key], expected[key], part)
    elif isinstance(expected, Tensor):
        local, right = (found.to_local(), part(expected)) if isinstance(found, DTensor) else (found, expected)
        assert (local.dtype, local.shape) == (right.dtype, right.shape)
        assert torch.equal(local, right)
    else:
        assert found == expected


def save(comm: Communicator, directory: Path, shape: Shape, step: int = 1, **kwargs: Any) -> Path:
    return sharded.save(comm, directory, step, cut_state(whole_state(), shape, comm.rank), **kwargs)


def saved(directory: Path, shape: Shape = (2,), step: int = 1) -> Path:
    return run_threads(math.prod(shape), save, directory, shape, step)[0]


def tensors_in(folder: Path) -> dict[str, list[str]]:
    """File -> names of the tensors in it."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found[file.name] = list(opened.keys())
    return found


# ------------------------------------------------------------------ any way of cutting to any other


def load_and_compare(comm: Communicator, path: Path, shape: Shape, dim: int) -> None:
    expected = whole_state()
    mesh = mesh_of(shape, comm.rank)
    into = cut_state(blank(expected), shape, comm.rank, dim)
    loaded = sharded.load(comm, path, into)
    leaves_equal(loaded, expected, lambda whole: expected_part(whole, mesh, min(dim, whole.ndim - 1)))
    assert loaded["model"]["cube"] is into["model"]["cube"], "filled in place"


@pytest.mark.parametrize("before", GRIDS, ids=str)
def test_load_at_any_world_size_and_strategy(tmp_path: Path, before: Shape) -> None:
    path = saved(tmp_path, before)
    assert path == sharded.latest(tmp_path)
    for after, dim in [*((grid, 0) for grid in GRIDS), ((3,), 1)]:
        run_threads(math.prod(after), load_and_compare, path, after, dim)


def load_plain(comm: Communicator, path: Path) -> None:
    leaves_equal(sharded.load(comm, path, blank(whole_state())), whole_state(), lambda whole: whole)


def test_load_into_plain_tensors_on_every_rank(tmp_path: Path) -> None:
    run_threads(2, load_plain, saved(tmp_path, (3,)))


def test_every_piece_is_written_once(tmp_path: Path) -> None:
    found = tensors_in(saved(tmp_path, (2, 2)))
    assert list(found) == ["rank-00000.safetensors", "rank-00001.safetensors"], "ranks 2 and 3 have copies only"
    first, second = (set(names) for names in found.values())
    assert "model/cube" in first & second
    assert "optimizer/counts" in first - second
    assert "optimizer/state/cube/step" in first - second
    assert not {"model/head", "model/empty"} & (first | second), "tied to model/embedding, and without elements"
    assert "model/one" in first - second, "one row, two ranks"


def cut_along(comm: Communicator, directory: Path, dim: int) -> Path:
    return sharded.save(comm, directory, 1, cut_state(whole_state(), (3,), comm.rank, dim))


def test_cut_along_another_dimension(tmp_path: Path) -> None:
    path = run_threads(3, cut_along, tmp_path, 1)[0]
    run_threads(2, load_and_compare, path, (2,), 0)


def save_on_some_ranks(comm: Communicator, directory: Path, wholes: list[Tensor]) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([1, 2]), _init_backend=False, _rank=comm.rank)

    def held(whole: Tensor) -> DTensor:
        local = whole.chunk(2)[comm.rank - 1].clone() if comm.rank else torch.empty(0)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    path = sharded.save(comm, directory, 1, {str(index): held(whole) for index, whole in enumerate(wholes)})
    into = {str(index): held(torch.zeros_like(whole)) for index, whole in enumerate(wholes)}
    sharded.load(comm, path, into)
    for index, whole in enumerate(wholes):
        assert torch.equal(into[str(index)].to_local(), held(whole).to_local())


def test_tensors_of_some_ranks_only(tmp_path: Path) -> None:
    run_threads(3, save_on_some_ranks, tmp_path, [torch.arange(5.0), torch.arange(5.0) + 10])


# ------------------------------------------------------------------ the folder


def test_newest_is_found_others_are_pruned_and_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    assert sharded.latest(tmp_path) is None
    others = ["step-00000400", "step-old", "step-00000500.safetensors"]  # have no manifest
    for name in others:
        (tmp_path / name).mkdir()
    for step in (9, 10, 99_999_999, 100_000_000):  # the last name is one digit longer
        left = tmp_path / f".step-{step:08}.partial"
        left.mkdir()
        (left / "rank-00007.safetensors").write_bytes(b"half")
        path = run_threads(2, save, tmp_path, (2,), step, keep=2)[0]
        assert sharded.latest(tmp_path) == path
        assert sorted(os.listdir(path)) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert set(os.listdir(tmp_path)) == {"step-100000000", "step-99999999", *others}


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = saved(tmp_path, (3,))
    assert saved(tmp_path, (2,)) == path
    assert len(tensors_in(path)) == 2
    assert os.listdir(tmp_path) == [path.name]
    run_threads(1, load_and_compare, path, (1,), 0)


# ------------------------------------------------------------------ failures while saving


def refused(caught: pytest.ExceptionInfo[RankFailed], world_size: int, *words: str) -> None:
    """Every rank raised CheckpointError, with all `words`."""
    assert set(caught.value.errors) == set(range(world_size))
    for error in caught.value.errors.values():
        assert error.kind == "CheckpointError"
        for word in words:
            assert word in error.message, error.message


def save_other(comm: Communicator, directory: Path, change: Callable[[State, int], None]) -> None:
    state = cut_state(whole_state(), (2,), comm.rank)
    change(state, comm.rank)
    sharded.save(comm, directory, 2, state)


def bad_key(state: State, rank: int) -> None:
    if rank == 1:
        state["model"]["a/b"] = torch.ones(1)


def no_json(state: State, rank: int) -> None:
    if rank == 0:
        state["epoch"] = object()


def lacking(state: State, rank: int) -> None:
    if rank == 1:
        del state["model"]["bias"]


def unsummed(state: State, rank: int) -> None:
    state["model"]["bias"] = DTensor.from_local(torch.ones(2), mesh_of((2,), rank), [Partial()], run_check=False)


def unfilled(state: State, rank: int) -> None:
    state["model"]["bias"] = torch.empty(2, device="meta")


def unnamed(state: State, rank: int) -> None:
    state["model"]["bias"] = torch.ones(2, dtype=torch.complex128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (bad_key, ["rank 1", "'a/b'"]),
        (no_json, ["rank 0", "not JSON serializable"]),
        (lacking, ["ranks [1]", "other names"]),
        (unsummed, ["rank 0", "rank 1", "Partial"]),
        (unfilled, ["model/bias", "meta device"]),
        (unnamed, ["model/bias", "complex128"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_state_that_cannot_be_saved(tmp_path: Path, change: Callable[[State, int], None], words: list[str]) -> None:
    path = saved(tmp_path)
    with pytest.raises(RankFailed) as caught:
        run_threads(2, save_other, tmp_path, change)
    refused(caught, 2, "step-00000002", *words)
    assert os.listdir(tmp_path) == [path.name], "nothing is left, the older one is there"
    run_threads(1, load_and_compare, path, (1,), 0)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailed) as caught:
        saved(tmp_path / "file" / "deeper")
    refused(caught, 2, "rank 0", "NotADirectoryError")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_cannot_write(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)

    def full(path: Path, tensors: Any, writer: int) -> Any:
        if writer == rank:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return pieces.write_pieces(path, tensors, writer)

    monkeypatch.setattr(sharded, "write_pieces", full)
    with pytest.raises(RankFailed) as caught:
        saved(tmp_path, (3,), step=2)
    refused(caught, 3, f"rank {rank}: OSError", "No space left", "untouched")
    assert os.listdir(tmp_path) == [path.name]


def test_a_failed_rename_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == ".step-00000001.partial":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RankFailed) as caught:
        saved(tmp_path, (3,))
    refused(caught, 3, "rank 0", "Input/output error")
    assert os.listdir(tmp_path) == [path.name]
    run_threads(1, load_and_compare, path, (1,), 0)


def save_with_a_gap(comm: Communicator, directory: Path) -> None:
    state = cut_state(whole_state(), (2,), comm.rank)
    state["model"]["cube"] = cut(whole_state()["model"]["cube"], mesh_of((2,), 0))  # both say they are the first
    sharded.save(comm, directory, 2, state)


def test_pieces_that_leave_a_gap_are_not_committed(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_threads(2, save_with_a_gap, tmp_path)
    refused(caught, 2, "model/cube")
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------ failures while loading


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"])
def test_every_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    file = saved(tmp_path) / name
    data = file.read_bytes()
    places = [*range(0, 64, 7), *range(64, len(data), len(data) // 12), len(data) - 1]
    for place in places:
        file.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(RankFailed) as caught:
            run_threads(2, load_and_compare, file.parent, (2,), 0)
        refused(caught, 2, name)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def linked(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("rank-00001.safetensors", damage) for damage in (Path.unlink, cut_off, linked)),
        *(("manifest.json", damage) for damage in (Path.unlink, cut_off)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_absent_short_and_linked_files_are_found(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    file = saved(tmp_path) / name
    damage(file)
    with pytest.raises(RankFailed) as caught:
        run_threads(2, load_and_compare, file.parent, (2,), 0)
    refused(caught, 2, name)
    with pytest.raises(CheckpointError, match=name):
        sharded.export(file.parent, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest with something changed and its digest made to fit, as an attacker would."""
    import hashlib

    whole = json.loads((folder / "manifest.json").read_text())
    fields = json.loads(whole["manifest"])
    change(fields)
    whole["manifest"] = json.dumps(fields)
    whole["sha256"] = hashlib.sha256(whole["manifest"].encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("name", ["../step-00000001/rank-00001.safetensors", "/etc/passwd", "..", "", "a\\b"])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    rewritten(path, lambda fields: fields["files"].update({name: fields["files"].pop("rank-00001.safetensors")}))
    with pytest.raises(RankFailed) as caught:
        run_threads(2, load_and_compare, path, (2,), 0)
    refused(caught, 2, "only names of files in its own folder")


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["files"].pop("rank-00001.safetensors"),
        lambda fields: fields["tensors"]["model/cube"][1].__setitem__(0, 9),
        lambda fields: fields["tensors"]["model/cube"].__setitem__(0, "I64"),
        lambda fields: fields["tensors"]["model/cube"].__setitem__(0, "no dtype"),
        lambda fields: fields["aliases"].update({"model/head": "model/nowhere"}),
        lambda fields: fields.pop("values"),
        lambda fields: fields.update(files=3),
    ],
)
def test_a_manifest_that_does_not_fit_its_files(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = saved(tmp_path)
    rewritten(path, change)
    with pytest.raises(RankFailed) as caught:
        run_threads(2, load_and_compare, path, (2,), 0)
    refused(caught, 2)


def load_changed(comm: Communicator, path: Path, strict: bool, cast: bool) -> None:
    into = cut_state(blank(whole_state()), (2,), comm.rank)
    del into["model"]["one"]
    into["model"]["fresh"] = torch.full((2,), 5.0)
    into["model"]["half"] = cut(torch.zeros(5, 3), mesh_of((2,), comm.rank))
    if not cast:
        into["model"]["cube"] = torch.zeros(5, 4, 3)
    loaded = sharded.load(comm, path, into, strict=strict, cast=cast)
    assert torch.equal(loaded["model"]["fresh"], torch.full((2,), 5.0))
    expected = expected_part(whole_state()["model"]["half"], mesh_of((2,), comm.rank)).float()
    assert torch.equal(local_parts(loaded["model"])["half"], expected)


def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(RankFailed) as caught:
        run_threads(2, load_changed, path, True, False)
    refused(caught, 2, "model/one is in the checkpoint only", "model/fresh is not in", "[5, 4, 3]", "torch.bfloat16")
    run_threads(2, load_changed, path, False, True)


# ------------------------------------------------------------------ export


def test_export_is_one_plain_file(tmp_path: Path) -> None:
    path, out = saved(tmp_path, (3,)), tmp_path / "model.safetensors"
    sharded.export(path, out)
    expected = whole_state()["model"]
    with safe_open(out, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(expected) - {"head"}
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            assert opened.get_tensor(name).dtype == expected[name].dtype
            assert torch.equal(opened.get_tensor(name), expected[name]), name
    sharded.export(path, out, key="twin")
    with safe_open(out, framework="pt") as opened:
        assert torch.equal(opened.get_tensor("cube"), expected["cube"]), "tied to a tensor that is not exported"
    with pytest.raises(CheckpointError, match=r"'ema'.*'model', 'optimizer'"):
        sharded.export(path, out, key="ema")
    with pytest.raises(CheckpointError, match=r"cannot write .*absent"):
        sharded.export(path, tmp_path / "absent" / "model.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", path.name]
