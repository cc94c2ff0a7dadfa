"""What a model and its optimizer hold, by the names that parameters have in the model, however they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lockstep.errors import CheckpointError
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.dtensors import DTensor, local_tensor
from lockstep.parallel.fsdp1.tensors import full_tensor, gathered, sharded_like
from lockstep.parallel.shard_context import unit_of
from lockstep.parallel.sharded_optimizer import ShardedOptimizer

NamedState = dict[str, dict[str, Any]]  # parameter name -> what an optimizer keeps for it


def unwrapped(model: Module) -> Module:
    """The module that the user made, under whose names everything is known."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_cut(model: Module) -> bool:
    """Whether this rank has pieces of parameters, and not whole ones."""
    return any(isinstance(param, DTensor) for param in unwrapped(model).parameters())


def rank_of(model: Module) -> int:
    """This rank among those that train `model`; 0 for a module that `parallelize` did not make."""
    if isinstance(model, DistributedDataParallel):
        return model.reducer.comm.rank
    unit = unit_of(model)
    return 0 if unit is None else unit.mesh.whole.rank


# ------------------------------------------------------------------ parameters and buffers


def whole_tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter and buffer, in the order of names; tied ones once.

    Collective: every rank, to the end. Memory: one tensor, if the caller keeps none.
    """
    module = unwrapped(model)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for fqn in sorted(named):
        yield fqn, full_tensor(named[fqn])


def whole_state_dict(model: Module) -> dict[str, Tensor]:
    """What the `state_dict` of the module would be if it were whole: on the CPU of rank 0, {} on other ranks.

    Collective: every rank. Memory: the whole model on rank 0; elsewhere nothing.
    """
    made: dict[Tensor, Tensor | None] = {}
    named: dict[str, Tensor] = unwrapped(model).state_dict(keep_vars=True)
    for tensor in dict.fromkeys(named.values()):  # tied ones once
        whole = gathered(tensor, tensor, rank0_only=True)
        made[tensor] = None if whole is None or rank_of(model) != 0 else whole.cpu()
    return {fqn: whole for fqn, tensor in named.items() if (whole := made[tensor]) is not None}


# ------------------------------------------------------------------ the optimizer


def optimizer_state(model: Module, optimizer: Optimizer) -> NamedState:
    """Parameter name -> what the optimizer keeps for it: DTensors where parameters are.

    Where only the optimizer is cut, whole tensors on the CPU of rank 0, and {} on other ranks.
    Collective: every rank. Memory: the whole state on rank 0 where only the optimizer is cut, else no copy.
    """
    if isinstance(optimizer, ShardedOptimizer) and not is_cut(model):
        optimizer.consolidate_state_dict(to=0)
        if optimizer.comm.rank != 0:
            return {}
    names = {id(param): fqn for fqn, param in unwrapped(model).named_parameters()}
    in_order = _in_order(optimizer)
    return {names[id(in_order[number])]: dict(entry) for number, entry in optimizer.state_dict()["state"].items()}


def load_optimizer_state(model: Module, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Put back what `optimizer_state` returned, here or where it was cut otherwise; tensors may be whole.

    Not collective. Raises: CheckpointError for a name this model does not have.
    """
    by_name = dict(unwrapped(model).named_parameters())
    check_names(by_name, state)
    numbers = {id(param): number for number, param in enumerate(_in_order(optimizer))}
    groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    numbered = {numbers[id(by_name[fqn])]: dict(entry) for fqn, entry in state.items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def room_for_state(model: Module, described: Mapping[str, Mapping[str, Tensor]]) -> NamedState:
    """Tensors for a checkpoint's optimizer state to be read into: of a parameter's shape cut as the parameter is.

    described: parameter name -> tensors on the meta device, of the whole shape and dtype.
    Raises: CheckpointError for a name this model does not have.
    """
    by_name = dict(unwrapped(model).named_parameters())
    check_names(by_name, described)
    return {fqn: {key: _room(by_name[fqn], like) for key, like in entry.items()} for fqn, entry in described.items()}


def _room(param: Tensor, like: Tensor) -> Tensor:
    if isinstance(param, DTensor) and like.shape == param.shape:
        return sharded_like(torch.empty_like(local_tensor(param), dtype=like.dtype), param)
    return torch.empty_like(like, device="cpu")


def check_names(by_name: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises: CheckpointError for a name in `state` that is none of the model's."""
    unknown = sorted(set(state) - set(by_name))
    if unknown:
        raise CheckpointError(f"the checkpoint has optimizer state for {unknown[0]!r}, which this model does not have")


def _in_order(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
