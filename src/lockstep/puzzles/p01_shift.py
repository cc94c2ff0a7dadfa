"""Everybody gives to the right neighbour, and nobody waits for ever."""

import torch

from lockstep.learn.stage import Stage, run


def shift(stage: Stage) -> None:
    comm = stage.comm
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    stage.screen("Pass it on", "Rank r has 10 to the power of r. In the end each rank has its left neighbour's.")
    mine, arrived = torch.tensor([10.0**comm.rank]), torch.zeros(1)
    stage.show(mine=mine)
    # your turn: send `mine` to `right`, receive `arrived` from `left`: one message per rank. Were all ranks to receive
    # first, none would ever send. comm.isend and comm.irecv start a message and return something to wait() for.
    sent = comm.isend(mine, dst=right)
    comm.recv(arrived, src=left)
    sent.wait()
    # end of your turn
    stage.show(answer=arrived)


if __name__ == "__main__":
    run(shift)
