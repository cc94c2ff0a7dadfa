"""Everything through one rank, one after the other: what one writes first, and what the others are measured against.

The root moves (W - 1) * n elements each way while everybody else waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.op import Reduction
from lockstep.comm.reduction import combine


def reduce(wire: Wire, tensor: Tensor, root: int, reduction: Reduction) -> None:
    """`tensor` [n] of rank `root` becomes the reduction over all ranks, added in the order root, root + 1, ..."""
    W = wire.world_size
    if wire.rank != root:
        wire.step(wire.send(tensor, root))
        return
    arrived = torch.empty_like(tensor)
    for distance in range(1, W):
        wire.step(wire.recv(arrived, (root + distance) % W))
        combine(tensor, arrived, reduction, out=tensor)
    if reduction == "mean":
        tensor.div_(W)


def broadcast(wire: Wire, tensor: Tensor, root: int) -> None:
    """Every rank's `tensor` [n] becomes rank `root`'s."""
    if wire.rank != root:
        wire.step(wire.recv(tensor, root))
        return
    for distance in range(1, wire.world_size):
        wire.step(wire.send(tensor, (root + distance) % wire.world_size))


def all_reduce(wire: Wire, tensor: Tensor, reduction: Reduction) -> None:
    """`tensor` [n] becomes the reduction over all ranks: all to rank 0, and back to all."""
    reduce(wire, tensor, 0, reduction)
    broadcast(wire, tensor, 0)
