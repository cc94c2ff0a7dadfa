"""The ring all-reduce, in which nobody sends its whole tensor W - 1 times."""

import torch

from lockstep.learn.stage import Stage, run


def ring(stage: Stage) -> None:
    comm, world_size = stage.comm, stage.comm.world_size
    right, left = (comm.rank + 1) % world_size, (comm.rank - 1) % world_size
    stage.screen("The ring", "Each rank has W chunks of one number each, all 10 to the power of its rank.")
    chunks = [torch.tensor([10.0**comm.rank]) for _ in range(world_size)]

    def exchange(outgoing: torch.Tensor) -> torch.Tensor:
        """Send to the right, receive from the left, at the same time."""
        incoming = torch.empty_like(outgoing)
        sent = comm.isend(outgoing, dst=right)
        comm.recv(incoming, src=left)
        sent.wait()
        return incoming

    # your turn: W - 1 steps in which chunk (rank - step) goes right and what comes is added to chunk (rank - step - 1):
    # then chunk (rank + 1) is the whole sum. W - 1 more steps hand the finished chunks round. All modulo W.
    for step in range(world_size - 1):
        chunks[(comm.rank - step - 1) % world_size] += exchange(chunks[(comm.rank - step) % world_size])
    for step in range(world_size - 1):
        chunks[(comm.rank - step) % world_size] = exchange(chunks[(comm.rank + 1 - step) % world_size])
    # end of your turn
    stage.show(answer=torch.cat(chunks))


if __name__ == "__main__":
    run(ring)
