"""64 bits that say whether two tensors hold the same bytes in the same order, at nearly the speed of a sum.

A tensor's bytes are 64-bit words in a table of 512 columns. The sum of each row and of each column, modulo 2**64, is
scrambled together with its place, and all of that is added up. A changed word changes the sum of its row; of two words
that have changed places at least one sum of a row or column changes; and a scrambled sum depends on each of its bits,
so that also the highest one, the sign of a number, counts like the others. It finds faults, not forgeries.

Source: Steele, Lea and Flood 2014 (splitmix64, whose last step is the scrambling).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.comm.tensor_parts import boxes_of_range
from lockstep.observe.tally import GOLDEN, scramble

_COLUMNS = 512
_ROW_BYTES = 8 * _COLUMNS
_PIECE_BYTES = 512 * _ROW_BYTES  # 2 MiB: read from memory once, for the columns from the cache
_NOTHING = torch.zeros(1, dtype=torch.int64)

Words = npt.NDArray[np.uint64]


@torch.no_grad()
def digests(tensors: Sequence[Tensor]) -> list[int]:
    """One digest per tensor, of any dtype, strides and device; a DTensor's, and any other subclass's, of its inside.

    Two tensors of equal elements have equal digests whatever their strides. Shape and dtype are not in it.
    Memory: 1/256 of all, and 2 MiB where a tensor is not contiguous. The device is waited for once.
    """
    sums = [_sums(tensor) for tensor in tensors]
    if not sums:
        return []
    starts = np.cumsum([0, *(len(one) for one in sums[:-1])])
    device = sums[0].device
    words = torch.cat([one.to(device) for one in sums]).cpu().numpy().view(np.uint64)
    places = np.arange(len(words), dtype=np.uint64)
    places -= np.repeat(starts.astype(np.uint64), [len(one) for one in sums])
    return np.add.reduceat(_scrambled(words, places), starts).tolist()


def _scrambled(words: Words, places: Words) -> Words:
    places += np.uint64(1)
    places *= GOLDEN
    places += words  # a sum in one row is not the same sum in another
    return scramble(places)


def _sums(tensor: Tensor) -> Tensor:
    """Of the columns and of the rows, and the words that fill no row: [512 + rows + words] int64."""
    parts = list(_parts(tensor))
    if len(parts) != 1 or parts[0] is not tensor:
        found = [_sums(part) for part in parts]
        return torch.cat(found) if found else _NOTHING
    columns: Tensor | None = None
    sums = []
    for piece in _pieces(tensor):
        even = piece.numel() // _ROW_BYTES * _ROW_BYTES
        if even:
            table = piece[:even].view(torch.int64).view(-1, _COLUMNS)
            sums.append(table.sum(1))
            columns = table.sum(0) if columns is None else columns.add_(table.sum(0))
        if even < piece.numel():  # less than a row: its words stand for themselves
            sums.append(_words(piece[even:]))
    return torch.cat(sums if columns is None else [columns, *sums]) if sums else _NOTHING


def _words(octets: Tensor) -> Tensor:
    """`octets` as words, the last one filled up with zeros."""
    lacking = -octets.numel() % 8
    return (octets if not lacking else torch.nn.functional.pad(octets, (0, lacking))).view(torch.int64)


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that hold what is in `tensor`: itself, as a rule."""
    if tensor.is_meta:
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor has its mesh among them
                yield from _parts(part)
    elif tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        yield from (whole.indices(), whole.values())
    elif tensor.is_conj() or tensor.is_neg():
        yield tensor.resolve_conj().resolve_neg()
    else:
        yield tensor


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's bytes in the order of its elements, whole rows but for the last piece."""
    numel = tensor.numel()
    is_plain = tensor.is_contiguous() and tensor.data_ptr() % 8 == 0
    step = numel if tensor.device.type != "cpu" and is_plain else _PIECE_BYTES // tensor.element_size()
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else None
    for first in range(0, numel, max(step, 1)):
        stop = min(first + step, numel)
        if flat is None:
            boxes = boxes_of_range(tensor.shape, first, stop)
            elements = torch.cat([tensor[box.slices].reshape(-1) for box in boxes])
        else:
            elements = flat[first:stop] if is_plain else flat[first:stop].clone()
        yield elements.view(torch.uint8)
