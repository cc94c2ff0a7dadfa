"""Who writes which elements, the files they are in, and any part of a tensor put together from them again."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint import open_files, shares, tensor_file
from lockstep.checkpoint import reader as reader_module
from lockstep.checkpoint.manifest import NAME, Manifest, file_name, to_text
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.shares import Layout, is_tiled, layout_of, plan_pieces, without
from lockstep.checkpoint.tensor_file import DTYPES, FileRecord, Piece, Stored, read_header, write_tensor_file
from lockstep.comm.tensor_parts import Part, boxes_of_range
from lockstep.errors import CheckpointError
from small_checkpoints import write_checkpoint

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
DTYPE_NAMES = st.sampled_from(["F64", "F32", "BF16", "U8"])


def whole(shape: tuple[int, ...]) -> Part:
    return Part((0,) * len(shape), shape)


# ------------------------------------------------------------------ who writes what


@given(
    tensors=st.dictionaries(st.text("ab/", min_size=1, max_size=4), st.tuples(DTYPE_NAMES, SHAPES), max_size=8),
    world_size=st.integers(1, 17),
    limit=st.sampled_from([0, 8, 50, 1 << 20]),
    small=st.sampled_from([0, 6, 1 << 16]),
)
@example({**dict.fromkeys(("/", "/a", "a", "a/"), ("F64", ())), "aa": ("F64", (1, 1))}, 6, 0, 0)
def test_every_element_of_what_all_ranks_have_is_written_once_in_equal_shares(
    tensors: dict[str, tuple[str, tuple[int, ...]]], world_size: int, limit: int, small: int
) -> None:
    layouts = {path: Layout(dtype, shape, whole(shape), False, True) for path, (dtype, shape) in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "_WHOLE_BYTES", limit)
        patch.setattr(shares, "_SMALL_BYTES", small)
        plans = [plan_pieces(layouts, rank, world_size) for rank in range(world_size)]
    parts = {path: [piece.part for plan in plans for piece in plan if piece.path == path] for path in tensors}
    for path, (_, shape) in tensors.items():
        seen = torch.zeros(shape, dtype=torch.int64)
        for part in parts[path]:
            assert part.numel
            seen[part.slices] += 1
        assert torch.equal(seen, torch.ones_like(seen))
        assert is_tiled(shape, parts[path])
    sizes = [DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in tensors.values()]
    rows = [size // shape[0] for size, (_, shape) in zip(sizes, tensors.values(), strict=True) if shape and size]
    for plan in plans:
        assert len({piece.path for piece in plan}) == len(plan)
        shared = sum(piece.nbytes for piece in plan if piece.nbytes > small or not is_whole(piece, tensors))
        assert shared <= sum(sizes) / world_size + max(limit, 8) + max([*rows, 8])  # a scalar cannot be cut
    for plan in plans[1:]:
        assert all(DTYPES[p.dtype].itemsize * math.prod(tensors[p.path][1]) > small for p in plan)


def is_whole(piece: Piece, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bool:
    return piece.part == whole(tensors[piece.path][1])


def test_cut_tensors_are_written_where_they_are_by_the_first_that_has_them() -> None:
    part = Part((3, 0), (2, 4))
    layouts = {
        "first": Layout("F32", (5, 4), part, True, True),
        "copy": Layout("F32", (5, 4), part, True, False),
        "none": Layout("F32", (5, 4), Part((5, 0), (0, 4)), True, True),
        "alike": Layout("F32", (5, 4), whole((5, 4)), False, True),
    }
    assert plan_pieces(layouts, 0, 2) == [Piece("alike", "F32", whole((5, 4))), Piece("first", "F32", part)]
    assert plan_pieces(layouts, 1, 2) == [Piece("first", "F32", part)]
    assert layout_of(torch.ones(2, 3), "x") == Layout("F32", (2, 3), whole((2, 3)), False, True)
    with pytest.raises(CheckpointError, match=r"x has dtype torch\.complex128"):
        layout_of(torch.ones(1, dtype=torch.complex128), "x")


def test_large_tensors_are_shared_out_by_rows_and_small_ones_stay_whole() -> None:
    layouts = {
        "embedding": Layout("F32", (50257, 768), whole((50257, 768)), False, True),
        **{f"h.{i}": Layout("F32", (256, 1024), whole((256, 1024)), False, True) for i in range(40)},  # 1 MiB
    }
    total = 4 * (50257 * 768 + 40 * 256 * 1024)
    for world_size in (2, 3, 8, 17):
        plans = [plan_pieces(layouts, rank, world_size) for rank in range(world_size)]
        written = [sum(piece.nbytes for piece in plan) for plan in plans]
        assert sum(written) == total
        assert max(written) <= total / world_size + (1 << 20) + 4 * 768
        assert all(piece.part.shape == (256, 1024) for plan in plans for piece in plan if piece.path != "embedding")


# ------------------------------------------------------------------ every element once


@given(st.data())
def test_boxes_made_by_straight_cuts_are_told_from_others(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes = [whole(shape)]
    for _ in range(data.draw(st.integers(0, 6))) if shape else ():
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, box.shape[dim]))
        one, other = list(box.shape), list(box.shape)
        one[dim], other[dim] = at, box.shape[dim] - at
        start = tuple(a + at * (i == dim) for i, a in enumerate(box.start))
        boxes += [part for part in (Part(box.start, tuple(one)), Part(start, tuple(other))) if part.numel]
    assert is_tiled(shape, data.draw(st.permutations(boxes)))
    changed = list(boxes)
    if data.draw(st.booleans()):
        changed.append(data.draw(st.sampled_from(boxes)))
    else:
        changed.remove(data.draw(st.sampled_from(boxes)))
    assert not is_tiled(shape, changed)


@settings(max_examples=200)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(1, 4)] * 2), max_size=4))
def test_boxes_that_leave_gaps_or_overlap_or_stick_out_are_never_taken(boxes: list[tuple[int, ...]]) -> None:
    parts = [Part((a, b), (n, m)) for a, b, n, m in boxes]
    seen = torch.zeros(8, 8, dtype=torch.int64)
    for part in parts:
        seen[part.slices] += 1
    expected = torch.zeros_like(seen)
    expected[:4, :4] = 1
    assert not is_tiled((4, 4), parts) or torch.equal(seen, expected)


def test_very_many_pieces_are_judged_in_one_pass_however_they_lie() -> None:
    rows = [Part((i, 0), (1, 10_000)) for i in range(20_000)]
    columns = [Part((0, i), (20_000, 1)) for i in range(10_000)]
    assert is_tiled((20_000, 10_000), rows)
    assert is_tiled((20_000, 10_000), columns)
    assert not is_tiled((20_000, 10_000), [*rows[:-1], rows[0]])
    stairs = [Part((i, i), (1, 20_000 - i)) for i in range(10_000)]  # one peeled off after another: no rank writes so
    stairs += [Part((i + 1, i), (20_000 - i - 1, 1)) for i in range(10_000)]
    assert not is_tiled((20_000, 20_000), stairs)


# ------------------------------------------------------------------ files


def test_a_file_holds_every_dtype_aligned_and_its_digests_are_those_of_its_bytes(tmp_path: Path) -> None:
    tensors = {f"{name}.{shape}": torch.ones(shape).to(dtype) for name, dtype in DTYPES.items() for shape in ((3,), ())}
    tensors |= {"turned": torch.arange(6.0).view(2, 3).t(), 'é\n"': torch.tensor([True]), "neg": torch.ones(2, 3)[:, 1]}
    tensors["conj"] = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    tensors["grad"] = torch.ones(2, requires_grad=True)
    tensors["none"] = torch.empty(0, 4)
    pieces = [Piece(path, tensor_file.dtype_name(t.dtype, path), whole(tuple(t.shape))) for path, t in tensors.items()]
    path = tmp_path / "x"
    record = write_tensor_file(path, pieces, lambda i: tensors[pieces[i].path])
    data = path.read_bytes()
    stored = read_header(lambda offset, count: data[offset : offset + count], len(data), "x")
    assert record == FileRecord(
        len(data),
        hashlib.sha256(data).hexdigest(),
        tuple(zlib.crc32(data[offset : offset + piece.nbytes]) for piece, offset in stored),
    )
    assert {piece for piece, _ in stored} == {piece for piece in pieces if piece.nbytes}
    assert all(offset % DTYPES[piece.dtype].itemsize == 0 for piece, offset in stored)
    found = load_file(path)
    del tensors["none"]
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor), name


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()


def test_pieces_that_begin_elsewhere_say_where_and_plain_safetensors_reads_them(tmp_path: Path) -> None:
    table = torch.arange(30.0).view(6, 5)
    pieces = [Piece("b", "F32", Part((2, 0), (3, 5))), Piece("a", "F32", Part((0, 0), (6, 5)))]
    write_tensor_file(tmp_path / "x", pieces, lambda i: table[pieces[i].part.slices])
    data = (tmp_path / "x").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"starts": '{"b":[2,0]}'}
    assert torch.equal(load_file(tmp_path / "x")["b"], table[2:5])
    read = read_header(lambda offset, count: data[offset : offset + count], len(data), "x")
    assert read == [Stored(pieces[1], len(data) - 180), Stored(pieces[0], len(data) - 60)]


def test_writing_never_replaces_follows_or_copies(tmp_path: Path) -> None:
    tensor = torch.ones(8 << 20, dtype=torch.uint8)
    pieces = [Piece("a", "U8", whole((8 << 20,)))]
    tracemalloc.start()
    try:
        write_tensor_file(tmp_path / "x", pieces, lambda i: tensor)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20  # the file's buffer
    finally:
        tracemalloc.stop()
    assert (tmp_path / "x").stat().st_mode & 0o7777 == 0o666 & ~umask()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("x", "link"):
        with pytest.raises(FileExistsError):
            write_tensor_file(tmp_path / name, pieces, lambda i: tensor)
    assert not (tmp_path / "elsewhere").exists()


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_a_file_of_too_many_pieces_is_refused_before_it_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "TOKENS_MAX", 10)
    pieces = [Piece(str(i), "U8", whole((1,))) for i in range(9)]
    with pytest.raises(CheckpointError, match="9 pieces, too many"):
        write_tensor_file(tmp_path / "x", pieces, lambda i: torch.ones(1, dtype=torch.uint8))
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------ any part, from any files


def chunks(n: int, parts: int) -> list[tuple[int, int]]:
    size = -(-n // parts)
    return [(min(i * size, n), min(size, max(n - i * size, 0))) for i in range(parts)]


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[Part]:
    """The pieces of a tensor that is cut into so many along each dim."""
    along = [chunks(n, k) for n, k in itertools.zip_longest(shape, cuts[: len(shape)], fillvalue=1)]
    return [Part(tuple(a for a, _ in box), tuple(n for _, n in box)) for box in itertools.product(*along)]


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(1, 7), max_size=3).map(tuple),
    saved=st.tuples(*[st.integers(1, 4)] * 3),
    wanted=st.tuples(*[st.integers(1, 5)] * 3),
    dtype=st.sampled_from(["F64", "BF16", "U8"]),
    block=st.sampled_from([1, 8, 40, 1 << 24]),
)
def test_any_part_of_a_tensor_comes_from_pieces_cut_in_any_way(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    saved: tuple[int, ...],
    wanted: tuple[int, ...],
    dtype: str,
    block: int,
) -> None:
    tensor = (torch.arange(math.prod(shape)) % 251).view(shape).to(DTYPES[dtype])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        folder = write_pieces(
            tmp_path_factory.mktemp("c"), tensor, dtype, *([p] for p in grid(shape, saved) if p.numel)
        )
    with open_checkpoint(folder) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "_BLOCK_BYTES", block)
        patch.setattr(open_files, "_OPEN_MAX", 2)
        reader.verify()
        for part in grid(shape, wanted):
            out = torch.zeros(part.shape, dtype=tensor.dtype)
            reader.read_into(out, "t", part)
            assert torch.equal(out, tensor[part.slices])
        turned = torch.zeros(shape[::-1]).permute(tuple(range(len(shape)))[::-1])  # strided, and of another dtype
        reader.read_into(turned, "t", whole(shape))
        assert torch.equal(turned, tensor.float())
        assert torch.equal(reader.read("t"), tensor)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    wanted=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_pieces_that_begin_and_end_inside_rows_are_several_of_one_tensor_in_a_file(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], cuts: list[int], wanted: tuple[int, ...]
) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    at = sorted({0, tensor.numel(), *(min(cut, tensor.numel()) for cut in cuts)})
    boxes = [boxes_of_range(shape, start, stop) for start, stop in itertools.pairwise(at)]
    assert is_tiled(shape, [box for rank in boxes for box in rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        folder = write_pieces(tmp_path_factory.mktemp("c"), tensor, "I64", *boxes)
    with open_checkpoint(folder) as reader:
        reader.verify()
        assert torch.equal(reader.read("t"), tensor)
        for part in grid(shape, wanted):
            out = torch.zeros(part.shape, dtype=torch.int64)
            reader.read_into(out, "t", part)
            assert torch.equal(out, tensor[part.slices])


def write_pieces(parent: Path, tensor: Tensor, dtype: str, *parts: list[Part]) -> Path:
    """A checkpoint in which each rank has written some of `parts`."""
    folder = parent / "step-00000001"
    folder.mkdir()
    files = {}
    for rank, own in enumerate(parts):
        pieces = [Piece("t", dtype, part) for part in own]
        files[file_name(rank)] = write_tensor_file(
            folder / file_name(rank), pieces, lambda i, of=own: tensor[of[i].slices]
        )
    manifest = Manifest(1, 1, "", max(1, len(parts)), files, {"t": (dtype, tuple(tensor.shape))}, {}, {}, {})
    (folder / NAME).write_text(to_text(manifest))
    return folder


def test_reading_takes_no_memory_of_its_own_where_rows_lie_as_in_the_file(tmp_path: Path) -> None:
    table = torch.arange(6 << 20, dtype=torch.int32).view(-1, 1024)  # 24 MiB
    folder = write_checkpoint(tmp_path, 1, {"t": table}, world_size=3)
    out = torch.zeros(len(table) - 2, 1024, dtype=torch.int32)
    with open_checkpoint(folder) as reader:
        tracemalloc.start()
        try:
            reader.verify()
            reader.read_into(out, "t", Part((1, 0), tuple(out.shape)))
            assert tracemalloc.get_traced_memory()[1] < 5 << 20
        finally:
            tracemalloc.stop()
    assert torch.equal(out, table[1:-1])


def test_a_checkpoint_of_more_ranks_than_files_may_be_open_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(shares, "_SMALL_BYTES", 0)
    table = torch.arange(600.0).view(300, 2)
    folder = write_checkpoint(tmp_path, 1, {"t": table}, world_size=150)
    before = len(os.listdir("/proc/self/fd"))
    with open_checkpoint(folder) as reader:
        reader.verify()
        assert torch.equal(reader.read("t"), table)
        assert len(os.listdir("/proc/self/fd")) <= before + 1 + 64
        (folder / file_name(0)).rename(folder / "x")
        (folder / "x").rename(folder / file_name(0))  # the same file, opened again
        assert torch.equal(reader.read("t"), table)
        copy = (folder / file_name(0)).read_bytes()
        (folder / file_name(0)).unlink()
        (folder / file_name(0)).write_bytes(copy)
        with pytest.raises(CheckpointError, match=f"{file_name(0)} was changed while it was read"):
            reader.read("t")
    assert len(os.listdir("/proc/self/fd")) == before


@given(
    shape=st.lists(st.integers(1, 6), max_size=4).map(tuple),
    groups=st.lists(st.lists(st.integers(0, 400), max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_of_copies_that_are_cut_otherwise_every_element_is_written_once(
    shape: tuple[int, ...], groups: list[list[int]], data: st.DataObject
) -> None:
    """Each rank writes what those before it do not have, in whatever order the groups' members come."""
    numel = math.prod(shape)
    held: list[list[Part]] = []
    for cuts in groups:
        at = sorted({0, numel, *(min(cut, numel) for cut in cuts)})
        held += [boxes_of_range(shape, start, stop) for start, stop in itertools.pairwise(at)]
    held = data.draw(st.permutations(held))
    written = [without(boxes, [box for rank in held[:number] for box in rank]) for number, boxes in enumerate(held)]
    assert is_tiled(shape, [box for rank in written for box in rank])
    for boxes, mine in zip(held, written, strict=True):
        assert all(any(box.overlap(other) == box for other in boxes) for box in mine), "nobody writes what it has not"
