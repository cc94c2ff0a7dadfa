"""Lessons with a hole, in order. Each file holds the solution; what the learner gets is made from it."""

from __future__ import annotations

import math

from lockstep.learn.puzzle import Puzzle


def _tens(world_size: int) -> float:
    """The sum of all ranks' powers of ten: 111 for three."""
    return sum(10.0**rank for rank in range(world_size))


PUZZLES = (
    Puzzle(
        "p01_shift",
        answer=lambda rank, world_size: (10.0 ** ((rank - 1) % world_size),),
        sent=lambda rank, world_size: 4,
        hints=(
            "A rank must have started its send before it waits in recv.",
            "sent = comm.isend(mine, dst=right), then comm.recv(...), then sent.wait().",
        ),
    ),
    Puzzle(
        "p02_tree",
        answer=lambda rank, world_size: (42.0,),
        sent=lambda rank, world_size: 4 * math.ceil(math.log2(world_size)),
        ranks=(2, 3, 4, 5),
        hints=(
            "Let `distance` be 1, 2, 4, ...: ranks below it have the value, those from it to twice it get it now.",
            "Who has no partner in a round does nothing in it: check rank + distance < world_size.",
        ),
    ),
    Puzzle(
        "p03_ring",
        answer=lambda rank, world_size: [_tens(world_size)] * world_size,
        sent=lambda rank, world_size: 2 * (world_size - 1) * 4,
        hints=(
            "In the first half what arrives is added, in the second half it replaces.",
            "chunks[(rank - step - 1) % W] += exchange(chunks[(rank - step) % W]) is a step of the first half.",
            "The second half begins with the chunk that the first one finished: (rank + 1) % W.",
        ),
    ),
    Puzzle(
        "p04_sampler",
        answer=lambda rank, world_size: [(rank + turn * world_size) % 10 for turn in range(math.ceil(10 / world_size))],
        calls=(),
        hints=("The turn-th card of a rank is number rank + turn * W.", "Beyond the last one, % LENGTH begins again."),
    ),
    Puzzle(
        "p05_gradients",
        answer=lambda rank, world_size: (1 - _tens(world_size) / world_size,),
        calls=("all_reduce",),
        calls_max=1,
        hints=('comm.all_reduce(tensor, "mean") works in place.',),
    ),
    Puzzle(
        "p06_accumulate",
        answer=lambda rank, world_size: (2 * _tens(world_size) / world_size,),
        calls=("all_reduce",),
        calls_max=1,
        hints=("The ranks' mean divides by W; the microbatches' mean has to divide by 3 as well.",),
    ),
    Puzzle(
        "p07_shards",
        answer=lambda rank, world_size: [-_tens(world_size)] * world_size,
        calls=("reduce_scatter", "all_gather"),
        calls_max=2,
        hints=("piece = torch.empty(1) is what reduce_scatter_tensor writes into.",),
    ),
    Puzzle(
        "p08_deadlock",
        answer=lambda rank, world_size: (_tens(world_size),),
        calls=("all_reduce",),
        calls_max=1,
        hints=("Move the collective out of the if.",),
    ),
)
