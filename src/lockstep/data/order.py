"""The global order of an epoch, and which positions of it a rank gets. Pure functions of their arguments.

Every rank knows the same order: position p of epoch e holds sample `epoch_order(...)(p)`. Positions are dealt like
cards: from position `start` on, rank r of W gets start + r, start + r + W, start + r + 2W, ... So ranks that went k
rounds together have used up exactly the positions below start + k * W, and any other number of ranks can go on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.permutation import KeyedPermutation

Order = Literal["torch", "keyed"]
Tail = Literal["repeat", "drop", "none"]
Positions = npt.NDArray[np.int64]

# Samples turned into Python numbers at a time: enough to be fast, few enough to stay in the processor's cache.
_CHUNK = 8192


def deal(length: int, start: int, rank: int, world_size: int, tail: Tail) -> range:
    """The positions that `rank` gets of an epoch of `length` samples, of which the first `start` are used up.

    tail: what happens where the rest is no multiple of `world_size`. "repeat" goes on past the end (position p >=
    length holds what position p % length holds), "drop" leaves the last ones out, "none" gives some ranks one less.
    """
    rest = max(0, length - start)
    rounds, odd = divmod(rest, world_size)
    if tail == "repeat":
        stop = start + (rounds + bool(odd)) * world_size
    elif tail == "drop":
        stop = start + rounds * world_size
    else:
        stop = start + rest
    return range(start + rank, stop, world_size)


def tail_positions(
    length: int, start: int, world_size: int, tail: Tail, batch: int = 1, drop_last: bool = False
) -> tuple[list[int], list[int]]:
    """What a pass from `start` on does at its end, over all ranks: (positions dealt once more, positions left out).

    drop_last: each rank leaves out what does not fill a `batch`.
    """
    repeated, dropped, dealt = [], [], start
    for rank in range(world_size):
        positions = deal(length, start, rank, world_size, tail)
        kept = len(positions) - (len(positions) % batch if drop_last else 0)
        repeated += [position for position in positions[max(0, kept - 1) : kept] if position >= length]
        dropped += [position for position in positions[kept:] if position < length]
        dealt = max(dealt, positions[-1] + 1 if positions else start)
    return sorted(repeated), sorted([*dropped, *range(dealt, length)])


def epoch_order(length: int, order: Order | None, seed: int, epoch: int) -> Callable[[Positions], Positions]:
    """Position in [0, length) -> sample. `order` None: as they come.

    Memory: "torch" 4 * length bytes (8 from 2**31 samples on); otherwise nothing.
    """
    if order is None:
        return lambda positions: positions
    if order == "keyed":
        return KeyedPermutation(length, seed, epoch)
    samples = torch_permutation(length, seed, epoch).numpy()
    return lambda positions: samples[positions].astype(np.int64)


def sample_chunks(positions: range, length: int, order: Order | None, seed: int, epoch: int) -> Iterator[list[int]]:
    """The samples at `positions`, which may run past the end by less than a round, as lists of a few thousand.

    Memory: "torch" holds 4 bytes per position, and 4 * length while it starts; otherwise one chunk.
    """
    if order == "torch":
        yield from (chunk.tolist() for chunk in _torch_share(positions, length, seed, epoch).split(_CHUNK))
        return
    sample_at = epoch_order(length, order, seed, epoch)
    for first in range(0, len(positions), _CHUNK):
        part = positions[first : first + _CHUNK]
        yield sample_at(np.arange(part.start, part.stop, part.step) % length).tolist()


def torch_permutation(length: int, seed: int, epoch: int) -> Tensor:
    """The permutation that torch's DistributedSampler uses. Shapes: [length]."""
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    # The numbers drawn do not depend on the dtype, so half the memory gives the same permutation.
    dtype = torch.int32 if length < 2**31 else torch.int64
    return torch.randperm(length, generator=generator, dtype=dtype)


def _torch_share(positions: range, length: int, seed: int, epoch: int) -> Tensor:
    """One rank's part of torch's permutation, in memory of its own so that the whole can be freed."""
    whole = torch_permutation(length, seed, epoch)
    share = whole[positions.start : min(positions.stop, length) : positions.step].contiguous()
    padding = [position % length for position in positions[len(share) :]]
    return torch.cat([share, whole[padding]]) if padding else share
