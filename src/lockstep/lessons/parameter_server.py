"""An older design: all through one rank."""

import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.learn.stage import Stage, run

WIDTH = 320


def through_server(comm: Communicator, weights: Tensor, grad: Tensor) -> None:
    """Rank 0 keeps the weights and makes the step for all. Shapes: both [n]."""
    workers = range(1, comm.world_size)
    if comm.rank == 0:
        for worker in workers:
            comm.recv(grad, src=worker, label="gradient")
            weights -= grad / len(workers)
        for worker in workers:
            comm.send(weights, dst=worker, label="weights")
    else:
        comm.send(grad, dst=0, label="gradient")
        comm.recv(weights, src=0, label="weights")


def parameter_server(stage: Stage) -> None:
    comm = stage.comm
    text = "Rank 0, the server, computes nothing: it subtracts the mean gradient, and sends the weights to all."
    stage.screen("One step", text)
    weights = torch.zeros(2)
    through_server(comm, weights, torch.tensor([1.0, 10.0**comm.rank]))
    stage.show(weights=weights)

    text = "Counted, in and out: through the server go 2 (W - 1) gradients, so it has more to do with every worker."
    stage.screen("What moves", f"{text} In a ring less than 4 go through each rank, however many there are.")
    weights, grad = torch.zeros(WIDTH * WIDTH), torch.ones(WIDTH * WIDTH)  # [n]
    stage.show(gradient_bytes=grad.nbytes)
    stage.show(by_server_bytes=sum(stage.moved_bytes(lambda: through_server(comm, weights, grad))))
    stage.show(by_ring_bytes=sum(stage.moved_bytes(lambda: comm.all_reduce(grad, algorithm="ring"))))

    text = "A step of each: backward over 32 samples, then the gradients. DistributedDataParallel has no idle server,"
    stage.screen("What it takes", f"{text} and sends while backward goes on.")
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(32, WIDTH)

    def with_server() -> None:
        if comm.rank != 0:
            model(x).sum().backward()
        through_server(stage.quietly, weights, grad)

    ddp = lockstep.DistributedDataParallel(nn.Linear(WIDTH, WIDTH, bias=False))
    stage.show(server_ms=stage.median_ms(with_server), ddp_ms=stage.median_ms(lambda: ddp(x).sum().backward()))

    text = "A server need not wait for the slowest: workers may come and go, and bring gradients that are a little old."
    stage.screen("Why it is still around", f"{text} The price is that no two runs compute the same.")


if __name__ == "__main__":
    run(parameter_server)
