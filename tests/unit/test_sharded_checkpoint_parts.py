"""Boxes inside tensors, and the box of a DTensor that a rank holds, against torch's own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lockstep.comm.tensor_parts import Part, boxes_of_range, is_dtensor, is_first_copy, local_of, part_of
from lockstep.errors import ConfigError
from sharded_tensors import mesh_of

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)


@given(shape=SHAPES, grid=MESHES, data=st.data())
def test_every_element_is_held_once_by_first_copies_where_torch_says(
    shape: tuple[int, ...], grid: tuple[int, ...], data: st.DataObject
) -> None:
    kinds = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
    placements: list[Placement] = [data.draw(st.sampled_from(kinds)) for _ in grid]
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in range(math.prod(grid)):
        mesh = mesh_of(grid, rank)
        local_shape, start = compute_local_shape_and_global_offset(shape, mesh, placements)
        stride = torch.empty(shape, device="meta").stride()
        local = torch.empty(local_shape)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        part = part_of(tensor)
        assert part.shape == tuple(local_shape) == tuple(local_of(tensor).shape)
        if part.numel:
            assert part.start == tuple(start)
        seen[part.slices] += is_first_copy(tensor)
    assert torch.equal(seen, torch.ones_like(seen))


@st.composite
def parts(draw: st.DrawFn, dims: int) -> Part:
    start = draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims))
    return Part(tuple(start), tuple(draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims))))


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(parts(dims), parts(dims))))
def test_overlap_is_what_indexing_says(pair: tuple[Part, Part]) -> None:
    one, other = pair
    whole = torch.arange(8 ** len(one.start)).view((8,) * len(one.start))
    both = set(whole[one.slices].flatten().tolist()) & set(whole[other.slices].flatten().tolist())
    common = one.overlap(other)
    assert (common is None) == (not both)
    if common is not None:
        assert set(whole[common.slices].flatten().tolist()) == both
        assert torch.equal(whole[one.slices][common.within(one).slices], whole[common.slices])
        assert common.numel == len(both)


@given(shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), data=st.data())
def test_a_range_of_elements_is_boxes_in_the_same_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    assert [int(number) for box in boxes for number in whole[box.slices].flatten()] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)


def test_plain_tensors_are_held_whole_and_odd_dtensors_are_refused() -> None:
    plain = torch.ones(2, 3, requires_grad=True)
    assert part_of(plain) == Part((0, 0), (2, 3))
    assert not is_dtensor(plain)
    assert not local_of(plain).requires_grad
    assert local_of(plain).data_ptr() == plain.data_ptr()
    mesh = mesh_of((2,), 1)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(ConfigError, match="Partial"):
        part_of(partial)
    uneven = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,))
    with pytest.raises(ConfigError, match=r"piece \(4,\) at .* rule it is \(3,\)"):
        part_of(uneven)
