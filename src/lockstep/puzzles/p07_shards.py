"""A sharded step: each rank owns one piece of the weights."""

import torch

from lockstep.learn.stage import Stage, run


def shards(stage: Stage) -> None:
    comm, world_size = stage.comm, stage.comm.world_size
    stage.screen(
        "A sharded step", "W weights, one owned by each rank; rank r's gradients are all 10 to the power of r."
    )
    mine = torch.zeros(1)
    grads = torch.full((world_size,), 10.0**comm.rank)
    whole = torch.zeros(world_size)
    # your turn: get the sum of just your own piece of `grads` with comm.reduce_scatter_tensor(piece, grads), subtract
    # it from `mine`, and put all pieces together in `whole` with comm.all_gather_into_tensor(whole, mine).
    piece = torch.empty(1)
    comm.reduce_scatter_tensor(piece, grads)
    mine -= piece
    comm.all_gather_into_tensor(whole, mine)
    # end of your turn
    stage.show(answer=whole)


if __name__ == "__main__":
    run(shards)
