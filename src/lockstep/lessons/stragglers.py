"""One slow rank, and all are slow."""

import time

import torch

from lockstep.learn.stage import Stage, run

STEPS = 10


def stragglers(stage: Stage) -> None:
    comm = stage.comm
    slow = comm.world_size - 1
    stage.screen(
        "Who comes last does not wait",
        f"Each step is 2 ms of work and an all-reduce; rank {slow} needs 12 ms. Looking at the time inside the "
        "all-reduce alone, the others seem to have a slow network, and the slow one the fastest.",
    )
    inside = torch.zeros(STEPS)  # [steps]
    for step in range(STEPS):
        time.sleep(0.012 if comm.rank == slow else 0.002)
        began = time.perf_counter()
        stage.quietly.all_reduce(torch.ones(1000))
        inside[step] = 1e3 * (time.perf_counter() - began)
    stage.show(inside_ms=inside.median())

    stage.screen(
        "Whose fault it is",
        "Of one collective, the shortest time inside over all ranks is the communication itself: that rank came last "
        "and found everybody there. What is above it is waiting, and its cause is the rank with the least. No clocks "
        "have to agree for that. `lockstep profile` does it for every collective of a run.",
    )
    shortest = inside.clone()
    stage.quietly.all_reduce(shortest, "min")
    stage.show(communication_ms=shortest.median(), waiting_ms=(inside - shortest).median())


if __name__ == "__main__":
    run(stragglers)
