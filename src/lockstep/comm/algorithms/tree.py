"""Collectives over a binomial tree: few steps, whole tensors. The best way for what is small.

Counted from the root, rank v has as children v + 1, v + 2, v + 4, ... below v + its own lowest bit: seven ranks, and
the step in which each hears of a broadcast

    0 ── 4 (step 0) ── 6 (step 1)
    ├─── 2 (step 1) ── 3 (step 2)
    └─── 1 (step 2)         and 5, child of 4 (step 2)

In each step whoever has the tensor tells one more: log2 W steps, rounded up. Backwards it is a reduction: its sum is
((0 + 1) + (2 + 3)) + ((4 + 5) + 6), for every W the bits of `tree_reduce`, where the root is rank 0.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), 4.2, 4.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.op import Reduction
from lockstep.comm.reduction import combine


def reduce(wire: Wire, tensor: Tensor, root: int, reduction: Reduction) -> None:
    """`tensor` [n] of rank `root` becomes the reduction over all ranks; those of others hold a part of it.

    Memory: one more, on ranks that have children.
    """
    W = wire.world_size
    place = (wire.rank - root) % W
    distance = 1
    arrived = None
    while distance < W and not place & distance:
        if place + distance < W:
            arrived = torch.empty_like(tensor) if arrived is None else arrived
            wire.step(wire.recv(arrived, (wire.rank + distance) % W, "sum of a subtree"))
            combine(tensor, arrived, reduction, out=tensor)
        distance *= 2
    if place > 0:
        wire.step(wire.send(tensor, (wire.rank - distance) % W, "sum of a subtree"))
    elif reduction == "mean":
        tensor.div_(W)


def broadcast(wire: Wire, tensor: Tensor, root: int) -> None:
    """Every rank's `tensor` [n] becomes rank `root`'s: the farthest child first, which has most to do."""
    W = wire.world_size
    place = (wire.rank - root) % W
    distance = place & -place or 1 << (W - 1).bit_length()
    if place > 0:
        wire.step(wire.recv(tensor, (wire.rank - distance) % W))
    while distance > 1:
        distance //= 2
        if place + distance < W:
            wire.step(wire.send(tensor, (wire.rank + distance) % W))


def all_reduce(wire: Wire, tensor: Tensor, reduction: Reduction) -> None:
    """`tensor` [n] becomes the reduction over all ranks: summed up the tree to rank 0, told down the tree."""
    reduce(wire, tensor, 0, reduction)
    broadcast(wire, tensor, 0)
