"""Collectives round a ring: rank r sends to r + 1 and receives from r - 1, all at once, W - 1 times.

Every rank moves n * (W - 1) / W elements for half an all-reduce, whatever W is: the least that is possible, and each
link carries the same. The price is W - 1 steps, so W - 1 times the latency of a message.

Three ranks, with a, b, c what they hold; what travels in the first half:

    rank 0: a0 a1 a2    step 0 sends a2, receives c1    step 1 sends c1+a1, receives b0+c0    then has b0+c0+a0
    rank 1: b0 b1 b2    step 0 sends b0, receives a2    step 1 sends a2+b2, receives c1+a1    then has c1+a1+b1
    rank 2: c0 c1 c2    step 0 sends c1, receives b0    step 1 sends b0+c0, receives a2+b2    then has a2+b2+c2

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.op import Reduction
from lockstep.comm.reduction import combine


def reduce_scatter(wire: Wire, output: Tensor, parts: Sequence[Tensor], reduce: Reduction) -> None:
    """`output` becomes the reduction of `parts[rank]` over all ranks.

    The sum of part p starts as rank p + 1's, goes on to the right, and every rank adds its own, rank p the last.
    Shapes: parts W x [n_p], the same on all ranks; output [n_rank], maybe of a wider dtype: sums travel in that.
    Memory: two of the largest part. `output` may be `parts[rank]`; `parts` are only read.
    """
    W, rank = wire.world_size, wire.rank
    right, left = (rank + 1) % W, (rank - 1) % W
    room = max(parts, key=Tensor.numel)
    spare = [torch.empty_like(room, dtype=output.dtype) for _ in range(min(W - 1, 2))]
    carried = parts[left].to(output.dtype)
    for step in range(1, W):
        part = (left - step) % W
        arrived = spare[step % len(spare)][: parts[part].numel()]
        wire.step(
            wire.send(carried, right, f"sum of part {(part + 1) % W}"), wire.recv(arrived, left, f"sum of part {part}")
        )
        combine(arrived, parts[part], reduce, out=arrived)
        carried = arrived
    output.copy_(carried)
    if reduce == "mean":
        output.div_(W)


def all_gather(wire: Wire, parts: Sequence[Tensor], mine: Tensor) -> None:
    """`parts[r]` becomes rank r's `mine`, on every rank: what came in one step goes on in the next.

    Shapes: parts W x [n_r], the same on all ranks; mine [n_rank]; it may be `parts[rank]`.
    """
    W, rank = wire.world_size, wire.rank
    right, left = (rank + 1) % W, (rank - 1) % W
    parts[rank].copy_(mine)
    for step in range(W - 1):
        going, coming = (rank - step) % W, (left - step) % W
        wire.step(wire.send(parts[going], right, f"part {going}"), wire.recv(parts[coming], left, f"part {coming}"))


def all_reduce(wire: Wire, tensor: Tensor, reduce: Reduction) -> None:
    """`tensor` [n] becomes the reduction over all ranks, cut into W parts: one that is shorter has empty ones."""
    parts = tensor.tensor_split(wire.world_size)  # W x [n / W], the first ones an element longer
    reduce_scatter(wire, parts[wire.rank], parts, reduce)
    all_gather(wire, parts, parts[wire.rank])
