"""The enums and dataclasses that FullyShardedDataParallel takes. Torch's of the same names are understood too."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError
from lockstep.parallel.shard_policies import CPUOffloadPolicy, MixedPrecisionPolicy

_Kind = TypeVar("_Kind")


class ShardingStrategy(enum.Enum):
    """What each rank keeps of parameters, gradients and optimizer state.

    FULL_SHARD: 1/N of all; parameters are gathered for forward and again for backward.
    SHARD_GRAD_OP: 1/N of all; parameters gathered for forward stay whole until backward is over.
    NO_SHARD: everything, as in DistributedDataParallel.
    HYBRID_SHARD, _HYBRID_SHARD_ZERO2: FULL_SHARD, SHARD_GRAD_OP inside a host, NO_SHARD between hosts.
    """

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether parameters are cut along one axis of ranks and copied along another."""
        return self.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

    @property
    def reshard_after_forward(self) -> bool | None:
        """For fully_shard. None: all but the root's parameters, which are needed at once again, are given back."""
        return None if self.name in ("FULL_SHARD", "HYBRID_SHARD") else False


class BackwardPrefetch(enum.Enum):
    """When the next unit's parameters are gathered in backward: beside this unit's computation, or after it."""

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of computation, reduction and buffers. None leaves a dtype as it is.

    buffer_dtype: floating-point buffers are cast to it in the first forward; state dicts have them as they were.
    keep_low_precision_grads: gradients are handed out in param_dtype, for optimizers that take them so.
    cast_forward_inputs: every unit casts its floating-point inputs to param_dtype.
    cast_root_forward_inputs: the outermost one does.
    _module_classes_to_ignore: with an auto_wrap_policy, modules of these classes are units without mixed precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[Module]] = (_BatchNorm,)

    def policy(self) -> MixedPrecisionPolicy:
        """The same for fully_shard, which casts no inputs: whether to do it depends on who is the root."""
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=False)


@dataclass(frozen=True)
class CPUOffload:
    """Whether shards of parameters and gradients, and so the optimizer's step, are on the CPU."""

    offload_params: bool = False

    def policy(self) -> CPUOffloadPolicy | None:
        """The same for fully_shard."""
        return CPUOffloadPolicy() if self.offload_params else None


class StateDictType(enum.Enum):
    """What a state dict holds: whole tensors, this rank's pieces as plain tensors, or as DTensors."""

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


@dataclass(frozen=True)
class FullStateDictConfig:
    """rank0_only: the other ranks get a dict without what is sharded, and without buffers."""

    offload_to_cpu: bool = False
    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig:
    """For LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedStateDictConfig:
    """For SHARDED_STATE_DICT. The values are DTensors, whatever `_use_dtensor` says: torch's ShardedTensor is older."""

    offload_to_cpu: bool = False
    _use_dtensor: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig:
    """rank0_only: the other ranks get an empty dict; what is loaded is rank 0's."""

    offload_to_cpu: bool = True
    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig:
    """For LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig:
    """For SHARDED_STATE_DICT."""

    offload_to_cpu: bool = True
    _use_dtensor: bool = True


StateDictConfig = FullStateDictConfig | LocalStateDictConfig | ShardedStateDictConfig
OptimStateDictConfig = FullOptimStateDictConfig | LocalOptimStateDictConfig | ShardedOptimStateDictConfig

_CONFIGS: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """What `state_dict`, `load_state_dict` and `optim_state_dict` of a wrapped module give and take."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = FullStateDictConfig()
    optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()

    @classmethod
    def of(cls, state_dict_type: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
        """Settings of a type, with the defaults of that type.

        Raises: ConfigError for the configuration of another type.
        """
        kind = understood(StateDictType, state_dict_type, "state_dict_type")
        of_model, of_optimizer = _CONFIGS[kind]
        return cls(
            kind,
            understood(of_model, config, "state_dict_config", of_model()),
            understood(of_optimizer, optim_config, "optim_state_dict_config", of_optimizer()),
        )

    @property
    def rank0_only(self) -> bool:
        """Whether rank 0 alone gets a module's state."""
        return getattr(self.state_dict_config, "rank0_only", False)

    @property
    def optim_rank0_only(self) -> bool:
        """Whether rank 0 alone gets an optimizer's state, and gives it."""
        return getattr(self.optim_state_dict_config, "rank0_only", False)


class OptimStateKeyType(enum.Enum):
    """What an optimizer's state dict calls a parameter."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


def understood(kind: type[_Kind], given: Any, argument: str, default: _Kind | None = None) -> _Kind:
    """`given` as a `kind`: one of ours, or torch's of the same name; `default` for None.

    Raises: ConfigError for anything else.
    """
    if given is None and default is not None:
        return default
    if isinstance(given, kind):
        return given
    if type(given).__name__ == kind.__name__:
        of_ours: Any = kind
        with contextlib.suppress(KeyError, AttributeError):  # of that name, and something else
            if isinstance(given, enum.Enum):
                return of_ours[given.name]
            return of_ours(**{field.name: getattr(given, field.name) for field in dataclasses.fields(of_ours)})
    raise ConfigError(f"{argument}={given!r}: pass a {kind.__name__}, lockstep's or torch's")


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
