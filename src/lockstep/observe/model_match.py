"""Did all ranks build the same model? Names, shapes, dtypes and what is trained, in the order of registration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

Description = Sequence[Sequence[Any]]


def describe_model(module: Module, ignore: Iterable[str] = ()) -> list[list[Any]]:
    """One row per parameter and buffer in registration order: kind, name, shape, dtype, requires_grad."""
    skipped = set(ignore)
    rows: list[list[Any]] = []
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if name not in skipped:
                dtype = str(tensor.dtype).removeprefix("torch.")
                rows.append([kind, name, list(tensor.shape), dtype, tensor.requires_grad])
    return rows


def first_difference(mine: Description, theirs: Description, rank: int = 0) -> str | None:
    """What differs first between two descriptions, in words; None where nothing does. `theirs` is that of `rank`."""
    for (kind, name, *facts), (kind0, name0, *facts0) in zip(mine, theirs, strict=False):
        if (kind, name) != (kind0, name0):
            text = f"has {kind} {name!r} where rank {rank} has {kind0} {name0!r}"
            is_other_order = sorted(str(row[:2]) for row in mine) == sorted(str(row[:2]) for row in theirs)
            return text + (", the same ones but registered in another order" if is_other_order else "")
        for label, fact, fact0 in zip(("shape", "dtype", "requires_grad"), facts, facts0, strict=True):
            if fact != fact0:
                return f"has {kind} {name!r} with {label} {fact}, rank {rank} with {label} {fact0}"
    if len(mine) != len(theirs):
        verb, verb0, longer = ("has", "lacks", mine) if len(mine) > len(theirs) else ("lacks", "has", theirs)
        kind, name, *_ = longer[min(len(mine), len(theirs))]
        return f"{verb} {kind} {name!r}, which rank {rank} {verb0}"
    return None
