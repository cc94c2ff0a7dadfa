"""Two processes share no memory: send, and receive."""

import torch

from lockstep.learn.stage import Stage, run


def send_receive(stage: Stage) -> None:
    comm = stage.comm
    stage.screen(
        "Each process has memory of its own",
        "Rank r sets x to 10 to the power of r. It is one line of one program, and as many different tensors as ranks.",
    )
    x = torch.tensor([10.0**comm.rank])
    stage.show(x=x)

    stage.screen(
        "What another shall have must be sent, and received",
        "Rank 0 calls send, rank 1 calls recv. Both calls are needed; each waits for the other. Only rank 1's x "
        "changes.",
    )
    if comm.rank == 0:
        comm.send(x, dst=1)
    elif comm.rank == 1:
        comm.recv(x, src=0)
    stage.show(x=x)

    stage.screen(
        "A chain: the value grows on its way",
        "Each rank waits for its left neighbour, adds its own power of ten, and sends on. Nobody can start before the"
        " one on its left has ended. The digits of the sum say who is in it: a missing rank would leave a 0.",
    )
    total = torch.tensor([10.0**comm.rank])
    if comm.rank > 0:
        arrived = torch.empty(1)
        comm.recv(arrived, src=comm.rank - 1)
        total += arrived
    if comm.rank < comm.world_size - 1:
        comm.send(total, dst=comm.rank + 1)
    stage.show(total=total)


if __name__ == "__main__":
    run(send_receive)
