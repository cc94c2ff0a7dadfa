"""A program that hangs. Mend it."""

import torch

from lockstep.learn.stage import Stage, run


def deadlock(stage: Stage) -> None:
    comm = stage.comm
    stage.screen("Find the deadlock", "Rank 0 looks at the loss of all ranks, and only rank 0 calls the collective.")
    loss = torch.tensor([10.0**comm.rank])
    # your turn: all_reduce needs every rank. Keep the report for rank 0 alone, but let all of them come to the sum.
    #| if comm.rank == 0:
    #|     comm.all_reduce(loss)
    #|     stage.say(f"the sum is {loss.item():g}")
    comm.all_reduce(loss)
    if comm.rank == 0:
        stage.say(f"the sum is {loss.item():g}")
    # end of your turn
    stage.show(answer=loss)


if __name__ == "__main__":
    run(deadlock)
