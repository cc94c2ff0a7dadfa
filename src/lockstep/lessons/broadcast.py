"""One rank has the truth, all others get a copy."""

import torch
from torch import nn

from lockstep.learn.stage import Stage, run


def broadcast(stage: Stage) -> None:
    comm = stage.comm
    stage.screen(
        "The source of truth",
        "Only rank 0 knows the answer. After broadcast every rank has it; what the others had before is overwritten.",
    )
    answer = torch.tensor([42.0 if comm.rank == 0 else 0.0])
    comm.broadcast(answer, src=0)

    stage.screen(
        "The same by hand",
        "A broadcast is nothing but messages: rank 0 sends to each of the others in turn. With W ranks the root sends"
        " W - 1 times, one after the other; better algorithms let those who have it already help.",
    )
    answer = torch.tensor([7.0 if comm.rank == 0 else 0.0])
    for rank in range(1, comm.world_size):
        if comm.rank == 0:
            comm.send(answer, dst=rank)
        elif comm.rank == rank:
            comm.recv(answer, src=0)
    stage.show(answer=answer)

    stage.screen(
        "A tree: those who have it pass it on",
        "In step k every rank that has the value sends it to one that has not. So the number of owners doubles, and "
        "after log2(W) steps all have it.",
    )
    answer = torch.tensor([9.0 if comm.rank == 0 else 0.0])
    comm.broadcast(answer, src=0, algorithm="tree")
    stage.show(answer=answer)

    stage.screen(
        "What it is for: one model",
        "Every rank has drawn its own random weights, so the replicas differ from the start. Broadcasting each "
        "parameter from rank 0 makes them equal, bit for bit; DistributedDataParallel does this when it wraps a "
        "model.",
    )
    torch.manual_seed(comm.rank)
    model = nn.Linear(3, 1)
    stage.show(before=model.weight)
    for name, parameter in model.named_parameters():
        comm.broadcast(parameter.data, src=0, label=name)
    stage.show(weight=model.weight)


if __name__ == "__main__":
    run(broadcast)
