"""Mesh: the layout of torch's DeviceMesh, a communicator along every axis, and clear refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lockstep import Communicator, Mesh
from lockstep.comm.mesh import coordinate, fill_sizes, lines_along
from lockstep.errors import ConfigError
from lockstep.testing.worlds import run_threads

SHAPES = [
    (1,),
    (2,),
    (1, 1),
    (2, 1),
    (1, 3),
    (2, 2),
    (3, 2),
    (2, 3),
    (1, 4, 1),
    (7,),
    (2, 2, 2),
    (4, 2),
    (2, 1, 3),
    (2, 4),
]
AXES = ("pipe", "replica", "shard")


def sizes_of(shape: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(AXES, shape, strict=False))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lines_are_those_of_torchs_device_mesh(shape: tuple[int, ...]) -> None:
    """DeviceMesh lays ranks out as arange(W).view(shape); lines along axes: other axes in front, these flattened."""
    grid = torch.arange(math.prod(shape)).view(shape)
    sizes = sizes_of(shape)
    for count in range(1, len(shape) + 1):
        for dims in itertools.permutations(range(len(shape)), count):
            rest = [dim for dim in range(len(shape)) if dim not in dims]
            expected = grid.permute(*rest, *dims).reshape(-1, math.prod(shape[dim] for dim in dims))
            assert lines_along([AXES[dim] for dim in dims], sizes) == expected.tolist()
    for rank in range(math.prod(shape)):
        assert list(coordinate(rank, sizes).values()) == (grid == rank).nonzero()[0].tolist()


def walk(comm: Communicator, shape: tuple[int, ...]) -> None:
    """On every rank: each communicator's ranks, order and traffic are those of the layout."""
    sizes = sizes_of(shape)
    axes = tuple(sizes)
    grid = torch.arange(comm.world_size).view(shape)
    with Mesh(comm, sizes) as mesh:
        assert mesh.sizes == sizes
        assert grid[tuple(mesh.coordinate.values())] == comm.rank
        choices = [c for count in range(1, len(axes) + 1) for c in itertools.combinations(axes, count)]
        for chosen in choices:
            line = next(line for line in lines_along(chosen, sizes) if comm.rank in line)
            sub = mesh[chosen]
            assert (sub.global_ranks, sub.rank) == (tuple(line), line.index(comm.rank))
            total = torch.tensor([10 ** (comm.rank % 16)])
            sub.all_reduce(total)
            assert total.item() == sum(10**rank for rank in line)
        assert mesh[axes] is comm, "all axes in order are all ranks"
    comm.barrier()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_communicators(shape: tuple[int, ...]) -> None:
    run_threads(math.prod(shape), walk, shape)


def share(comm: Communicator) -> tuple[bool, bool, int]:
    mesh = comm.mesh(a=1, b=-1, c=1)
    one_rank_only = mesh["b"] if comm.rank == 0 else None  # asking alone must not communicate
    return mesh["a"] is mesh["c"], one_rank_only in (None, comm), mesh["a"].world_size


def test_axes_with_the_same_ranks_share_a_group_and_asking_is_local() -> None:
    assert run_threads(4, share) == [(True, True, 1)] * 4


def messages(comm: Communicator) -> list[str]:
    mesh = Mesh(comm, {"replica": 2, "shard": -1, "pipe": 1})
    found: list[str] = []
    for wrong in ("shrad", "zzz", ("shard", "replica"), (), ("shard", "shard"), ("replica", "x")):
        try:
            mesh[wrong]
        except ConfigError as error:
            found.append(str(error))
    return [*found, repr(mesh)]


def test_wrong_axes_are_explained() -> None:
    typo, unknown, order, none, twice, second, shown = run_threads(4, messages)[1]
    assert "no axis 'shrad'" in typo
    assert "did you mean 'shard'?" in typo
    assert "did you mean" not in unknown
    assert "mesh['replica', 'shard']" in order
    assert "at least one axis" in none
    assert "each once" in twice
    assert "no axis 'x'" in second
    assert shown == "<Mesh 'world': replica=2, shard=2, pipe=1; rank 1 at (0, 1, 0)>"


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ({"replica": 2, "shard": 2}, 6, "replica=2 x shard=2 is for 4 ranks, but the world size is 6"),
        ({"replica": 4, "shard": -1}, 6, "4 does not divide the world size, 6"),
        ({"a": -1, "b": -1}, 4, "only one size can be left open"),
        ({}, 1, "at least one axis"),
        ({"a": 0}, 1, "must be a number from 1"),
        ({"a": True}, 1, "must be a number from 1"),
        ({"a": 2.0}, 2, "must be a number from 1"),
        ({"a b": 2}, 2, "named like a variable"),
    ],
)
def test_wrong_sizes(sizes: dict, world_size: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fill_sizes(sizes, world_size)
    assert expected in str(caught.value)


def test_open_size_is_what_is_left() -> None:
    assert fill_sizes({"a": 2, "b": -1, "c": 3}, 12) == {"a": 2, "b": 2, "c": 3}
    assert fill_sizes({"a": -1}, 7) == {"a": 7}
    assert fill_sizes({"a": 7, "b": -1}, 7) == {"a": 7, "b": 1}
