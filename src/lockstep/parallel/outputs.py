"""The tensors inside whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

_MAX_DEPTH = 32  # an output that refers to itself ends here


def find_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in tuples, lists, dicts, dataclasses, pytrees (Hugging Face outputs) and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth > _MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item, depth + 1)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from find_tensors(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from find_tensors(getattr(value, field.name, None), depth + 1)
    elif type(value) in _pytree.SUPPORTED_NODES:
        for item in _pytree.tree_leaves(value):
            yield from find_tensors(item, _MAX_DEPTH)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():
            yield from find_tensors(item, depth + 1)


def move_tensors(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; what is there already is not copied."""
    return _pytree.tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value
    )
