"""torch's DTensor as the face of a sharded parameter: what torch's checkpoints, clipping and optimizers understand.

Only the representation: nothing here communicates. A DTensor holds this rank's piece and says of which whole it is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["DTensor", "DeviceMesh", "Replicate", "Shard", "as_dtensor", "local_tensor", "mesh_of_ranks"]


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], requires_grad: bool = False
) -> DTensor:
    """`local` as this rank's piece of a contiguous tensor of `shape`. Memory: the same, no copy."""
    whole = torch.empty(shape, dtype=local.dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=requires_grad)  # pyright: ignore[reportCallIssue] (made by __new__)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, as it is stored; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def mesh_of_ranks(device_type: str, ranks: Any, rank: int, names: tuple[str, ...] | None) -> DeviceMesh:
    """A DeviceMesh that only says where `rank` stands among `ranks` (nested lists), for ranks without process group."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
