"""States of DTensors in checkpoints: cut in any way when they are saved, loaded into any other way of cutting."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.state import State
from lockstep.comm.communicator import Communicator
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads
from sharded_tensors import cut, expected_part, mesh_of

Shape = tuple[int, ...]
GRIDS: tuple[Shape, ...] = ((1,), (2,), (3,), (2, 2))
SHAPES: dict[str, Shape] = {"embedding": (7, 4), "cube": (4, 5, 3), "bias": (2,), "empty": (0, 3), "one": (1, 6)}


def whole_state() -> State:
    """Uneven tensors, one with fewer rows than ranks, an empty one, bf16, integers, ties, scalars, values."""
    generator = torch.Generator().manual_seed(3)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    model["half"] = torch.randn(5, 3, generator=generator).bfloat16()
    model["head"] = model["embedding"]
    moments = {name: {"exp_avg": t * 2, "step": torch.tensor(7.0)} for name, t in model.items() if name != "head"}
    rest = {"groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "nothing": None, "counts": torch.arange(4), "flag": True}
    return {"model": model, "optimizer": {"state": moments, **rest}, "epoch": 3, "twin": {"cube": model["cube"]}}


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


def blank(state: Any) -> Any:
    made: dict[int, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(walk(inner) for inner in value)
        return made.setdefault(id(value), torch.full_like(value, -1)) if isinstance(value, Tensor) else None

    return walk(state)


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


def save(comm: Communicator, directory: Path, shape: Shape, dim: int = 0) -> Path:
    return Checkpointer(directory, comm).save(1, cut_state(whole_state(), shape, comm.rank, dim))


def load_and_compare(comm: Communicator, directory: Path, shape: Shape, dim: int) -> None:
    expected = whole_state()
    mesh = mesh_of(shape, comm.rank)
    into = cut_state(blank(expected), shape, comm.rank, dim)
    loaded = Checkpointer(directory, comm).load(into)
    assert loaded is not None
    leaves_equal(loaded.state, expected, lambda whole: expected_part(whole, mesh, min(dim, whole.ndim - 1)))
    assert loaded.state["model"]["cube"] is into["model"]["cube"], "filled in place"


@pytest.mark.parametrize(("before", "dim"), [*((grid, 0) for grid in GRIDS), ((3,), 1)], ids=str)
def test_load_at_any_world_size_and_strategy(tmp_path: Path, before: Shape, dim: int) -> None:
    run_threads(math.prod(before), save, tmp_path, before, dim)
    for after, along in [*((grid, 0) for grid in GRIDS), ((3,), 1)]:
        run_threads(math.prod(after), load_and_compare, tmp_path, after, along)
    alone = Checkpointer(tmp_path).load()
    assert alone is not None
    leaves_equal(alone.state, whole_state(), lambda whole: whole)


def test_every_piece_is_written_once_by_the_first_that_has_it(tmp_path: Path) -> None:
    path = run_threads(4, save, tmp_path, (2, 2))[0]
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found[file.name] = set(opened.keys())
    assert set(found) <= {f"rank-{rank:05}.safetensors" for rank in range(4)}
    pieces = {name: sum("model/cube" in names for names in (found.get(name, set()),)) for name in found}
    assert pieces["rank-00000.safetensors"] == pieces["rank-00001.safetensors"] == 1
    assert sum(pieces.values()) == 2, "ranks 2 and 3 have copies"
    everything = [name for names in found.values() for name in names]
    assert everything.count("model/one") == 1, "one row, two ranks"
    assert not {"model/head", "twin/cube", "model/empty"} & set(everything), "tied, and without elements"


def save_on_some_ranks(comm: Communicator, directory: Path, wholes: list[Tensor]) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([1, 2]), _init_backend=False, _rank=comm.rank)

    def held(whole: Tensor) -> DTensor:
        local = whole.chunk(2)[comm.rank - 1].clone() if comm.rank else torch.empty(0)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    checkpointer = Checkpointer(directory, comm)
    checkpointer.save(1, {str(index): held(whole) for index, whole in enumerate(wholes)})
    into = {str(index): held(torch.zeros_like(whole)) for index, whole in enumerate(wholes)}
    checkpointer.load(into)
    for index, whole in enumerate(wholes):
        assert torch.equal(into[str(index)].to_local(), held(whole).to_local())


def test_tensors_of_some_ranks_only(tmp_path: Path) -> None:
    run_threads(3, save_on_some_ranks, tmp_path, [torch.arange(5.0), torch.arange(5.0) + 10])


def save_unsummed(comm: Communicator, directory: Path) -> None:
    waiting = DTensor.from_local(torch.ones(2), mesh_of((2,), comm.rank), [Partial()], run_check=False)
    Checkpointer(directory, comm).save(1, {"bias": waiting})


def test_what_waits_for_a_sum_is_refused_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="Partial") as caught:
        run_threads(2, save_unsummed, tmp_path)
    assert {error.kind for error in caught.value.errors.values()} == {"CheckpointError"}
    assert set(caught.value.errors) == {0, 1}
