"""The tensors inside whatever a module returns, and what autograd does with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

_MAX_DEPTH = 32  # an output that contains itself ends here


def find_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, sets, mappings (Hugging Face's ModelOutput is one) and dataclasses.

    Other objects are not looked into: a backward that begins in one is noticed by its first parameter gradient.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth > _MAX_DEPTH:
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


def move_tensors(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; what is there already is not copied."""
    return _pytree.tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value
    )


def accumulates_gradients(node: torch.autograd.graph.Node) -> bool:
    """Whether the current run of autograd is `backward()`, which fills `.grad` fields, and not `torch.autograd.grad`.

    `node` is a node of this run's graph. One leaf below it answers: `torch.autograd.grad` stops at leaves or before.
    """
    seen: set[torch.autograd.graph.Node] = set()
    todo: list[torch.autograd.graph.Node | None] = [node]
    while todo:
        current = todo.pop()
        if current is None or current in seen:
            continue
        if current.name().endswith("AccumulateGrad"):
            try:
                return torch._C._will_engine_execute_node(current)
            except RuntimeError:  # says that this leaf's gradient is what torch.autograd.grad was asked for
                return False
        seen.add(current)
        todo += [following for following, _ in current.next_functions]
    return False
