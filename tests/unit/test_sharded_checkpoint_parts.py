"""Boxes inside tensors, and the box of a DTensor that a rank holds, against torch's own arithmetic."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lockstep.checkpoint.tensor_file import DTYPES, Source, sum_of, write_tensors
from lockstep.comm.tensor_parts import Part, is_dtensor, is_first_copy, local_of, part_of
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


def test_a_file_holds_every_dtype_aligned_and_its_sum_is_that_of_its_bytes(tmp_path: Path) -> None:
    tensors = {f"{name}.{shape}": torch.ones(shape).to(dtype) for name, dtype in DTYPES.items() for shape in ((3,), ())}
    tensors |= {"turned": torch.arange(6.0).view(2, 3).t(), "none": torch.empty(0, 4), "é": torch.tensor([True])}
    sources = {name: Source(t.dtype, tuple(t.shape), partial(tensors.__getitem__, name)) for name, t in tensors.items()}
    path = tmp_path / "x"
    written = write_tensors(path, sources, {"format": "pt"})
    assert written == sum_of(path)
    assert written.bytes == path.stat().st_size
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0, name
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].contiguous().view(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().view(-1).view(torch.uint8).tolist()
        ), name
