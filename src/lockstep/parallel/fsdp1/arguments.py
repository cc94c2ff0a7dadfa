"""What FullyShardedDataParallel is given, checked, and what of it fully_shard is told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from torch.nn import Module, Parameter

from lockstep.errors import ConfigError
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
