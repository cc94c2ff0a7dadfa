"""The tensors inside whatever a module returns, and what autograd does with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

_MAX_DEPTH = 32  # an output that contains itself ends here


def output_tensors(output: Any) -> list[Tensor]:
    """The tensors that a backward pass can begin in: those that require a gradient.

    Looked for in nested tuples, lists, sets, mappings (Hugging Face's ModelOutput is one) and dataclasses; only where
    that finds none, also in the attributes of other objects.
    """
    found = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
    return found or [tensor for tensor in find_tensors(output, into_objects=True) if tensor.requires_grad]


def find_tensors(value: Any, into_objects: bool = False, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in `value`, in order; one that stands in several places comes several times."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif into_objects and hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        parts = vars(value).values()
    if depth < _MAX_DEPTH:
        for part in parts:
            yield from find_tensors(part, into_objects, depth + 1)


def move_tensors(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`; what is there already is not copied."""
    return _pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with every floating-point tensor in it as `dtype`; None leaves it alone."""
    if dtype is None:
        return value
    return _pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)


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
