"""DTensors and cut models for ranks that are threads, cut by torch.chunk, and a count of the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


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


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made, as long as they are alive; the most there were at once.

    The pages of a safetensors file are not counted: they take memory as long as nothing else needs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        if isinstance(result, Tensor) and not result.is_meta:
            storage = local_parts({"": result})[""].untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()
        if self._covered() > self.most:
            files = mapped_files()
            self._storages = {
                key: held for key, held in self._storages.items() if not any(held[1] in pages for pages in files)
            }
            self.most = max(self.most, self._covered())
        return result

    def _covered(self) -> int:
        """Several storages may be over the same memory, a flat shard and its pieces say."""
        covered, end = 0, 0
        for start, nbytes in sorted((start, nbytes) for _, start, nbytes in self._storages.values()):
            covered += max(0, start + nbytes - max(start, end))
            end = max(end, start + nbytes)
        return covered


def mapped_files() -> list[range]:
    """The addresses at which this process has safetensors files."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(".safetensors")]
    return [range(*(int(address, 16) for address in line.split()[0].split("-"))) for line in lines]
