"""The tree of a reduction taken apart: whoever has a whole subtree may reduce it alone, and no bit changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.comm.op import REDUCTIONS, Reduction
from lockstep.comm.reduction import Subtree, join_subtrees, owned_subtrees, tree_reduce


@st.composite
def placements(draw: st.DrawFn) -> list[int]:
    """The host of each rank: of 1 to 17 ranks, on 1 to 5 hosts, in blocks or in any order."""
    hosts = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, hosts - 1), min_size=1, max_size=17))
    return sorted(owners) if draw(st.booleans()) else owners


def values(count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of very different sizes, so that another order of summation would show."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, 33, generator=generator) * 10.0 ** torch.randint(-4, 5, (count, 33), generator=generator)
    return list(drawn.to(dtype))


def nodes(world_size: int) -> Iterator[tuple[int, int]]:
    """Every node of the tree, by its definition in `tree_reduce`: level by level, the odd one carried up."""
    level = [(rank, rank + 1) for rank in range(world_size)]
    yield from level
    while len(level) > 1:
        pairs = [(left[0], right[1]) for left, right in zip(level[::2], level[1::2], strict=False)]
        yield from pairs
        level = pairs + level[2 * len(pairs) :]


def from_parts(owners: list[int], leaves: list[Tensor], reduce: Reduction, out: Tensor) -> Tensor:
    subtrees = owned_subtrees(owners)
    alone: Reduction = "sum" if reduce == "mean" else reduce
    join_subtrees(subtrees, [tree_reduce(leaves[part.start : part.stop], alone) for part in subtrees], reduce, out)
    return out


@given(placements(), st.sampled_from(REDUCTIONS), st.integers(0, 2**16))
def test_joined_subtrees_are_the_tree_bit_for_bit(owners: list[int], reduce: Reduction, seed: int) -> None:
    leaves = values(len(owners), seed)
    result = from_parts(owners, leaves, reduce, torch.full((33,), float("nan")))
    assert torch.equal(result.view(torch.int32), tree_reduce(leaves, reduce).view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64])
@given(owners=placements())
def test_every_dtype(dtype: torch.dtype, owners: list[int]) -> None:
    leaves = values(len(owners), 3, dtype)
    result = from_parts(owners, leaves, "sum", torch.empty(33, dtype=dtype))
    assert torch.equal(result, tree_reduce(leaves, "sum"))


@given(placements(), st.integers(0, 16))
def test_the_result_may_replace_a_sum(owners: list[int], index: int) -> None:
    leaves = values(len(owners), 5)
    subtrees = owned_subtrees(owners)
    sums = [tree_reduce(leaves[part.start : part.stop], "sum").clone() for part in subtrees]
    out = sums[index % len(sums)]
    join_subtrees(subtrees, sums, "mean", out)
    assert torch.equal(out, tree_reduce(leaves, "mean"))


@given(placements())
def test_subtrees_are_the_largest_nodes_with_one_owner(owners: list[int]) -> None:
    subtrees = owned_subtrees(owners)
    pure = [(start, stop) for start, stop in nodes(len(owners)) if len(set(owners[start:stop])) == 1]
    largest = [
        (start, stop)
        for start, stop in pure
        if not any(a <= start and stop <= b and (a, b) != (start, stop) for a, b in pure)
    ]
    assert [(part.start, part.stop) for part in subtrees] == sorted(largest)
    assert [part.start for part in subtrees] == [0, *(part.stop for part in subtrees[:-1])]
    assert all(set(owners[part.start : part.stop]) == {part.owner} for part in subtrees)


def test_usual_placements() -> None:
    assert owned_subtrees([0, 0, 1, 1]) == (Subtree(0, 2, 0), Subtree(2, 4, 1))  # one sum for each host
    assert owned_subtrees([0, 1, 0, 1]) == tuple(Subtree(rank, rank + 1, rank % 2) for rank in range(4))  # none
    assert owned_subtrees([0, 0, 0, 1, 1, 1]) == (
        Subtree(0, 2, 0),
        Subtree(2, 3, 0),
        Subtree(3, 4, 1),
        Subtree(4, 6, 1),
    )
    assert owned_subtrees([0, 0, 0, 0, 1]) == (Subtree(0, 4, 0), Subtree(4, 5, 1))  # the odd one is carried up
    assert owned_subtrees([7]) == (Subtree(0, 1, 7),)


def test_another_order_would_show() -> None:
    """The values of these tests do tell orders of summation apart."""
    leaves = values(6, 0)
    from_left = leaves[0]
    for leaf in leaves[1:]:
        from_left = from_left + leaf
    assert not torch.equal(from_left, tree_reduce(leaves, "sum"))
