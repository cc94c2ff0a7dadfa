"""State dicts of an optimizer over wrapped parameters: keyed by name, whole or in pieces, for any number of ranks.

    {"state": {"layers.0.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"params": ["layers.0.weight", ...], "lr": ...}, ...]}

These are what torch's FullyShardedDataParallel gives and takes, so a file of one may be loaded into the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.fsdp1.arguments import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
    understood,
)
from lockstep.parallel.fsdp1.state import get_state_dict_type, reshard_all
from lockstep.parallel.fsdp1.tensors import gathered, resharded
from lockstep.parallel.fsdp1.unit import clean_name, units_in

StateDict = dict[str, Any]
OptimInput = Iterable[Any] | None  # what was given to the optimizer: parameters, or groups of them


def optim_state_dict(
    model: Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: Any = None
) -> StateDict:
    """The optimizer's state under the parameters' names, as `set_state_dict_type(model, ...)` says.

    optim_state_dict: what to take instead of `optim.state_dict()`. group: not needed, the wrappers know theirs.
    Collective: every rank. Memory: what it returns, and one state tensor.
    """
    return _save(model, _Naming.of(model, optim), optim_state_dict or optim.state_dict(), get_state_dict_type(model))


def optim_state_dict_to_load(
    model: Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, from what `optim_state_dict` returned, on any number of ranks.

    load_directly: give it to `optim` too. is_named_optimizer: `optim` calls its parameters by name.
    Collective: with rank0_only, where rank 0's is taken; with DTensors that lie otherwise than the parameters.
    Raises: ConfigError where there is no parameter of a name.
    """
    settings = get_state_dict_type(model)
    found = _load(model, _Naming.of(model, optim), optim_state_dict, settings, by_name=is_named_optimizer)
    if load_directly:
        optim.load_state_dict(found)
    return found


# ------------------------------------------------------------------ the older names


def full_optim_state_dict(
    model: Module, optim: Optimizer, optim_input: OptimInput = None, rank0_only: bool = True, group: Any = None
) -> StateDict:
    """`optim_state_dict` with whole tensors on the CPU, on rank 0 unless rank0_only=False. Collective: every rank."""
    settings = StateDictSettings(optim_state_dict_config=FullOptimStateDictConfig(rank0_only=rank0_only))
    return _save(model, _Naming.of(model, optim, optim_input), optim.state_dict(), settings)


def sharded_optim_state_dict(model: Module, optim: Optimizer, group: Any = None) -> StateDict:
    """`optim_state_dict` with DTensors. Collective: every rank."""
    settings = StateDictSettings.of(StateDictType.SHARDED_STATE_DICT, None, ShardedOptimStateDictConfig(False))
    return _save(model, _Naming.of(model, optim), optim.state_dict(), settings)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict, model: Module, optim_input: OptimInput = None, optim: Optimizer | None = None
) -> StateDict:
    """What `optim.load_state_dict` takes, from whole tensors that every rank has."""
    return _load(model, _Naming.of(model, optim, optim_input), full_optim_state_dict, StateDictSettings())


def flatten_sharded_optim_state_dict(sharded_optim_state_dict: StateDict, model: Module, optim: Optimizer) -> StateDict:
    """What `optim.load_state_dict` takes, from DTensors. Collective: every rank."""
    settings = StateDictSettings.of(StateDictType.SHARDED_STATE_DICT)
    return _load(model, _Naming.of(model, optim), sharded_optim_state_dict, settings)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, from whole tensors that rank 0 has. Collective: every rank."""
    settings = StateDictSettings(optim_state_dict_config=FullOptimStateDictConfig(rank0_only=True))
    return _load(model, _Naming.of(model, optim, optim_input), full_optim_state_dict or {}, settings)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: Any,
    model: Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """The same state with parameters called by name or by number, for one process and a model that is not wrapped."""
    to_names = (
        understood(OptimStateKeyType, optim_state_key_type, "optim_state_key_type") is OptimStateKeyType.PARAM_NAME
    )
    kinds = {type(key) for key in optim_state_dict["state"]}
    if len(kinds) > 1:
        raise ValueError(f"Invalid parameter keys: {optim_state_dict['state'].keys()}")
    if kinds <= {str if to_names else int}:
        return optim_state_dict
    names = _Naming.of(model, optim, optim_input).names
    new_key: Any = names.__getitem__ if to_names else {name: number for number, name in enumerate(names)}.__getitem__
    groups = copy.deepcopy(optim_state_dict["param_groups"])
    for each in groups:
        each["params"] = [new_key(key) for key in each["params"]]
    return {"state": {new_key(key): value for key, value in optim_state_dict["state"].items()}, "param_groups": groups}


# ------------------------------------------------------------------ names and numbers


class _Naming(NamedTuple):
    """The parameters of an optimizer in its order, which numbers them, and their names in the model."""

    params: list[Parameter]
    names: list[str]

    @classmethod
    def of(cls, model: Module, optim: Optimizer | None, optim_input: OptimInput = None) -> _Naming:
        """Without an optimizer the parameters it was given, or those of the model."""
        reshard_all(model)
        if optim is not None:
            params = [param for each in optim.param_groups for param in each["params"]]
        else:
            given = list(model.parameters() if optim_input is None else optim_input)
            params = [p for each in given for p in (each["params"] if isinstance(each, dict) else [each])]
        names = {param: clean_name(name) for name, param in Module.named_parameters(model)}
        unknown = [tuple(param.shape) for param in params if param not in names]
        if unknown:
            raise ConfigError(
                f"the optimizer has {len(unknown)} parameter(s) that are not in the model, of shapes {unknown[:3]}: "
                "make it from the parameters of the wrapped model, and outside of summon_full_params"
            )
        return cls(params, [names[param] for param in params])


def _has_sharded(model: Module) -> Communicator:
    units = units_in(model)
    if not units:
        raise ConfigError(f"there is no FullyShardedDataParallel in this {type(model).__name__}")
    return units[0].mesh.whole


# ------------------------------------------------------------------ out


def _save(model: Module, naming: _Naming, raw: StateDict, settings: StateDictSettings) -> StateDict:
    comm = _has_sharded(model)
    config = settings.optim_state_dict_config
    rank0_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    by_key: dict[Any, int] = {key: n for n, name in enumerate(naming.names) for key in (n, name)}
    state: dict[Any, Any] = {}
    for key, entry in raw["state"].items():
        number = by_key.get(key)
        if number is None:
            state[key] = entry  # the user's own
            continue
        param = naming.params[number]
        state[naming.names[number]] = {
            name: _saved(value, param, settings, rank0_only, config.offload_to_cpu) for name, value in entry.items()
        }
    if rank0_only and comm.rank != 0:
        return {}
    groups = copy.deepcopy(raw["param_groups"])
    for each in groups:
        each["params"] = [naming.names[by_key[key]] for key in each["params"]]
    return {"state": state, "param_groups": groups}


def _saved(value: Any, param: Parameter, settings: StateDictSettings, rank0_only: bool, to_cpu: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    found: Tensor | None = value.detach()
    if isinstance(param, DTensor) and local_tensor(value).shape == local_tensor(param).shape and param.ndim:
        if settings.is_full:
            found = gathered(local_tensor(value), param, rank0_only)
        elif settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            found = local_tensor(value.detach())
        else:
            found = resharded(value, param, "", is_local=not isinstance(value, DTensor))
    elif isinstance(value, DTensor):  # of another shape than the parameter, as factored states are
        found = value.full_tensor() if settings.is_full else found
    elif settings.is_full:
        found = value.detach().clone()
    return found.cpu() if to_cpu and found is not None else found


# ------------------------------------------------------------------ in


def _load(
    model: Module, naming: _Naming, saved: Mapping[str, Any], settings: StateDictSettings, by_name: bool = False
) -> StateDict:
    comm = _has_sharded(model)
    config = settings.optim_state_dict_config
    from_rank0 = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    if from_rank0:
        saved = _skeleton_of_rank0(comm, saved)
    number_of = {name: number for number, name in enumerate(naming.names)}
    known = {clean_name(name) for name, _ in Module.named_parameters(model, remove_duplicate=False)}
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    state: dict[Any, Any] = {}
    for name, entry in saved["state"].items():
        if from_rank0:
            entry = {key: _value_of_rank0(comm, value) for key, value in entry.items()}
        if name in number_of:
            number = number_of[name]
            made = {key: _loaded(value, naming.params[number], is_local, name) for key, value in entry.items()}
            state[name if by_name else number] = made
        elif name not in known:
            state[name] = copy.copy(entry)  # the user's own
    if "param_groups" not in saved:
        return {"state": state}
    groups = [dict(each) for each in saved["param_groups"]]
    for each in groups:
        lost = [name for name in each["params"] if name not in known]
        if lost:
            raise ConfigError(f"the optimizer state has {', '.join(lost[:3])}, which the model has not")
        numbers = sorted({number_of[name] for name in each["params"] if name in number_of})
        each["params"] = [naming.names[number] for number in numbers] if by_name else numbers
    return {"state": state, "param_groups": groups}


def _loaded(value: Any, param: Parameter, is_local: bool, name: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not isinstance(param, DTensor) or not value.ndim:
        return value.detach().clone()
    return resharded(value, param, name, is_local).clone()  # the optimizer keeps it: a view would keep the whole


def _skeleton_of_rank0(comm: Communicator, saved: Mapping[str, Any]) -> StateDict:
    """Rank 0's state dict; what stands for a tensor is the tensor on rank 0, and shape and dtype elsewhere."""
    told = None
    if comm.rank == 0:
        state = {name: {k: _described(v) for k, v in entry.items()} for name, entry in saved["state"].items()}
        told = [state, [dict(each) for each in saved.get("param_groups", ())]]
    state, groups = comm.broadcast_object(told, label="fsdp.optimizer")
    return dict(saved) if comm.rank == 0 else {"state": state, "param_groups": groups}


def _described(value: Any) -> Any:
    return (
        {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Tensor)
        else value
    )


def _value_of_rank0(comm: Communicator, value: Any) -> Any:
    is_tensor = (
        isinstance(value, Tensor) if comm.rank == 0 else isinstance(value, dict) and set(value) == {"shape", "dtype"}
    )
    if not is_tensor:
        return value
    if comm.rank == 0:
        tensor: Tensor = value.detach().to(comm.device).contiguous()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tensor = torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device=comm.device)
    comm.broadcast(tensor, label="fsdp.optimizer")
    return tensor if tensor.ndim else tensor.cpu()
