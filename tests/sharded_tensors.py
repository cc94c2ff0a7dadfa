"""DTensors and cut models for ranks that are threads: meshes without process groups, pieces cut by torch.chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def mesh_of(shape: Sequence[int], rank: int) -> DeviceMesh:
    """The ranks 0, 1, ... as a grid, seen from `rank`."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(*shape), _init_backend=False, _rank=rank)


def cut(whole: Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """`whole` along the last axis of the mesh, equal along the others. Memory: a copy."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    pieces = whole.detach().chunk(mesh.size(mesh.ndim - 1), dim)
    place = coordinate[-1]
    piece = pieces[place] if place < len(pieces) else whole.detach().narrow(dim, 0, 0)
    local = (
        torch.empty_like(piece, memory_format=torch.contiguous_format) if piece.is_meta else piece.clone().contiguous()
    )
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def cut_model(model: nn.Module, mesh: DeviceMesh, dim: int = 0) -> nn.Module:
    """Every parameter of `model` becomes a DTensor, as fully_shard leaves them between steps; ties stay."""
    made: dict[int, nn.Parameter] = {}
    before = list(model.parameters())  # so that no two have one id
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in made:
                along = dim if dim < param.ndim else 0
                made[id(param)] = nn.Parameter(cut(param, mesh, along), requires_grad=param.requires_grad)
            module._parameters[name] = made[id(param)]
    del before
    return model


def local_parts(state: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's elements of each tensor."""
    return {k: t._local_tensor if isinstance(t, DTensor) else t.detach() for k, t in state.items()}


def expected_part(whole: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """What `cut` keeps of `whole`."""
    return cut(whole, mesh, dim if dim < whole.ndim else 0).to_local()
