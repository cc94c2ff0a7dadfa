"""state_dict and load_state_dict of wrapped modules: names as if they were not wrapped, whole tensors or pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.fsdp1.arguments import FullStateDictConfig, StateDictSettings, StateDictType
from lockstep.parallel.fsdp1.tensors import gathered, resharded
from lockstep.parallel.fsdp1.unit import WRAPPED, FsdpUnit, clean_name, unit_of, units_in

_PREFIX = f"{WRAPPED}."


def set_state_dict_type(
    module: Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> StateDictSettings:
    """What `state_dict`, `load_state_dict` and `optim_state_dict` give and take from now on; returns what it was.

    For every wrapper in `module`, which need not be one. Without it: FULL_STATE_DICT, on every rank.
    """
    before = get_state_dict_type(module)
    _set(module, StateDictSettings.of(state_dict_type, state_dict_config, optim_state_dict_config))
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
        _set(module, before)


def _set(module: Module, settings: StateDictSettings) -> None:
    for unit in units_in(module):
        unit.settings = settings


# ------------------------------------------------------------------ hooks of a wrapper


def attach_state_dict(wrapper: Module) -> None:
    """Let torch's state_dict and load_state_dict of `wrapper`, and of what it is in, work as above."""
    wrapper.register_state_dict_pre_hook(_before_saving)
    wrapper.register_state_dict_post_hook(_after_saving)
    wrapper.register_load_state_dict_pre_hook(_before_loading)
    wrapper.register_load_state_dict_post_hook(_after_loading)


def reshard_all(module: Module) -> None:
    """Let the modules in all wrappers have their shards. Not collective."""
    for unit in units_in(module):
        if unit.summoned is None:
            unit.module.reshard()


def _before_saving(wrapper: Module, prefix: str, keep_vars: bool) -> None:
    reshard_all(wrapper)


def _after_saving(wrapper: Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Inner wrappers have done the same for their part before."""
    unit = _own_unit(wrapper)
    keys = [key for key in state_dict if key.startswith(prefix + _PREFIX)]
    for key in keys:
        state_dict[prefix + key.removeprefix(prefix + _PREFIX)] = state_dict.pop(key)
    if unit.settings.is_full:
        _make_whole(unit, state_dict, prefix)
    config = unit.settings.state_dict_config
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if unit.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            state_dict[key] = local_tensor(state_dict[key])
        elif (dtype := unit.saved_dtypes.get(key.removeprefix(prefix))) is not None:
            state_dict[key] = state_dict[key].to(dtype)
        if config.offload_to_cpu and hasattr(state_dict[key], "cpu"):
            state_dict[key] = state_dict[key].cpu()


def _make_whole(unit: FsdpUnit, state_dict: dict[str, Any], prefix: str) -> None:
    config = unit.settings.state_dict_config
    rank0_only = isinstance(config, FullStateDictConfig) and config.rank0_only
    summoned = [inner.summoned for inner in units_in(unit.wrapper) if inner.summoned is not None]
    whole: dict[int, Any] = {}  # a tied parameter is gathered once, and tied in the state dict too
    for name, param in unit.named_parameters().items():
        key = prefix + name
        if key not in state_dict or not isinstance(state_dict[key], DTensor):
            continue
        if id(param) not in whole:  # what rank 0 alone has summoned is in no other rank's state dict
            is_elsewhere = any(each.holds(param) for each in summoned)
            whole[id(param)] = None if is_elsewhere else gathered(local_tensor(param), param, rank0_only)
        state_dict[key] = whole[id(param)]
        if whole[id(param)] is None:
            del state_dict[key]
    if rank0_only and unit.mesh.whole.rank != 0:
        for name, _ in unit.wrapper.named_buffers(remove_duplicate=False):
            state_dict.pop(prefix + clean_name(name), None)


def _before_loading(wrapper: Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    unit = _own_unit(wrapper)
    reshard_all(wrapper)
    is_local = unit.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    params = unit.named_parameters()
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name, value = key.removeprefix(prefix), state_dict.pop(key)
        param = params.get(name)
        if isinstance(param, DTensor) and hasattr(value, "shape"):
            value = resharded(value, param, name, is_local)
        state_dict[prefix + _PREFIX + name] = value


def _after_loading(wrapper: Module, incompatible_keys: Any) -> None:
    for keys in incompatible_keys:
        keys[:] = [clean_name(key) for key in keys]


def _own_unit(wrapper: Module) -> FsdpUnit:
    unit = unit_of(wrapper)
    assert unit is not None, "the hooks are a wrapper's"
    return unit
