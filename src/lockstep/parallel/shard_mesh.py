"""Along which ranks parameters are cut, along which they are copied: whatever a user passes as `mesh`, understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.mesh import Mesh
from lockstep.comm.transport import Transport
from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DeviceMesh, Replicate, Shard, mesh_of_ranks


@dataclass(frozen=True)
class ShardMesh:
    """The ranks of one group of parameters.

    Ranks of a line along `shard` hold different pieces; those of a line along `replicate` equal ones.
    """

    shard: Communicator
    replicate: Communicator | None  # None where nothing is replicated
    whole: Communicator  # all of them
    device_mesh: DeviceMesh  # what the DTensors say, [shard] or [replicate, shard]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.whole.device

    def placements(self, dim: int) -> tuple[Replicate | Shard, ...]:
        """How a parameter cut along `dim` lies on `device_mesh`."""
        return (Shard(dim),) if self.device_mesh.ndim == 1 else (Replicate(), Shard(dim))


# In a transport's own dict: one grid for all modules over the same ranks, which lives as long as the transport. Ranks
# make it together, so it must not depend on when each of them lets go of its last module.
_GRIDS = "_lockstep_grids"
_apart: WeakKeyDictionary[Transport, Communicator] = WeakKeyDictionary()  # the same, which does not refer to it


def resolve_mesh(mesh: Any) -> ShardMesh:
    """`mesh` as a ShardMesh: None (torch's default group), a Communicator, a Mesh or a DeviceMesh of 1 or 2 axes.

    Of two axes the first replicates, the second shards.
    Collective: every rank of it, the first time.
    Raises: ConfigError for anything else, and on a rank that has no place in it.
    """
    if isinstance(mesh, ShardMesh):
        return mesh
    if isinstance(mesh, Communicator):
        return _of_ranks(mesh)
    if isinstance(mesh, Mesh):
        return _of_ours(mesh)
    if mesh is None:
        return _of_ranks(torch_names.communicator_over())
    if isinstance(mesh, DeviceMesh):
        return _of_torch(mesh)
    raise ConfigError(
        f"mesh={mesh!r}: pass a torch DeviceMesh, a lockstep Mesh or Communicator, or nothing for the default group"
    )


def grid_of(comm: Communicator, size: int) -> ShardMesh:
    """The ranks of `comm` in lines of `size` neighbours, between which there are copies; made once.

    Collective: every rank of `comm`, the first time.
    """
    made: dict[int, ShardMesh] = vars(comm.transport).setdefault(_GRIDS, {})
    if size not in made:
        made[size] = _of_ours(Mesh(comm, {"replica": -1, "shard": size}))
    return made[size]


def apart(comm: Communicator) -> Communicator:
    """A second communicator of the same ranks, whose operations do not wait for those of `comm`; made once.

    Collective: every rank of `comm`, the first time.
    """
    if comm.transport not in _apart:
        made = comm.split(0, name=f"{comm.name}/apart")
        assert made is not None, "all ranks gave a color"
        _apart[comm.transport] = made
    return _apart[comm.transport]


def _of_ours(mesh: Mesh) -> ShardMesh:
    if len(mesh.axes) > 2:
        raise ConfigError(
            f"mesh has {len(mesh.axes)} axes, {mesh.sizes}: fully_shard takes (shard) or (replica, shard)"
        )
    if len(mesh.axes) == 1:
        return _of_ranks(mesh.comm)
    replicate, shard = list(mesh.axes)
    grid = torch.tensor(mesh.comm.global_ranks).view(mesh.sizes[replicate], mesh.sizes[shard])
    groups = [torch_names.process_group_of(mesh[axis]) for axis in mesh.axes]
    return ShardMesh(mesh[shard], mesh[replicate], mesh.comm, _device_mesh(mesh.comm, grid, groups, mesh.axes))


def _of_ranks(comm: Communicator) -> ShardMesh:
    groups = [torch_names.process_group_of(comm)]
    return ShardMesh(comm, None, comm, _device_mesh(comm, torch.tensor(comm.global_ranks), groups, None))


def _of_torch(mesh: DeviceMesh) -> ShardMesh:
    if mesh.ndim > 2:
        raise ConfigError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: pass its axes for data, mesh[...]"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"this rank is not in {mesh}: call fully_shard on the ranks of the mesh only")
    whole = torch_names.communicator_over(torch_names.flat_group(mesh))
    if mesh.ndim == 1:
        return ShardMesh(whole, None, whole, mesh)
    replicate, shard = (torch_names.communicator_over(mesh.get_group(axis)) for axis in (0, 1))
    return ShardMesh(shard, replicate, whole, mesh)


def _device_mesh(
    comm: Communicator, ranks: torch.Tensor, groups: list[Any], names: tuple[str, ...] | None
) -> DeviceMesh:
    """A DeviceMesh with torch's process groups, so that torch's tools can communicate; without where there is none."""
    device = comm.device.type
    if all(group is not None for group in groups):
        found = groups[0] if len(groups) == 1 else groups
        return DeviceMesh.from_group(found, device, None if len(groups) == 1 else ranks, mesh_dim_names=names)
    return mesh_of_ranks(device, ranks, comm.global_ranks[comm.rank], names)
