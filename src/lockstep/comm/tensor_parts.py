"""Which parts of a whole tensor this rank holds. A tensor that is no DTensor, and no TensorPieces, is held whole.

A DTensor is known by what is read of it here: importing torch's class takes a second that programs without one save.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.errors import ConfigError


class Part(NamedTuple):
    """A box inside a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the whole tensor with."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: Part) -> Part | None:
        """The elements that are in both; None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Part(start, shape) if all(n > 0 for n in shape) else None

    def within(self, whole: Part) -> Part:
        """The same box, counted from the start of `whole`."""
        return Part(tuple(a - b for a, b in zip(self.start, whole.start, strict=True)), self.shape)


@final
@dataclass(frozen=True, eq=False)
class TensorPieces:
    """Boxes of a whole tensor, for what no DTensor can say: state of elements that begin in the middle of a row.

    Every element of the whole is in a piece of some rank; groups of ranks may have copies, in other boxes. A rank
    without any has no pieces, but names the tensor too.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole
    pieces: tuple[tuple[Part, Tensor], ...]  # where in the whole, and what is there: a tensor of the part's shape


AnyTensor = Tensor | TensorPieces


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Part]:
    """Elements [start, stop), counted row by row, as boxes in the same order: at most 2 * dims - 1 of them.

    shape [3, 4], elements 2 to 9:    . . 0 0
                                      1 1 1 1
                                      2 . . .
    """
    if start >= stop:
        return []
    if not shape:
        return [Part((), ())]
    inner, row = tuple(shape[1:]), math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all in one row, which it neither begins nor ends
        return _in_row(last, boxes_of_range(inner, start - last * row, stop - last * row))
    head = _in_row(first - 1, boxes_of_range(inner, start - (first - 1) * row, row)) if start < first * row else []
    tail = _in_row(last, boxes_of_range(inner, 0, stop - last * row))
    whole = [Part((first, *[0] * len(inner)), (last - first, *inner))] if first < last else []
    return head + whole + tail


def _in_row(row: int, boxes: Sequence[Part]) -> list[Part]:
    return [Part((row, *box.start), (1, *box.shape)) for box in boxes]


def held(tensor: Any) -> list[tuple[Part, Tensor]]:
    """What this rank has of `tensor`, a whole one, a DTensor or TensorPieces: where it is, and its elements.

    Memory: the tensor's own. Raises: ConfigError as `part_of`.
    """
    return list(tensor.pieces) if isinstance(tensor, TensorPieces) else [(part_of(tensor), local_of(tensor))]


def is_dtensor(tensor: Any) -> bool:
    """Whether `tensor` is a torch DTensor."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: Any) -> Tensor:
    """This rank's elements of `tensor`. Memory: the tensor's own."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def part_of(tensor: Any) -> Part:
    """Where this rank's elements of `tensor` lie in the whole.

    Raises: ConfigError for a DTensor that is cut by another rule than torch.chunk's, or waits for a sum (Partial).
    """
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    if not is_dtensor(tensor):
        return Part(tuple(start), tuple(shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return Part(tuple(start), (0,) * tensor.ndim)
    for axis in _axes_in_order(tensor):
        dim = tensor.placements[axis].dim
        n = shape[dim]
        chunk = -(-n // tensor.device_mesh.size(axis))
        first = min(coordinate[axis] * chunk, n)
        start[dim] += first
        shape[dim] = min(chunk, n - first)
    found = tuple(tensor.to_local().shape)
    if found != tuple(shape):
        raise ConfigError(
            f"a DTensor {tuple(tensor.shape)} placed as {tensor.placements} has a piece {found} at {coordinate}; "
            f"by torch.chunk's rule it is {tuple(shape)}"
        )
    return Part(tuple(start), tuple(shape))


def _axes_in_order(tensor: Any) -> list[int]:
    """The mesh axes along which a DTensor is cut, the one that cuts first at the front.

    That is from left to right, but a _StridedShard, as of fully_shard around tensor parallelism, comes after those to
    its right.
    """
    order: list[int] = []
    last: list[int] = []
    for axis, placement in enumerate(tensor.placements):
        parts = getattr(placement, "split_factor", None)
        if placement.is_shard():
            order.append(axis)
        elif parts is not None and parts == _parts_after(tensor, axis):
            last.insert(0, axis)
        elif not placement.is_replicate():
            raise ConfigError(f"a DTensor placed as {tensor.placements} has no one box of elements on each rank")
    return order + last


def _parts_after(tensor: Any, axis: int) -> int:
    """Into how many parts the axes to the right of `axis` cut the dim that it cuts."""
    dim = tensor.placements[axis].dim
    following = enumerate(tensor.placements[axis + 1 :], axis + 1)
    return math.prod(tensor.device_mesh.size(i) for i, other in following if getattr(other, "dim", None) == dim)


def is_first_copy(tensor: Any) -> bool:
    """Whether, of the ranks with equal pieces of a DTensor, this one is the first."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        place for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def give_memory(module: Module, device: torch.device | str | None = None) -> None:
    """Every parameter and buffer of `module` on the meta device gets memory, with whatever values were there.

    Ties stay, other tensors stay as they are. `device`: where; None for that of a DTensor's mesh, else the CPU.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    originals = []  # kept, so that no other tensor gets an id that is in use here
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    places.setdefault(id(tensor), []).append((table, name))
                    originals.append(tensor)
    if originals:
        module._apply(lambda t: torch.empty_like(t, device=device or _home_of(t)) if t.is_meta else t)
    for (table, name), *others in places.values():  # a plain parameter has become a new one in each of its modules
        for other_table, other_name in others:
            other_table[other_name] = table[name]


def _home_of(tensor: Any) -> torch.device:
    device_type = tensor.device_mesh.device_type if is_dtensor(tensor) else "cpu"
    return torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
