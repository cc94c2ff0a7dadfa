"""What a checkpoint keeps of a model and its optimizer: by the names that parameters have, however they are cut.

    state = {"train": TrainState(model, optimizer), "scheduler": scheduler, "epoch": epoch}
    checkpointer.save(step, state)
    checkpointer.load(state)

Each rank gives what it has, as it is: whole tensors, DTensors, pieces. Nothing is gathered and nothing is copied. What
was saved under one strategy, on any number of ranks, is loaded under any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils import _pytree

from lockstep.comm.tensor_parts import AnyTensor, is_dtensor, local_of
from lockstep.errors import CheckpointMismatch
from lockstep.observe.replica import plain_name
from lockstep.parallel.dtensors import DTensor, Replicate, as_dtensor
from lockstep.parallel.fsdp1.optim_state import named
from lockstep.parallel.fsdp1.state import reshard_all, state_dict_type
from lockstep.parallel.fsdp1.tensors import piece_of, sharded_like
from lockstep.parallel.fsdp1.unit import units_in
from lockstep.parallel.named_state import unwrapped
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.torch_fsdp import StateDictType
from lockstep.parallel.zero.probe import IMPLEMENTATION
from lockstep.parallel.zero.state import keys_in_shape, load_exactly

State = dict[str, Any]
_NOT_KEPT = ("params", "param_names", *IMPLEMENTATION)  # of a group's options: what says how, and not what


@final
class TrainState:
    """A model and its optimizer, for a Checkpointer: {"model": {name: tensor}, "optimizer": {"state", "param_groups"}}.

    model: what `parallelize`, fully_shard, FullyShardedDataParallel or DistributedDataParallel (also torch's) made, or
        a module as it is.
    optimizer: of any class, over parameters of the model; also a ShardedOptimizer.
    """

    def __init__(self, model: Module, optimizer: Optimizer) -> None:
        self._parts = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}

    def state_dict(self) -> State:
        """Everything, as it is here. Collective where only the optimizer is cut: a few bytes travel."""
        return {key: part.state_dict() for key, part in self._parts.items()}

    def room_for(self, described: Mapping[str, Any]) -> State:
        """Tensors, cut as they are cut here, for what a checkpoint has to be read into.

        described: the checkpoint's `state_dict()` with whole tensors on the meta device.
        Raises: CheckpointMismatch for state of parameters that are not here.
        """
        return {key: part.room_for(described.get(key, {})) for key, part in self._parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`: `room_for` filled, or with whole tensors.

        Raises: CheckpointMismatch, before anything is changed, where it is of another model or other groups.
        """
        lacking = [key for key in self._parts if key not in state_dict]
        if lacking:
            raise CheckpointMismatch(f"the state has no {' and no '.join(lacking)}: it has {', '.join(state_dict)}")
        checks = [part.checked(state_dict[key]) for key, part in self._parts.items()]
        for load in checks:
            load()


# ------------------------------------------------------------------ the model


@final
class ModelState:
    """The parameters and persistent buffers of a model, for a Checkpointer; see TrainState."""

    def __init__(self, model: Module) -> None:
        self._model = model

    @contextlib.contextmanager
    def _in_pieces(self) -> Iterator[Module]:
        """The user's module, with state dicts of DTensors where it is cut."""
        module = unwrapped(self._model)
        is_wrapped = bool(units_in(module))
        with state_dict_type(module, StateDictType.SHARDED_STATE_DICT) if is_wrapped else contextlib.nullcontext():
            yield module

    def state_dict(self) -> State:
        """name -> tensor."""
        with self._in_pieces() as module:
            return {plain_name(name): value for name, value in module.state_dict().items()}

    def room_for(self, described: Mapping[str, Any]) -> State:
        """The model's own tensors."""
        return {name: value for name, value in self.state_dict().items() if isinstance(value, Tensor)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See TrainState."""
        self.checked(state_dict)()

    def checked(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """What loads `state_dict`. Raises: CheckpointMismatch, naming all that does not fit."""
        own = self.state_dict()
        problems = [f"it lacks {name!r}" for name in own if name not in state_dict]
        problems += [f"it has {name!r}" for name in state_dict if name not in own]
        for name, value in own.items():
            saved = state_dict.get(name)
            if isinstance(value, Tensor) and isinstance(saved, Tensor) and saved.shape != value.shape:
                problems.append(f"{name!r} is {list(saved.shape)}, not {list(value.shape)}")
        if problems:
            raise CheckpointMismatch(f"the checkpoint's weights do not fit this model: {'; '.join(problems)}")

        def load() -> None:
            with self._in_pieces() as module:
                named = {name: state_dict[plain_name(name)] for name in module.state_dict(keep_vars=True)}
                module.load_state_dict({name: _cut_like(own[plain_name(name)], v) for name, v in named.items()})

        return load


# ------------------------------------------------------------------ the optimizer


@final
class OptimizerState:
    """The state and options of an optimizer by the names that `model` has for its parameters; see TrainState.

    {"state": {name: {"exp_avg": tensor, ...}}, "param_groups": [{"params": [name, ...], "lr": ..., ...}]}
    """

    def __init__(self, model: Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._rooms: list[Any] = []  # tensors made here, until they are loaded

    def _params(self) -> dict[str, Tensor]:
        """The optimizer's parameters by name, in its order."""
        module = unwrapped(self._model)
        reshard_all(module)
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        return named(params, {plain_name(name): param for name, param in module.named_parameters()})

    def _entries(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], Mapping[str, Mapping[str, Any]]]:
        """The optimizer's parameters, and what `state` has for each. Raises: CheckpointMismatch for any other's."""
        params, entries = self._params(), state.get("state", {})
        unknown = sorted(set(entries) - set(params))
        if unknown:
            raise CheckpointMismatch(
                f"the checkpoint has optimizer state for {unknown[0]!r}, which this optimizer does not have"
                + (f" ({len(unknown)} such parameters)" if len(unknown) > 1 else "")
            )
        return params, entries

    def state_dict(self) -> State:
        """Everything by name. Collective where only the optimizer is cut: a few bytes travel. Memory: no copy."""
        optimizer = self._optimizer
        names = list(self._params())
        is_sharded = isinstance(optimizer, ShardedOptimizer)
        saved = optimizer.state_dict_in_pieces() if is_sharded else optimizer.state_dict()
        groups = [
            {"params": [names[number] for number in group["params"]], **_options(group)}
            for group in saved["param_groups"]
        ]
        return {
            "state": {names[number]: dict(entry) for number, entry in saved["state"].items()},
            "param_groups": groups,
        }

    def room_for(self, described: Mapping[str, Any]) -> State:
        """Tensors of a parameter's shape are cut as the parameter is, others are whole and on the CPU."""
        params, entries = self._entries(described)
        in_shape = keys_in_shape(entries, {name: param.shape for name, param in params.items()})

        def room(name: str, key: str, like: Any) -> Any:
            param = params[name]
            is_whole = not isinstance(like, Tensor) or like.shape != param.shape
            if is_whole or (like.ndim == 0 and key not in in_shape):
                return _room_for(like)
            if isinstance(param, DTensor):
                return sharded_like(torch.empty_like(local_of(param), dtype=like.dtype), param)
            if isinstance(self._optimizer, ShardedOptimizer):
                return self._optimizer.room_of(param, like.dtype)
            return torch.empty_like(like, device=param.device)

        state = {name: {key: room(name, key, like) for key, like in entry.items()} for name, entry in entries.items()}
        self._rooms = [value for entry in state.values() for value in entry.values()]
        return {"state": state, "param_groups": _room_for(described.get("param_groups", []))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See TrainState."""
        self.checked(state_dict)()

    def checked(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """What loads `state_dict`. Raises: CheckpointMismatch for other parameters, or other groups of them."""
        params, entries = self._entries(state_dict)
        numbers = {name: number for number, name in enumerate(params)}
        state = {}
        for name, entry in entries.items():
            state[numbers[name]] = {key: _state_like(params[name], value) for key, value in entry.items()}
        groups = self._groups(numbers, state_dict.get("param_groups"))
        rooms, self._rooms = {id(value) for value in self._rooms}, []
        leaves = [value for entry in state.values() for value in entry.values() if isinstance(value, AnyTensor)]
        is_ours = all(id(value) in rooms for value in leaves)
        how = {"copy": not is_ours} if isinstance(self._optimizer, ShardedOptimizer) else {}
        return lambda: load_exactly(self._optimizer, {"state": state, "param_groups": groups}, **how)

    def _groups(self, numbers: Mapping[str, int], saved: Any) -> list[State]:
        """The optimizer's groups with the options of the saved ones that have their parameters."""
        names = list(numbers)
        home = {name: group for group in saved or [] for name in group["params"]}
        found, first = [], 0
        for group in self._optimizer.param_groups:
            members = list(range(first, first + len(group["params"])))
            first += len(members)
            own = {key: value for key, value in group.items() if key != "params"}
            options = _options(_common_group([names[number] for number in members], home)) if saved else {}
            found.append({**own, **options, "params": members})
        return found


def _common_group(names: list[str], home: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """A saved group with the options of all parameters `names`. Raises: CheckpointMismatch where there is none."""
    lost = [name for name in names if name not in home]
    groups = {id(home[name]): home[name] for name in names if name in home}
    options = [_options(group) for group in groups.values()]
    if lost or any(other != options[0] for other in options):
        why = (
            f"{lost[0]!r} is in none" if lost else f"{names[0]!r} and others of one group here have other options there"
        )
        raise CheckpointMismatch(
            f"the checkpoint's optimizer has other groups of parameters: {why}. Make the optimizer with the groups it "
            "was saved with"
        )
    return next(iter(groups.values()), {})


def _options(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key not in _NOT_KEPT}


# ------------------------------------------------------------------ tensors


def _cut_like(own: Any, value: Any) -> Any:
    """`value`, maybe whole, cut as `own` is."""
    if isinstance(own, DTensor) and isinstance(value, Tensor) and not is_dtensor(value):
        return sharded_like(piece_of(value, own), own)
    return value


def _state_like(param: Tensor, value: Any) -> Any:
    """A parameter's state, maybe whole, cut as the parameter is; of another shape, it is whole on every rank."""
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    if value.shape == param.shape:
        return sharded_like(piece_of(value, param).clone(), param)
    mesh = param.device_mesh
    return as_dtensor(value.to(local_of(param).device), mesh, [Replicate()] * mesh.ndim, value.shape)


def _room_for(nested: Any) -> Any:
    """`nested` with room on the CPU for every tensor in it."""
    return _pytree.tree_map_only(Tensor, lambda like: torch.empty_like(like, device="cpu"), nested)
