"""Reductions in one fixed order, so that every rounding is the same wherever they are computed.

The order is a binary tree over the ranks. A node over n ranks has on its left the first 2**k of them, 2**k being the
largest power of two below n, and the others on its right:

    7 ranks    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

Every node is itself such a tree over its own ranks. So whoever has all of a node's ranks may reduce them with
`tree_reduce`, and `join_subtrees` makes the rest of the tree over what was found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.op import Reduction

_BLOCK_BYTES = 256 * 1024  # what is written last is still in the cache when it is read

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def combine(left: Tensor, right: Tensor, reduce: Reduction, out: Tensor) -> None:
    """One step of a reduction, into `out`, which may be one of the two; of a mean it is the sum."""
    _COMBINE[reduce](left, right, out=out)


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


def tree_reduce_into(target: Tensor, parts: Sequence[Tensor], reduce: Reduction, scratch: Sequence[Tensor]) -> None:
    """`tree_reduce` of `parts` into `target`, which may be one of them; no new memory.

    A `target` of a wider dtype: every part is widened before anything is added.
    scratch: half as many tensors as parts, each of `target`'s size and dtype; not needed for two parts.
    """
    combine = _COMBINE[reduce]

    def join(left: Tensor, right: Tensor, out: Tensor) -> None:
        if left.dtype != out.dtype:  # the kernel adds in the wider dtype of the two, and both may be narrow
            left = out.copy_(left)
        combine(left, right, out=out)

    level = list(parts)
    while len(level) > 2:
        pairs = len(level) // 2
        for index in range(pairs):  # scratch[i] takes nodes 2i and 2i + 1: never one that is still to be read
            join(level[2 * index], level[2 * index + 1], scratch[index])
        level = [*scratch[:pairs], *level[2 * pairs :]]
    if len(level) == 1:
        target.copy_(level[0])
        return
    join(level[0], level[1], target)
    if reduce == "mean":
        target.div_(len(parts))


def tree_reduce_by_blocks(target: Tensor, parts: Sequence[Tensor], reduce: Reduction) -> None:
    """`tree_reduce_into`, in blocks that stay in the cache; all are flat. Memory: half as many blocks as parts."""
    step = target.numel() if target.is_cuda else min(target.numel(), _BLOCK_BYTES // target.element_size())
    scratch = [target.new_empty(step) for _ in parts[1::2]] if len(parts) > 2 else []
    for start in range(0, target.numel(), step or 1):
        block = target[start : start + step]
        rows = [part[start : start + step] for part in parts]
        tree_reduce_into(block, rows, reduce, [spare[: block.numel()] for spare in scratch])


@functools.cache
def is_reducible(dtype: torch.dtype, reduce: Reduction) -> bool:
    """Whether torch can compute this reduction of this dtype on a CPU."""
    try:
        _COMBINE[reduce](*torch.empty(2, 1, dtype=dtype, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Subtree(NamedTuple):
    """A node of the tree: the ranks from `start` to `stop - 1`, which all have the same owner."""

    start: int
    stop: int
    owner: int


def owned_subtrees(owners: Sequence[int]) -> tuple[Subtree, ...]:
    """The largest subtrees of the tree over all ranks that have one owner each, in rank order.

    `owners[rank]` is who has that rank's part: the number of its host, say.
    """

    def below(start: int, stop: int) -> tuple[Subtree, ...]:
        if len(set(owners[start:stop])) == 1:
            return (Subtree(start, stop, owners[start]),)
        middle = _middle(start, stop)
        return below(start, middle) + below(middle, stop)

    return below(0, len(owners))


def join_subtrees(subtrees: Sequence[Subtree], sums: Sequence[Tensor], reduce: Reduction, out: Tensor) -> None:
    """Write into `out` what `tree_reduce` gives for all ranks, from each subtree's own reduction (a mean's: its sum).

    `subtrees` as `owned_subtrees` returns them, `sums` beside them. `out` may be one of `sums`.
    Memory: one new tensor for each inner node above the subtrees, fewer than there are subtrees.
    """
    combine = _COMBINE[reduce]
    world_size = subtrees[-1].stop
    found = {(subtree.start, subtree.stop): value for subtree, value in zip(subtrees, sums, strict=True)}

    def node(start: int, stop: int) -> Tensor:
        value = found.get((start, stop))
        return combine(*children(start, stop)) if value is None else value

    def children(start: int, stop: int) -> tuple[Tensor, Tensor]:
        middle = _middle(start, stop)
        return node(start, middle), node(middle, stop)

    if len(subtrees) > 1:
        combine(*children(0, world_size), out=out)
    elif out is not sums[0]:
        out.copy_(sums[0])
    if reduce == "mean":
        out.div_(world_size)


def _middle(start: int, stop: int) -> int:
    """Where the node over these ranks, at least two, has its right child."""
    return start + (1 << ((stop - start - 1).bit_length() - 1))
