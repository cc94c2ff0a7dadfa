"""Which rows are whose: torch.chunk's rule, and places in the flat shard that fit together on all ranks."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.shard_layout import Cut, ShardLayout
from lockstep.parallel.unsharded import pieces_of


@st.composite
def cuts(draw: st.DrawFn) -> list[Cut]:
    shapes = draw(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=4))
    return [Cut(tuple(shape), draw(st.integers(0, len(shape) - 1))) for shape in shapes]


@given(cuts(), st.integers(1, 5))
def test_pieces_are_those_of_torch_chunk_and_no_two_overlap(params: list[Cut], world_size: int) -> None:
    layout = ShardLayout(params, world_size)
    for rank in range(world_size):
        taken = torch.zeros(layout.shard_numel, dtype=torch.int64)
        for index, (shape, dim) in enumerate(params):
            chunks = torch.arange(math.prod(shape)).view(shape).chunk(world_size, dim)
            expected = tuple(chunks[rank].shape) if rank < len(chunks) else (*shape[:dim], 0, *shape[dim + 1 :])
            assert layout.piece_shape(index, rank) == expected
            start, stop = layout.local_span(index, rank)
            assert stop - start == math.prod(expected)
            taken[start:stop] += 1
            taken[slice(*layout.padding(index, rank))] += 1
        assert torch.equal(taken, torch.ones_like(taken)), "every element of the shard is one piece's, or its padding"


@given(cuts(), st.integers(1, 5))
def test_the_ranks_pieces_make_up_the_whole(params: list[Cut], world_size: int) -> None:
    layout = ShardLayout(params, world_size)
    for index, (shape, dim) in enumerate(params):
        whole = torch.arange(math.prod(shape)).view(shape)
        pieces = []
        for rank in range(world_size):
            shard = torch.full((layout.shard_numel,), -1)
            first, rows = layout.rows(index, rank)
            pieces_of(shard, layout, rank)[index].copy_(whole.narrow(dim, first, rows))
            start, stop = layout.local_span(index, rank)
            pieces.append(shard[start:stop].view(layout.piece_shape(index, rank)))
        assert torch.equal(torch.cat(pieces, dim), whole)


def test_the_example_in_the_docstring() -> None:
    layout = ShardLayout([Cut((5, 2)), Cut((3,))], 2)
    assert layout.shard_numel == 8
    assert [layout.local_span(0, rank) for rank in (0, 1)] == [(0, 6), (0, 4)]
    assert [layout.local_span(1, rank) for rank in (0, 1)] == [(6, 8), (6, 7)]
    assert layout.padding(0, 1) == (4, 6)
    assert layout.whole_span(1) == (10, 13)
    assert not layout.is_even(0)
    assert ShardLayout([Cut((4, 3)), Cut((3, 4), 1)], 2).is_even(0)
    assert not ShardLayout([Cut((3, 4), 1)], 2).is_even(0), "rows of another dim are not contiguous"
