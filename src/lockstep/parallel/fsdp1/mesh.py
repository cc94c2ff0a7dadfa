"""A sharding strategy and a process_group or device_mesh, as the axes that parameters are cut and copied along."""

from __future__ import annotations

from typing import Any

from lockstep.comm import preflight, torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import hosts_of
from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DeviceMesh
from lockstep.parallel.fsdp1.arguments import HYBRID
from lockstep.parallel.shard_mesh import ShardMesh, grid_of, resolve_mesh
from lockstep.parallel.torch_fsdp import ShardingStrategy


def mesh_for(strategy: ShardingStrategy, process_group: Any, device_mesh: Any) -> ShardMesh:
    """Where the parameters of one wrapper lie.

    NO_SHARD cuts them into one piece; the hybrid strategies cut them inside a host, unless two axes are given.
    Collective: every rank of the group, the first time for each group and strategy.
    Raises: ConfigError, ValueError where both are given.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    given = resolve_mesh(_as_mesh(process_group) if device_mesh is None else device_mesh)
    if strategy is ShardingStrategy.NO_SHARD:
        return grid_of(given.whole, 1)
    if strategy in HYBRID:
        return grid_of(given.whole, _ranks_per_host(given.whole)) if given.replicate is None else given
    if given.replicate is not None:
        raise ConfigError(
            f"{strategy.name} cuts parameters along one axis and the mesh has two: pass HYBRID_SHARD, or the axis that "
            f"shards, mesh[{(given.device_mesh.mesh_dim_names or ('shard',))[-1]!r}]"
        )
    return given


def _as_mesh(process_group: Any) -> Any:
    """Something that resolve_mesh takes; a pair is torch's (group that shards, group that replicates)."""
    if process_group is None or isinstance(process_group, Communicator | ShardMesh):
        return process_group
    if not isinstance(process_group, tuple):
        return DeviceMesh.from_group(process_group, torch_names.communicator_over(process_group).device.type)
    if len(process_group) != 2 or any(group is None or isinstance(group, Communicator) for group in process_group):
        raise ConfigError(
            f"process_group={process_group!r}: a pair is torch's (group that shards, group that replicates); of a "
            "lockstep Communicator pass device_mesh=comm.mesh(replica=..., shard=...)"
        )
    shard, replicate = (torch_names.communicator_over(group) for group in process_group)
    rows = replicate.all_gather_object(list(shard.global_ranks), label="fsdp.mesh")
    names = ("replicate", "shard")
    return DeviceMesh.from_group(list(process_group[::-1]), shard.device.type, rows, mesh_dim_names=names)


def _ranks_per_host(comm: Communicator) -> int:
    hosts = hosts_of(comm.all_gather_object(preflight.machine_id(), label="fsdp.mesh"))
    size = len(hosts[0])
    if hosts != tuple(tuple(range(first, first + size)) for first in range(0, comm.world_size, size)):
        raise ConfigError(
            f"the hosts have ranks {', '.join(str(list(host)) for host in hosts)}: without equally many, numbered one "
            "host after the other, pass device_mesh with two axes, (replicate, shard)"
        )
    return size
