"""state_dict and load_state_dict of wrapped modules: names as if they were not wrapped, whole tensors or pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.fsdp1.arguments import for_rank0_only, settings_of
from lockstep.parallel.fsdp1.tensors import gathered, resharded, sharded_like
from lockstep.parallel.fsdp1.unit import WRAPPED, FsdpUnit, clean_name, units_in
from lockstep.parallel.torch_fsdp import StateDictSettings, StateDictType


def set_state_dict_type(
    module: Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> StateDictSettings:
    """What `state_dict`, `load_state_dict` and `optim_state_dict` give and take from now on; returns what it was.

    For every wrapper in `module`, which need not be one. Without it: FULL_STATE_DICT, on every rank.
    """
    before = get_state_dict_type(module)
    settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
    for unit in units_in(module):
        unit.settings = settings
    return before


def get_state_dict_type(module: Module) -> StateDictSettings:
    """The settings of all wrappers in `module`.  Raises: ConfigError where there is none, or they differ."""
    found = [unit.settings for unit in units_in(module)]
    if not found:
        raise ConfigError(f"there is no FullyShardedDataParallel in this {type(module).__name__}")
    if any(settings != found[0] for settings in found):
        kinds = sorted({settings.state_dict_type.name for settings in found})
        raise ConfigError(
            f"the wrappers in this module are set differently, {', '.join(kinds)}: set_state_dict_type(module, ...)"
        )
    return found[0]


@contextlib.contextmanager
def state_dict_type(
    module: Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Iterator[None]:
    """`set_state_dict_type` for as long as the context."""
    before = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit in units_in(module):
            unit.settings = before


def presented(piece: Tensor, param: DTensor, kind: StateDictType, rank0_only: bool = False) -> Tensor | None:
    """`piece`, this rank's of something cut as `param` is, as a state dict of this kind has it.

    Collective: for FULL_STATE_DICT, every rank; then None on other ranks than 0 if `rank0_only`.
    """
    if kind is StateDictType.FULL_STATE_DICT:
        return gathered(piece, param, rank0_only)
    if kind is StateDictType.LOCAL_STATE_DICT:
        return local_tensor(piece)
    return piece if isinstance(piece, DTensor) else sharded_like(piece, param)


# ------------------------------------------------------------------ hooks of a wrapper


def attach_state_dict(wrapper: Module) -> None:
    """Let torch's state_dict and load_state_dict of `wrapper`, and of what it is in, work as above."""
    wrapper.register_state_dict_post_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


def _after_saving(wrapper: Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Inner wrappers have done the same for their part before; what is a DTensor still is of this one."""
    unit: FsdpUnit = vars(wrapper)["_fsdp_unit"]
    config = unit.settings.state_dict_config
    params, buffers = unit.named_parameters(), unit.named_buffers()
    is_left_out = for_rank0_only(config) and unit.mesh.whole.rank != 0
    made: dict[int, Any] = {}  # a tied parameter is gathered once, and tied in the state dict too
    for key in [key for key in state_dict if key.startswith(f"{prefix}{WRAPPED}.")]:
        name = key.removeprefix(f"{prefix}{WRAPPED}.")
        value, param = state_dict.pop(key), params.get(name)
        if isinstance(value, DTensor) and isinstance(param, DTensor):
            if id(param) not in made:
                made[id(param)] = _saved(unit, value, param)
            value = made[id(param)]
            if value is None:
                continue
        elif name in buffers:
            if is_left_out:
                continue
            value = value.to((unit.saved_dtypes or {}).get(name))
        state_dict[prefix + name] = value.cpu() if config.offload_to_cpu and hasattr(value, "cpu") else value


def _saved(unit: FsdpUnit, value: DTensor, param: DTensor) -> Tensor | None:
    is_full = unit.settings.state_dict_type is StateDictType.FULL_STATE_DICT
    if is_full and unit.is_summoned:
        return None  # rank 0 alone has it whole, and gathers nothing
    return presented(value, param, unit.settings.state_dict_type, for_rank0_only(unit.settings.state_dict_config))


def _before_loading(wrapper: Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    unit: FsdpUnit = vars(wrapper)["_fsdp_unit"]
    reshard_all(wrapper)
    is_local = unit.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    params = unit.named_parameters()
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name, value = key.removeprefix(prefix), state_dict.pop(key)
        param = params.get(name)
        if isinstance(param, DTensor) and isinstance(value, Tensor):
            value = resharded(value, param, name, is_local)
        state_dict[f"{prefix}{WRAPPED}.{name}"] = value


def _after_loading(wrapper: Module, incompatible_keys: Any) -> None:
    for keys in incompatible_keys:
        keys[:] = [clean_name(key) for key in keys]


def reshard_all(module: Module) -> None:
    """Let the modules in all wrappers have their shards. Not collective."""
    for unit in units_in(module):
        if not unit.is_summoned:
            unit.module.reshard()
