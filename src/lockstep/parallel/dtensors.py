"""torch's DTensor as the face of a sharded parameter: what torch's checkpoints, clipping and optimizers understand.

Only the representation: nothing here communicates. A DTensor holds this rank's piece and says of which whole it is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import Replicate as Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """`local` as this rank's piece of a contiguous tensor of `shape`. Memory: the same, no copy."""
    whole = torch.empty(shape, dtype=local.dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # pyright: ignore[reportCallIssue] (made by __new__)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, as it is stored; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def mesh_of_ranks(device_type: str, ranks: Any, rank: int, names: tuple[str, ...] | None) -> DeviceMesh:
    """A DeviceMesh that only says where `rank` stands among `ranks` (nested lists), for ranks without process group."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One DeviceMesh with the axes of all, and with their process groups.

    Raises: ValueError, RuntimeError where they are not different axes of one root mesh.
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise ValueError("axes without names")
    return DeviceMesh._concatenate(list(meshes))


def shard_within(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> Placement:
    """What an axis to the left of `mesh` says of itself that cuts, along `dim`, the pieces of `placements` over it."""
    cuts = [isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim for placement in placements]
    parts = math.prod(mesh.size(axis) for axis, is_cut in enumerate(cuts) if is_cut)
    return Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
