"""`tree_reduce` without new memory: the same order, so the same bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.op import Reduction

_COMBINE = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def tree_reduce_into(target: Tensor, parts: Sequence[Tensor], reduce: Reduction, scratch: Sequence[Tensor]) -> None:
    """Write the reduction of two or more `parts` into `target`, which may be one of them.

    `scratch`: half as many tensors as parts, rounded up, of the same size; unused for two parts.
    """
    combine = _COMBINE[reduce]
    level = list(parts)
    while len(level) > 2:
        pairs = len(level) // 2
        for index in range(pairs):  # scratch[i] takes nodes 2i and 2i + 1: never one that is still to be read
            combine(level[2 * index], level[2 * index + 1], out=scratch[index])
        level = [*scratch[:pairs], *level[2 * pairs :]]
    combine(level[0], level[1], out=target)
    if reduce == "mean":
        target.div_(len(parts))


@functools.cache
def is_reducible(dtype: torch.dtype, reduce: Reduction) -> bool:
    """Whether torch has the kernel."""
    try:
        _COMBINE[reduce](torch.empty(1, dtype=dtype), torch.empty(1, dtype=dtype))
    except (RuntimeError, NotImplementedError):
        return False
    return True
