"""A training state as tensors and JSON: nested dicts with string keys on one side, two flat tables on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.errors import CheckpointError

State = dict[str, Any]  # str -> Tensor, JSON value, or State


@dataclass(frozen=True)
class FlatState:
    """The same state with paths (`model/h.0.attn.bias`) in place of nesting."""

    tensors: dict[str, Tensor]  # contiguous, on the CPU, no two share memory
    values: dict[str, Any]  # JSON
    aliases: dict[str, str]  # path of a tensor that is another one, as tied weights are -> path of that one


def flatten_state(state: State) -> FlatState:
    """`state` in flat form. Memory: copies tensors of a GPU, strided ones and parts of a larger storage.

    Raises: CheckpointError for a key that is no path component.
    """
    flat = FlatState({}, {}, {})
    seen: dict[tuple[Any, ...], str] = {}
    for path, leaf in leaves(state):
        if not isinstance(leaf, Tensor):
            flat.values[path] = leaf
            continue
        identity = (leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride())
        if leaf.numel() and identity in seen:
            flat.aliases[path] = seen[identity]
            continue
        seen[identity] = path
        tensor = leaf.detach().cpu().contiguous()
        flat.tensors[path] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    return flat


def unflatten_state(flat: FlatState) -> State:
    """The inverse of `flatten_state`."""
    state: State = {}
    aliased = {path: flat.tensors[target] for path, target in flat.aliases.items()}
    for path, leaf in {**flat.values, **flat.tensors, **aliased}.items():
        *parents, name = path.split("/")
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = leaf
    return state


def leaves(state: State, prefix: str = "") -> list[tuple[str, Any]]:
    """(path, tensor or JSON value) of everything in `state`.

    Raises: CheckpointError for a key that is no path component.
    """
    found: list[tuple[str, Any]] = []
    for key, value in state.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise CheckpointError(
                f"{key!r} under {prefix!r} cannot be a key of a state: use non-empty strings without /"
            )
        if isinstance(value, dict) and value:
            found += leaves(value, f"{prefix}{key}/")
        else:
            found.append((prefix + key, value))
    return found
