"""Optimizer state of whole parameters from the ranks' pieces, and back: torch's state_dict at any world size."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import all_gather_rows
from lockstep.comm.tensor_parts import TensorPieces
from lockstep.errors import CheckpointError, ConfigError
from lockstep.parallel.zero.chunk import Chunk, ReplicatedChunk, in_shape
from lockstep.parallel.zero.probe import IMPLEMENTATION

Group = dict[str, Any]  # one of param_groups
StateDict = dict[str, Any]
States = dict[int, dict[str, Any]]  # parameter of a chunk -> what the optimizer keeps for it, under its own keys
_LABEL = "optimizer.state"
_KEEPS_DTYPE = ("torch.optim.", "lockstep.")


def gather_states(chunk: ReplicatedChunk, mine: States, to: int | None = None) -> States:
    """The state of the chunk's whole parameters, in their shapes; `mine` is what `state_of` gave for each here.

    Collective: every rank. Rank `to` alone gets it, on the CPU; None: every rank, where the parameters are.
    Memory: one key of one chunk at a time, beyond the result.
    """
    comm = chunk.comm
    [described] = _described(comm, [mine])
    states: States = {param: {} for param in sorted(described)}
    entries = [entry for state in described.values() for entry in state.items()]
    for key, dtype in dict.fromkeys((key, value[1]) for key, value in entries if value[0] == "each"):
        whole = _gather_key(chunk, mine, key, dtype, to)
        for param, state in states.items():
            if whole is not None and described[param].get(key) == ["each", dtype]:
                start = chunk.layout.starts[param]
                flat = whole[start : start + chunk.layout.numels[param]].clone()
                state[key] = in_shape(flat, chunk.params[param])
    if to is not None and to != comm.rank:
        return {}
    for param, state in states.items():
        for key, (kind, *value) in described[param].items():
            if kind == "one":
                state[key] = _undescribe(value, torch.device("cpu") if to is not None else chunk.flat.device)
    return {param: {key: states[param][key] for key in described[param]} for param in states}  # in the class's order


def states_in_pieces(comm: Communicator, chunks: Sequence[ReplicatedChunk], mines: Sequence[States]) -> list[States]:
    """The state of whole parameters, chunk by chunk, as TensorPieces of this rank's elements, and single values.

    Collective: every rank; only what there is is told, no state is sent. Memory: no copy.
    """
    found: list[States] = []
    for chunk, mine, described in zip(chunks, mines, _described(comm, mines), strict=True):
        states: States = {}
        for param in sorted(described):
            own = mine.get(param, {})
            states[param] = {key: _in_pieces(chunk, param, own.get(key), *is_) for key, is_ in described[param].items()}
        found.append(states)
    return found


def _in_pieces(chunk: ReplicatedChunk, param: int, own: Any, kind: str, *value: Any) -> Any:
    """What this rank has of one thing that is kept for a parameter."""
    if kind == "one":
        return _undescribe(list(value), chunk.flat.device) if own is None else own
    flat = torch.empty(0, dtype=getattr(torch, value[0]), device=chunk.flat.device) if own is None else own
    return chunk.in_pieces(param, flat)


def _described(comm: Communicator, mines: Sequence[States]) -> list[dict[int, dict[str, Any]]]:
    """For each chunk, parameter -> what its optimizers on all ranks keep for it. Collective: every rank.

    Raises: ConfigError on every rank for what cannot be described.
    """
    found: list[dict[int, dict[str, Any]]] = [{} for _ in mines]
    rows = comm.all_gather_object([_describe_all(mine) for mine in mines], label=_LABEL)
    for row in rows:
        for described, mine in zip(found, row, strict=True):
            if mine["problem"] is not None:
                raise ConfigError(mine["problem"])
            for param, which in mine["params"]:
                described.setdefault(param, mine["states"][which])  # equal on all ranks that have some of the parameter
    return found


def _gather_key(chunk: ReplicatedChunk, mine: States, key: str, dtype: str, to: int | None) -> Tensor | None:
    """[chunk.layout.numel]: one kind of state of all parameters, laid out as they are."""
    comm = chunk.comm
    part = torch.zeros(chunk.layout.part, dtype=getattr(torch, dtype), device=chunk.flat.device)
    at: dict[int, int] = {}
    for span, tensor in chunk.pieces:
        value = mine.get(span.param, {}).get(key)
        if isinstance(value, Tensor) and value.dim() and str(value.dtype) == f"torch.{dtype}":
            begin = at.setdefault(span.param, span.start)
            part[chunk.in_part(span)] = value[span.start - begin : span.start - begin + tensor.numel()]
    if to is None:
        return all_gather_rows(comm, part, _LABEL).view(-1)
    parts = [torch.empty_like(part) for _ in range(comm.world_size)] if comm.rank == to else None
    comm.gather(part, parts, to, label=_LABEL)
    return None if parts is None else torch.cat([part.cpu() for part in parts])


def _describe_all(mine: States) -> dict[str, Any]:
    """What is kept for the parameters of this rank, without the values per element; equal descriptions once.

    What cannot be described travels as a problem, so that all ranks raise and none waits.
    """
    distinct: list[dict[str, Any]] = []
    rows: list[list[int]] = []
    for param, state in mine.items():
        described = {key: _describe(value) for key, value in state.items()}
        unknown = [key for key, value in described.items() if value is None]
        if unknown:
            problem = (
                f"the optimizer keeps {unknown[0]!r} as a {type(state[unknown[0]]).__name__}, which state_dict() "
                "cannot carry between ranks: keep tensors of the parameter's shape or of one element, and numbers"
            )
            return {"problem": problem, "states": [], "params": []}
        if described and described not in distinct:
            distinct.append(described)
        if described:
            rows.append([param, distinct.index(described)])
    return {"problem": None, "states": distinct, "params": rows}


def _describe(value: Any) -> list[Any] | None:
    if isinstance(value, Tensor) and value.dim():
        return ["each", str(value.dtype).removeprefix("torch.")]
    if isinstance(value, Tensor):
        return ["one", value.item(), str(value.dtype).removeprefix("torch."), value.is_cpu]
    if value is None or isinstance(value, bool | int | float | str):
        return ["one", value]
    return None


def _undescribe(value: list[Any], device: torch.device) -> Any:
    if len(value) == 1:
        return value[0]
    number, dtype, on_cpu = value
    return torch.tensor(number, dtype=getattr(torch, dtype), device="cpu" if on_cpu else device)


# ---------------------------------------------------------------------- from whole parameters to pieces


def flat_states(state_dict: StateDict, places: Sequence[tuple[Chunk, int]]) -> dict[Chunk, States]:
    """The states of a state_dict, whole or TensorPieces, as flat state of this rank's elements.

    places: the chunk of each parameter and its index there, in the order of `param_groups`.
    Raises: CheckpointError for what does not fit.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    place = dict(zip(numbers, places, strict=True))
    unknown = set(state_dict["state"]) - set(place)
    if unknown:
        raise CheckpointError(f"the state_dict has state of parameter {min(unknown)}, which none of its groups has")
    shapes = {number: chunk.params[index].shape for number, (chunk, index) in place.items()}
    known = keys_in_shape(state_dict["state"], shapes)
    found: dict[Chunk, States] = {chunk: {} for chunk, _ in places}
    for number, state in state_dict["state"].items():
        chunk, index = place[number]
        found[chunk][index] = _flat_state(chunk, index, state, known)
    return found


def _flat_state(chunk: Chunk, param: int, state: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    shape = chunk.params[param].shape
    found: dict[str, Any] = {}
    for key, value in state.items():
        is_tensor = isinstance(value, Tensor | TensorPieces)
        if not is_tensor or (len(value.shape) == 0 and (len(shape) > 0 or key not in known)):
            found[key] = value
        elif tuple(value.shape) != tuple(shape):
            raise CheckpointError(
                f"optimizer state {key!r} has shape {list(value.shape)}, {chunk.names[param]} has {list(shape)}: it is "
                "of another model, or the parameters are in another order"
            )
        else:
            found[key] = chunk.flatten(param, value)
    return found


def keys_in_shape(states: Mapping[Any, Mapping[str, Any]], shapes: Mapping[Any, torch.Size]) -> frozenset[str]:
    """Keys that some parameter of one dimension or more has in its own shape: those of a scalar parameter are, too."""
    return frozenset(
        key
        for param, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor | TensorPieces) and len(value.shape) and tuple(value.shape) == tuple(shapes[param])
    )


def load_exactly(optimizer: Optimizer, state_dict: StateDict, **how: Any) -> None:
    """`optimizer.load_state_dict(state_dict, **how)` with every tensor in the dtype that it has there.

    torch's classes keep state in the parameter's dtype, and Optimizer.load_state_dict converts to it. That of another
    class may be in a wider one, and would lose bits.
    """
    optimizer.load_state_dict(state_dict, **how)
    if type(optimizer).__module__.startswith(_KEEPS_DTYPE):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entry in state_dict["state"].items():
        for key, value in entry.items():
            loaded = optimizer.state[params[number]].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[params[number]][key] = value.to(loaded.device)


def new_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Group]) -> list[Group]:
    """The options of loaded groups with the parameters of ours. An implementation chosen here stays where none was.

    Raises: CheckpointError where the groups are of other sizes.
    """
    sizes, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != ours:
        raise CheckpointError(f"the state_dict has parameter groups of {sizes} parameters, this optimizer of {ours}")
    found = []
    for new, own in zip(saved, groups, strict=True):
        chosen = {key: own[key] for key in IMPLEMENTATION if key in own and new.get(key) is None}
        names = {key: own[key] for key in ("param_names",) if key in own and key not in new}
        found.append({**copy.deepcopy(dict(new)), **chosen, **names, "params": own["params"]})
    return found
