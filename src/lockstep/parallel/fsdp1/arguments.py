"""What FullyShardedDataParallel is given, checked, and what of it fully_shard is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from torch.nn import Module, Parameter

from lockstep.comm import preflight, torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import hosts_of
from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DeviceMesh
from lockstep.parallel.shard_mesh import ShardMesh, grid_of, resolve_mesh
from lockstep.parallel.torch_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)

_Kind = TypeVar("_Kind")

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # cut inside a host, copied between
# Those that give parameters back after forward, but for the root's, which are needed at once again
RESHARD_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

_CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def checked(kind: type[_Kind], given: Any, argument: str, default: _Kind | None = None) -> _Kind:
    """`given`, or `default` for None.  Raises: ConfigError for what is no `kind`."""
    found = default if given is None else given
    if not isinstance(found, kind):
        raise ConfigError(f"{argument}={given!r}: pass a {kind.__name__}")
    return found


def settings_of(
    state_dict_type: Any = StateDictType.FULL_STATE_DICT, config: Any = None, optim_config: Any = None
) -> StateDictSettings:
    """What state dicts of a wrapped module give and take: those of a type, with its own defaults.

    Raises: ConfigError for the configuration of another type.
    """
    kind = checked(StateDictType, state_dict_type, "state_dict_type")
    of_model, of_optimizer = _CONFIGS[kind]
    return StateDictSettings(
        kind,
        checked(of_model, config, "state_dict_config", of_model()),
        checked(of_optimizer, optim_config, "optim_state_dict_config", of_optimizer()),
    )


def for_rank0_only(config: Any) -> bool:
    """Whether rank 0 alone gets the state, and of an optimizer's gives it."""
    return getattr(config, "rank0_only", False)


class Ignored(NamedTuple):
    """What a wrapper leaves alone."""

    modules: set[Module]
    params: set[Parameter]


def understand_ignored(ignored_modules: Iterable[Module] | None, ignored_states: Iterable[Any] | None) -> Ignored:
    """The ignored modules, with all below them, and the ignored parameters, with those of the modules.

    Raises: ValueError where both are given, ConfigError for things of other kinds, or of both.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    argument = "ignored_states" if ignored_modules is None else "ignored_modules"
    states: list[Any] = list(ignored_modules or ignored_states or ())
    if argument == "ignored_states" and all(isinstance(state, Parameter) for state in states):
        return Ignored(set(), set(states))
    if not all(isinstance(state, Module) for state in states):
        found = ", ".join(sorted({type(state).__name__ for state in states}))
        kinds = "modules" if argument == "ignored_modules" else "parameters or modules, all of one kind"
        raise ConfigError(f"{argument} takes {kinds}, not {found}")
    modules = {module for top in states for module in top.modules()}
    return Ignored(modules, {param for module in modules for param in module.parameters(recurse=False)})


# ------------------------------------------------------------------ along which axes parameters are cut and copied


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
