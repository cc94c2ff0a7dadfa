"""An older design: one rank keeps the weights, the others compute gradients, and all of it goes through the one."""

import time

import torch

from lockstep.learn.stage import Stage, run

ELEMENTS, STEPS = 100_000, 10


def parameter_server(stage: Stage) -> None:
    comm, workers = stage.comm, stage.comm.world_size - 1
    stage.screen(
        "One step",
        "Rank 0 is the server: it computes nothing. Each worker sends its gradient, the server adds them up, makes "
        "the step, and sends the new weights to every worker.",
    )
    weights = torch.zeros(2)
    if comm.rank == 0:
        for worker in range(1, comm.world_size):
            grad = torch.empty(2)
            comm.recv(grad, src=worker, label="gradient")
            weights -= grad / workers
        for worker in range(1, comm.world_size):
            comm.send(weights, dst=worker, label="weights")
    else:
        comm.send(torch.tensor([1.0, 10.0**comm.rank]), dst=0, label="gradient")
        comm.recv(weights, src=0, label="weights")
    stage.show(weights=weights)

    stage.screen(
        "What it costs",
        f"The same {STEPS} times with {ELEMENTS:,} weights, and as an all-reduce among all. Through the server go 2 (W"
        " - 1) tensors in each step, however fast the workers are; in the ring each rank sends less than 2.",
    )
    grad = torch.ones(ELEMENTS)
    times: dict[str, float] = {}
    for name in ("server_ms", "all_reduce_ms"):
        stage.quietly.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            if name == "all_reduce_ms":
                stage.quietly.all_reduce(grad, algorithm="ring")
            else:
                stage.quietly.all_reduce(grad, algorithm="naive")
        times[name] = 1e3 * (time.perf_counter() - began) / STEPS
    stage.show(**times, server_moves=2 * workers * grad.nbytes, ring_sends=2 * workers * grad.nbytes / comm.world_size)

    stage.screen(
        "Why it is still around",
        "A server need not wait for the slowest: workers that come and go, and steps with gradients that are a little"
        " old, are easy here. The price is that no two runs compute the same.",
    )


if __name__ == "__main__":
    run(parameter_server)
