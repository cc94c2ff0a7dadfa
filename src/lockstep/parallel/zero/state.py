"""Optimizer state of whole parameters from the ranks' pieces, and back: torch's state_dict at any world size."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, ConfigError
from lockstep.parallel.bucket import dense_strides
from lockstep.parallel.zero.chunk import Chunk, ReplicatedChunk, in_shape
from lockstep.parallel.zero.probe import IMPLEMENTATION

Group = dict[str, Any]  # one of param_groups
StateDict = dict[str, Any]
States = dict[int, dict[str, Any]]  # parameter of a chunk -> what the optimizer keeps for it, under its own keys
_LABEL = "optimizer.state"


def gather_states(chunk: ReplicatedChunk, mine: States, to: int | None = None) -> States:
    """The state of the chunk's whole parameters, in their shapes; `mine` is what `state_of` gave for each here.

    Collective: every rank. Rank `to` alone gets it, on the CPU; None: every rank, where the parameters are.
    Memory: one key of one chunk at a time, beyond the result.
    """
    comm = chunk.comm
    described: dict[int, dict[str, Any]] = {}
    for row in comm.all_gather_object(_describe_all(mine), label=_LABEL):
        if row["problem"] is not None:
            raise ConfigError(row["problem"])
        for param, which in row["params"]:
            described.setdefault(param, row["states"][which])  # equal on all ranks that have some of the parameter
    states: States = {param: {} for param in sorted(described)}
    for key, dtype in _keys_per_element(described):
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
    if comm.world_size == 1:
        return part.cpu() if to is not None else part
    if to is None:
        whole = part.new_empty(chunk.layout.numel)
        comm.all_gather_into_tensor(whole, part, label=_LABEL)
        return whole
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


def _keys_per_element(described: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, str]]:
    entries = (entry for state in described.values() for entry in state.items())
    return list(dict.fromkeys((key, value[1]) for key, value in entries if value[0] == "each"))


# ---------------------------------------------------------------------- from whole parameters to pieces


def flat_states(state_dict: StateDict, places: Sequence[tuple[Chunk, int]]) -> dict[Chunk, States]:
    """The states of a state_dict, whole or of one rank's pieces, as flat state of this rank's elements.

    places: the chunk of each parameter and its index there, in the order of `param_groups`.
    Raises: CheckpointError for what does not fit.
    """
    pieces = state_dict.get("pieces")
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    place = dict(zip(numbers, places, strict=True))
    unknown = set(state_dict["state"]) - set(place)
    if unknown:
        raise CheckpointError(f"the state_dict has state of parameter {min(unknown)}, which none of its groups has")
    known = _keys_in_shape(state_dict["state"], place)
    found: dict[Chunk, States] = {chunk: {} for chunk, _ in places}
    for number, state in state_dict["state"].items():
        chunk, index = place[number]
        if pieces is None:
            found[chunk][index] = _flat_state(chunk, index, state, known)
        else:
            _check_same_piece(pieces[number], chunk, index)
            each = ((key, value, isinstance(value, Tensor) and value.dim() > 0) for key, value in state.items())
            found[chunk][index] = {key: chunk.flatten(index, value) if many else value for key, value, many in each}
    return found


def _flat_state(chunk: Chunk, param: int, state: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    shape = chunk.params[param].shape
    found: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or (value.dim() == 0 and (len(shape) > 0 or key not in known)):
            found[key] = value
        elif value.shape != shape:
            raise CheckpointError(
                f"optimizer state {key!r} has shape {list(value.shape)}, {chunk.names[param]} has {list(shape)}: it is "
                "of another model, or the parameters are in another order"
            )
        else:
            found[key] = chunk.flatten(param, value)
    return found


def _keys_in_shape(states: Mapping[int, Any], place: Mapping[int, tuple[Chunk, int]]) -> frozenset[str]:
    """Keys that some parameter of one dimension or more has in its own shape: those of a scalar parameter are, too."""
    return frozenset(
        key
        for number, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() and value.shape == place[number][0].params[place[number][1]].shape
    )


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


# ---------------------------------------------------------------------- each rank's own pieces


def merge_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What every rank's `state_dict(sharded=True)` gave, as the state_dict of whole parameters. Not collective.

    Shapes: `parts` in the order of ranks. Memory: the whole state.
    Raises: CheckpointError where elements are missing.
    """
    whole: States = {}
    covered: dict[int, int] = {}
    for part in parts:
        for param, piece in part["pieces"].items():
            start, stop = piece["range"]
            state = part["state"].get(param)
            if state:
                covered[param] = covered.get(param, 0) + stop - start
                _put(whole.setdefault(param, {}), state, piece)
    for param, count in covered.items():
        numel = parts[0]["pieces"][param]["numel"]
        if count != numel:
            raise CheckpointError(
                f"the state of parameter {param} has {count} of {numel} elements in {len(parts)} parts: pass what "
                "every rank's state_dict(sharded=True) returned, each once"
            )
    return {"state": dict(sorted(whole.items())), "param_groups": parts[0]["param_groups"]}


def describe_piece(chunk: Chunk, param: int) -> dict[str, Any]:
    """Which elements of a parameter have their state on this rank."""
    whole = chunk.params[param]
    return {
        "range": chunk.range_of(param),
        "numel": whole.numel(),
        "shape": tuple(whole.shape),
        "stride": dense_strides(whole),
    }


def _check_same_piece(saved: Mapping[str, Any], chunk: Chunk, param: int) -> None:
    own = describe_piece(chunk, param)
    if (tuple(saved["range"]), tuple(saved["shape"])) != (own["range"], own["shape"]):
        raise CheckpointError(
            f"the state_dict has elements {list(saved['range'])} of {chunk.names[param]} {list(saved['shape'])}, this "
            f"rank steps {list(own['range'])} of {list(own['shape'])}: merge_state_dicts of all ranks' loads anywhere"
        )


def _put(whole: dict[str, Any], state: Mapping[str, Any], piece: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            whole[key] = value
            continue
        if key not in whole:
            whole[key] = torch.empty_strided(piece["shape"], piece["stride"], dtype=value.dtype, device=value.device)
        flat = torch.as_strided(whole[key], (piece["numel"],), (1,))
        flat[slice(*piece["range"])] = value
