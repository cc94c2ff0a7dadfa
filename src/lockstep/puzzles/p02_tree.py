"""A broadcast in which those who have the value help to pass it on."""

import torch

from lockstep.learn.stage import Stage, run


def tree(stage: Stage) -> None:
    comm = stage.comm
    stage.screen("A tree", "Rank 0 has 42. In round k ranks below 2 to the power of k have it.")
    value = torch.tensor([42.0 if comm.rank == 0 else 0.0])
    # your turn: in each round, every rank that has the value sends it to one that has not: rank r to rank r + 2^k,
    # where that exists. The rounds end when 2^k is the world size or more.
    distance = 1
    while distance < comm.world_size:
        if comm.rank < distance and comm.rank + distance < comm.world_size:
            comm.send(value, dst=comm.rank + distance)
        elif distance <= comm.rank < 2 * distance:
            comm.recv(value, src=comm.rank - distance)
        distance *= 2
    # end of your turn
    stage.show(answer=value)


if __name__ == "__main__":
    run(tree)
