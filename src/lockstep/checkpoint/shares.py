"""Who writes what: the pieces of tensors that each rank puts into its file. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.checkpoint.tensor_file import Piece, dtype_name
from lockstep.comm.tensor_parts import Part, is_dtensor, is_first_copy, part_of

_WHOLE_BYTES = 1 << 20  # a tensor up to this size is written by one rank
_SMALL_BYTES = 1 << 16  # and up to this size by rank 0
_ROUNDS_PER_DIM = 4


class Layout(NamedTuple):
    """What must be known of a tensor to say who writes it."""

    dtype: str  # in the format's words
    shape: tuple[int, ...]  # whole
    part: Part  # what this rank has of it
    is_cut: bool  # ranks have pieces of it; else every rank has all of it
    is_first_copy: bool  # of the ranks that have the same piece, this one is the first


def layout_of(tensor: Any, path: str) -> Layout:
    """The layout of a tensor or DTensor on this rank.

    Raises: CheckpointError, naming `path`, for a dtype that files do not have; ConfigError for a DTensor whose pieces
    are no boxes.
    """
    is_cut = is_dtensor(tensor)
    first = is_first_copy(tensor) if is_cut else True
    return Layout(dtype_name(tensor.dtype, path), tuple(tensor.shape), part_of(tensor), is_cut, first)


def plan_pieces(tensors: Mapping[str, Layout], rank: int, world_size: int) -> list[Piece]:
    """What `rank` writes. All ranks together write every element once; nothing is written of tensors without any.

    Pieces of a cut tensor are written where they are, by the first that has them. Of the others, those up to 64 KiB are
    rank 0's: among them are buffers that differ between ranks, as batch norm's, of which rank 0's count. The rest is
    laid end to end, in the order of paths, and every rank gets an equal stretch, cut between tensors, and, in those of
    more than 1 MiB, between rows. So no rank writes more of it than its equal part, 1 MiB and one row.
    """
    pieces = []
    wholes = {p: Piece.whole(p, t.dtype, t.shape) for p, t in tensors.items() if not t.is_cut}
    total = sum(whole.nbytes for whole in wholes.values() if whole.nbytes > _SMALL_BYTES)
    low, high = (-(-total * r // world_size) for r in (rank, rank + 1))  # this rank's stretch, in bytes
    begin = 0
    for path in sorted(tensors):
        dtype, shape, part, is_cut, first = tensors[path]
        if is_cut:
            if first and part.numel:
                pieces.append(Piece(path, dtype, part))
            continue
        whole = wholes[path]
        if whole.nbytes <= _SMALL_BYTES:
            if rank == 0 and whole.nbytes:
                pieces.append(whole)
            continue
        if shape and whole.nbytes > _WHOLE_BYTES:  # the rows that begin in the stretch
            row_bytes = whole.nbytes // shape[0]
            first_row, end_row = (min(max(-(-(at - begin) // row_bytes), 0), shape[0]) for at in (low, high))
            if first_row < end_row:
                start = (first_row, *whole.part.start[1:])
                pieces.append(Piece(path, dtype, Part(start, (end_row - first_row, *shape[1:]))))
        elif low <= begin + whole.nbytes // 2 < high:
            pieces.append(whole)
        begin += whole.nbytes
    return pieces


def without(parts: Sequence[Part], others: Sequence[Part]) -> list[Part]:
    """The elements of `parts` that are in none of `others`, in boxes that straight cuts have made."""
    left = list(parts)
    for other in others:
        left = [rest for part in left for rest in _rest_of(part, part.overlap(other))]
    return left


def _rest_of(part: Part, taken: Part | None) -> list[Part]:
    if taken is None:
        return [part]
    rest: list[Part] = []
    start, shape = part
    for dim, (begin, count) in enumerate(zip(*taken, strict=True)):
        for low, high in ((start[dim], begin), (begin + count, start[dim] + shape[dim])):
            if low < high:
                rest.append(Part(_with(start, dim, low), _with(shape, dim, high - low)))
        start, shape = _with(start, dim, begin), _with(shape, dim, count)
    return rest


def is_tiled(shape: Sequence[int], parts: Sequence[Part]) -> bool:
    """Whether `parts` have every element of a tensor of `shape` exactly once.

    Only for parts that straight cuts through the whole tensor, then through what is left, have made: False for others.
    Time: n log n for n parts.
    """
    if 0 in shape:
        return not parts
    return _tiled(Part((0,) * len(shape), tuple(shape)), list(parts), 0, _ROUNDS_PER_DIM * max(1, len(shape)))


def _tiled(box: Part, parts: list[Part], dim: int, rounds: int) -> bool:
    """The same for the elements of `box`, cutting along `dim` first."""
    if len(parts) <= 1 or not box.shape or rounds == 0:
        return parts == [box]
    parts.sort(key=lambda part: part.start[dim])
    begin, end = box.start[dim], box.start[dim] + box.shape[dim]
    slab: list[Part] = []
    reach = begin  # how far along `dim` the slab's parts go
    for part in [*parts, None]:
        at = end if part is None else part.start[dim]
        if slab and at >= reach:
            start = slab[0].start[dim]
            inner = Part(_with(box.start, dim, start), _with(box.shape, dim, reach - start))
            if not _tiled(inner, slab, (dim + 1) % len(box.shape), rounds - 1):
                return False
            slab = []
        if part is not None:
            if not slab and at != reach:
                return False
            slab.append(part)
            reach = max(reach, at + part.shape[dim])
    return reach == end and not slab


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
