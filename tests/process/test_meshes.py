"""Meshes of stock torch under a guard: which ranks have laid them out in another way is named, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from guarded_programs import is_left_alone, is_named
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def names_swapped_on_one(rank: int, _: Path) -> None:
    """The first mesh is right, and of the second each rank sums along the dimension that has the name there."""
    init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("tp", "dp") if rank == 2 else ("dp", "tp"))
    dist.all_reduce(torch.ones(3), group=mesh["dp" if rank < 2 else "tp"].get_group())


def meshes_of_all_kinds(rank: int, _: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    if rank == 0:  # makes no group
        DeviceMesh("cpu", [1, 0], mesh_dim_names=("save",))
        DeviceMesh.from_group([mesh.get_group("tp"), mesh.get_group("dp")], "cpu", [[0, 1]], mesh_dim_names=("a", "b"))
        DeviceMesh("cpu", [[0, 1]], _init_backend=False)
    mesh["dp", "tp"]._flatten("all")
    DeviceMesh("cpu", [[0]], mesh_dim_names=("x", "y") if rank else ("y", "x"))  # rank 1 is not in it
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    values = torch.full((3,), rank + 1.0)
    for each in (mesh, other):
        dist.all_reduce(values, group=each["dp"].get_group())
    return values


def test_the_rank_that_swaps_the_names_is_named(tmp_path: Path) -> None:
    words = (
        "MESHES differ in their dimensions, or in the order of their ranks.  Culprit: rank 2",
        "ranks 0,1: (dp=3, tp=1) of ranks [0, 1, 2] at tests/process/test_meshes.py",
        "rank 2: (tp=3, dp=1) of ranks [0, 1, 2] at tests/process/test_meshes.py",
        "raised CollectiveMismatch",
    )
    is_named(names_swapped_on_one, words, tmp_path, ranks=3)


def test_meshes_that_fit_are_left_alone(tmp_path: Path) -> None:
    is_left_alone(meshes_of_all_kinds, tmp_path)
