"""All-reduce by recursive halving and doubling: as few bytes as the ring, in 2 log2 W steps.

Partners of distance 1 share the tensor: each sends the half that the other will sum, and sums its own. Then partners of
distance 2 share that half, and so on, until a rank has 1 / W of the tensor, summed over all. On the way back every two
partners give each other what they have finished.

    distance 1    rank 0 keeps [0 1 . .]    rank 1 keeps [. . 2 3]    ranks 2, 3 likewise
    distance 2    rank 0 keeps [0 . . .]    rank 2 keeps [. 1 . .]    rank 1 [. . 2 .]    rank 3 [. . . 3]
    and back      distance 2, then distance 1

Neighbours add first, so the sum is ((0 + 1) + (2 + 3)) + ...: for W a power of two, the bits of `tree_reduce`. For
another W the first ranks form pairs, the odd one of which gives the even one its tensor and gets the result.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.op import Reduction
from lockstep.comm.reduction import combine


def all_reduce(wire: Wire, tensor: Tensor, reduce: Reduction) -> None:
    """`tensor` [n] becomes the reduction over all ranks. Memory: half of it; all of it where W is no power of two."""
    rank, members = wire.rank, power_below(wire.world_size)
    pairs = wire.world_size - members  # the first 2 * pairs ranks go together two by two, so that `members` are left
    is_paired = rank < 2 * pairs
    if is_paired and rank % 2 == 1:
        wire.step(wire.send(tensor, rank - 1, "all it has"))
        wire.step(wire.recv(tensor, rank - 1, "the result"))
        return
    spare = torch.empty_like(tensor if is_paired else tensor[: (tensor.numel() + 1) // 2])
    if is_paired:
        wire.step(wire.recv(spare, rank + 1, "all it has"))
        combine(tensor, spare, reduce, out=tensor)
    place = rank // 2 if is_paired else rank - pairs  # among the members

    def share(low: int, high: int, distance: int) -> None:
        """Make chunks `low` to `high - 1` of all `members` final, on this rank and all partners from `distance` on."""
        if distance == members:
            if reduce == "mean":
                chunks(low, high).div_(wire.world_size)
            return
        middle = (low + high) // 2
        other = place ^ distance
        partner = 2 * other if other < pairs else other + pairs
        lower, upper = (low, middle), (middle, high)
        keep, give = (lower, upper) if place < other else (upper, lower)
        mine, theirs = chunks(*keep), chunks(*give)
        arrived = spare[: mine.numel()]
        wire.step(
            wire.send(theirs, partner, f"sum of {named(give)}"), wire.recv(arrived, partner, f"sum of {named(keep)}")
        )
        first, second = (mine, arrived) if place < other else (arrived, mine)
        combine(first, second, reduce, out=mine)
        share(*keep, 2 * distance)
        wire.step(wire.send(mine, partner, named(keep)), wire.recv(theirs, partner, named(give)))

    def chunks(low: int, high: int) -> Tensor:
        return tensor[low * tensor.numel() // members : high * tensor.numel() // members]

    share(0, members, 1)
    if is_paired:
        wire.step(wire.send(tensor, rank + 1, "the result"))


def named(chunks: tuple[int, int]) -> str:
    """`chunks 2-3` for (2, 4): from the first number on, without the last."""
    low, high = chunks
    return f"chunk {low}" if high - low == 1 else f"chunks {low}-{high - 1}"


def power_below(count: int) -> int:
    """The largest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1)
