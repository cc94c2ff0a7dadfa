"""State dicts of an optimizer over wrapped parameters: keyed by name, whole or in pieces, for any number of ranks.

    {"state": {"layers.0.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"params": ["layers.0.weight", ...], "lr": ...}, ...]}

These are what torch's FullyShardedDataParallel gives and takes, so a file of one may be loaded into the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import broadcast_values
from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.fsdp1.arguments import checked, for_rank0_only, settings_of
from lockstep.parallel.fsdp1.state import get_state_dict_type, presented, reshard_all
from lockstep.parallel.fsdp1.tensors import resharded
from lockstep.parallel.fsdp1.unit import clean_name, units_in
from lockstep.parallel.torch_fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictSettings,
    StateDictType,
)

StateDict = dict[str, Any]
OptimInput = Iterable[Any] | None  # what was given to the optimizer: parameters, or groups of them
Params = dict[str, Parameter]  # an optimizer's, by name, in its order, which numbers them

_FROM_ALL = settings_of()
_FROM_ONE = settings_of(optim_config=FullOptimStateDictConfig(rank0_only=True))


def optim_state_dict(
    model: Module, optim: Optimizer, optim_state_dict: StateDict | None = None, group: Any = None
) -> StateDict:
    """The optimizer's state under the parameters' names, as `set_state_dict_type(model, ...)` says.

    optim_state_dict: what to take instead of `optim.state_dict()`. group: not needed, the wrappers know theirs.
    Collective: every rank. Memory: what it returns, and one state tensor.
    """
    return _save(model, _params(model, optim), optim_state_dict or optim.state_dict(), get_state_dict_type(model))


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
    found = _load(model, _params(model, optim), optim_state_dict, get_state_dict_type(model), is_named_optimizer)
    if load_directly:
        optim.load_state_dict(found)
    return found


# ------------------------------------------------------------------ the older names


def full_optim_state_dict(
    model: Module, optim: Optimizer, optim_input: OptimInput = None, rank0_only: bool = True, group: Any = None
) -> StateDict:
    """`optim_state_dict` with whole tensors on the CPU, on rank 0 unless rank0_only=False. Collective: every rank."""
    settings = _FROM_ONE if rank0_only else _FROM_ALL
    return _save(model, _params(model, optim, optim_input), optim.state_dict(), settings)


def sharded_optim_state_dict(model: Module, optim: Optimizer, group: Any = None) -> StateDict:
    """`optim_state_dict` with DTensors. Collective: every rank."""
    settings = settings_of(StateDictType.SHARDED_STATE_DICT, None, ShardedOptimStateDictConfig(False))
    return _save(model, _params(model, optim), optim.state_dict(), settings)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict, model: Module, optim_input: OptimInput = None, optim: Optimizer | None = None
) -> StateDict:
    """What `optim.load_state_dict` takes, from whole tensors that every rank has."""
    return _load(model, _params(model, optim, optim_input), full_optim_state_dict, _FROM_ALL)


def flatten_sharded_optim_state_dict(sharded_optim_state_dict: StateDict, model: Module, optim: Optimizer) -> StateDict:
    """What `optim.load_state_dict` takes, from DTensors. Collective: every rank."""
    return _load(model, _params(model, optim), sharded_optim_state_dict, _FROM_ALL)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, from whole tensors that rank 0 has. Collective: every rank."""
    return _load(model, _params(model, optim, optim_input), full_optim_state_dict or {}, _FROM_ONE)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: Any,
    model: Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """The same state with parameters called by name or by number, for one process and a model that is not wrapped."""
    wanted = checked(OptimStateKeyType, optim_state_key_type, "optim_state_key_type")
    state, found = optim_state_dict["state"], {type(key) for key in optim_state_dict["state"]}
    if len(found) > 1:
        raise ValueError(f"Invalid parameter keys: {state.keys()}")
    if found <= {str if wanted is OptimStateKeyType.PARAM_NAME else int}:
        return optim_state_dict
    new: dict[Any, Any] = dict(enumerate(_params(model, optim, optim_input)))
    if wanted is OptimStateKeyType.PARAM_ID:
        new = {name: number for number, name in new.items()}
    groups = _renamed(optim_state_dict["param_groups"], new)
    return {"state": {new[key]: entry for key, entry in state.items()}, "param_groups": groups}


# ------------------------------------------------------------------ names and numbers


def _params(model: Module, optim: Optimizer | None, optim_input: OptimInput = None) -> Params:
    """The parameters of `optim`; without one those it was given, or those of the model."""
    reshard_all(model)
    given = (model.parameters() if optim_input is None else optim_input) if optim is None else optim.param_groups
    params = [param for each in given for param in (each["params"] if isinstance(each, dict) else [each])]
    return named(params, {clean_name(name): param for name, param in model.named_parameters()})


def named(params: Sequence[Tensor], of_model: Mapping[str, Tensor]) -> dict[str, Any]:
    """An optimizer's `params` by their names in the model. Raises: ConfigError for one that is not there."""
    names = {id(param): name for name, param in of_model.items()}
    unknown = [tuple(param.shape) for param in params if id(param) not in names]
    if unknown:
        raise ConfigError(
            f"the optimizer has {len(unknown)} parameter(s) that are not in the model, of shapes {unknown[:3]}: make "
            "it from the parameters of the model that parallelize, fully_shard, ... returned, outside of "
            "summon_full_params"
        )
    return {names[id(param)]: param for param in params}


def _renamed(groups: list[StateDict], new: Mapping[Any, Any]) -> list[StateDict]:
    return [{**each, "params": [new[key] for key in each["params"]]} for each in copy.deepcopy(groups)]


def _ranks_of(model: Module) -> Communicator:
    get_state_dict_type(model)  # raises where nothing is wrapped
    return units_in(model)[0].mesh.whole


# ------------------------------------------------------------------ out


def _save(model: Module, params: Params, raw: StateDict, settings: StateDictSettings) -> StateDict:
    comm = _ranks_of(model)
    names = {key: name for number, name in enumerate(params) for key in (number, name)}
    state: dict[Any, Any] = {}
    for key, entry in raw["state"].items():
        if key in names:
            param = params[names[key]]
            state[names[key]] = {name: _saved(value, param, settings) for name, value in entry.items()}
        else:
            state[key] = entry  # the user's own
    if for_rank0_only(settings.optim_state_dict_config) and comm.rank != 0:
        return {}
    return {"state": state, "param_groups": _renamed(raw["param_groups"], names)}


def _saved(value: Any, param: Parameter, settings: StateDictSettings) -> Any:
    if not isinstance(value, Tensor):
        return value
    kind, found = settings.state_dict_type, cast("Tensor | None", value.detach())
    like = param if isinstance(value, DTensor) else local_tensor(param)
    if isinstance(param, DTensor) and value.shape == like.shape:
        found = presented(value, param, kind, for_rank0_only(settings.optim_state_dict_config))
    elif kind is StateDictType.FULL_STATE_DICT:  # of another shape than the parameter, as factored states are
        found = value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
    return found.cpu() if settings.optim_state_dict_config.offload_to_cpu and found is not None else found


# ------------------------------------------------------------------ in


def _load(
    model: Module, params: Params, saved: Mapping[str, Any], settings: StateDictSettings, by_name: bool = False
) -> StateDict:
    comm = _ranks_of(model)
    if for_rank0_only(settings.optim_state_dict_config):
        entries, groups = _of_rank0(comm, saved)
    else:
        entries, groups = saved["state"].items(), saved.get("param_groups")
    keys: dict[str, Any] = {name: name if by_name else number for number, name in enumerate(params)}
    known = {clean_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    state: dict[Any, Any] = {}
    for name, entry in entries:
        if name in params:
            state[keys[name]] = {key: _loaded(value, params[name], is_local, name) for key, value in entry.items()}
        elif name not in known:
            state[name] = copy.copy(entry)  # the user's own
    if groups is None:
        return {"state": state}
    named = [(each, set(each["params"])) for each in groups]
    lost = sorted(name for _, names in named for name in names - known)
    if lost:
        raise ConfigError(f"the optimizer state has {', '.join(lost[:3])}, which the model has not")
    mine = [{**each, "params": [keys[name] for name in params if name in names]} for each, names in named]
    return {"state": state, "param_groups": mine}


def _loaded(value: Any, param: Parameter, is_local: bool, name: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not isinstance(param, DTensor) or not value.ndim:
        return value.detach().clone()
    return resharded(value, param, name, is_local).clone()  # the optimizer keeps it: a view would keep the whole


def _of_rank0(comm: Communicator, saved: Mapping[str, Any]) -> tuple[Iterator[tuple[str, dict[str, Any]]], Any]:
    """The state and the groups of rank 0's state dict, the state one parameter at a time."""
    mine = list(saved["state"].items()) if comm.rank == 0 else []
    number, groups = comm.broadcast_object([len(mine), saved.get("param_groups")], label="fsdp.optimizer")
    entries: list[tuple[str, dict[str, Any]]] = mine or [("", {})] * number
    return (_entry_of_rank0(comm, *entry) for entry in entries), groups


def _entry_of_rank0(comm: Communicator, name: str, entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    name, keys, *values = broadcast_values(comm, [name, list(entry), *entry.values()], 0, "fsdp.optimizer")
    single = (value.cpu() if isinstance(value, Tensor) and not value.ndim else value for value in values)
    return name, dict(zip(keys, single, strict=True))
