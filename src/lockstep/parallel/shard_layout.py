"""Which piece of every parameter of a group belongs to which rank, and where it lies. Pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, final

from lockstep.parallel.buckets import starts_of

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """A parameter and the dimension along which it is cut."""

    shape: Shape
    dim: int = 0


@final
class ShardLayout:
    """The parameters of one group over W ranks: what each rank keeps, in one flat shard of S elements.

    A parameter is cut along its dim into chunks of ceil(n / W) rows, as torch.chunk and DTensor's Shard(dim) do: the
    last ranks may have fewer, or none. The pieces lie one after the other in the shard. Each takes the room of the
    largest, rank 0's, so that all shards are equally long and a piece starts at the same place in all of them.

        parameters [5, 2] and [3] over 2 ranks:   rank 0   a0 a0 a1 a1 a2 a2 | b0 b1      S = 8
                                                  rank 1   a3 a3 a4 a4  .  . | b2  .
    """

    def __init__(self, cuts: Sequence[Cut], world_size: int) -> None:
        self.cuts = tuple(cuts)
        self.world_size = world_size
        self.whole_starts, self.whole_numel = starts_of([math.prod(cut.shape) for cut in cuts])
        rooms = [math.prod(self.piece_shape(index, 0)) for index in range(len(cuts))]
        self.starts, self.shard_numel = starts_of(rooms)  # of each piece in the shard; S

    def rows(self, index: int, rank: int) -> tuple[int, int]:
        """(first, how many) of the rows of parameter `index` that `rank` has."""
        shape, dim = self.cuts[index]
        chunk = -(-shape[dim] // self.world_size)
        first = min(rank * chunk, shape[dim])
        return first, min(chunk, shape[dim] - first)

    def piece_shape(self, index: int, rank: int) -> Shape:
        """The shape of `rank`'s piece of parameter `index`."""
        shape, dim = self.cuts[index]
        return (*shape[:dim], self.rows(index, rank)[1], *shape[dim + 1 :])

    def local_span(self, index: int, rank: int) -> tuple[int, int]:
        """(start, stop) of `rank`'s piece of parameter `index` in its flat shard."""
        start = self.starts[index]
        return start, start + math.prod(self.piece_shape(index, rank))

    def padding(self, index: int, rank: int) -> tuple[int, int]:
        """(start, stop) of the room after `rank`'s piece that no element uses."""
        following = self.starts[index + 1] if index + 1 < len(self.cuts) else self.shard_numel
        return self.local_span(index, rank)[1], following

    def whole_span(self, index: int) -> tuple[int, int]:
        """(start, stop) of parameter `index` in the flat buffer of all whole parameters."""
        start = self.whole_starts[index]
        return start, start + math.prod(self.cuts[index].shape)

    def is_even(self, index: int) -> bool:
        """Whether all ranks have equally much of parameter `index`, rows one after the other in memory."""
        shape, dim = self.cuts[index]
        return dim == 0 and shape[0] % self.world_size == 0
