"""Reductions in one fixed order, so that every rounding is the same wherever they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.op import Reduction

_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def tree_reduce(parts: Sequence[Tensor], reduce: Reduction) -> Tensor:
    """The reduction of `parts` in a balanced binary tree: neighbours first, then neighbouring pairs, ...

    ((0 + 1) + (2 + 3)) + 4 for five parts. A mean is the sum divided once, at the end. The sum of booleans is their or,
    the product their and.
    Memory: up to half as many new tensors as there are parts; `parts` are only read.
    """
    combine = _COMBINE[reduce]
    level = list(parts)
    while len(level) > 1:
        pairs = [combine(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0] / len(parts) if reduce == "mean" else level[0]
