"""Deal the samples out: everybody gets its own, all get equally many."""

import math

import torch

from lockstep.learn.stage import Stage, run

LENGTH = 10


def sampler(stage: Stage) -> None:
    comm = stage.comm
    stage.screen("Deal them out", f"{LENGTH} samples, like cards: rank r takes r, r + W, r + 2 W and so on.")
    each = math.ceil(LENGTH / comm.world_size)
    indices: list[int] = []
    # your turn: make `indices` this rank's own. Where W does not divide the length, some ranks would get one less: go
    # on dealing from the beginning, until all have `each`. No messages: it follows from the rank alone.
    indices = [(comm.rank + turn * comm.world_size) % LENGTH for turn in range(each)]
    # end of your turn
    stage.show(answer=torch.tensor(indices))


if __name__ == "__main__":
    run(sampler)
