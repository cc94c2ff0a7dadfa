"""An older design: one process, a thread for each device."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import lockstep
from lockstep.learn.stage import Stage, run

BATCH, WIDTH = 96, 256


def data_parallel(stage: Stage) -> None:
    comm = stage.comm
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    x = torch.randn(BATCH, WIDTH)  # [batch, features]

    def with_threads() -> None:
        """As torch.nn.DataParallel: replicate, scatter, compute in threads, gather all gradients in one place."""
        copies = [copy.deepcopy(model) for _ in range(comm.world_size)]
        with ThreadPoolExecutor(comm.world_size) as pool:
            list(pool.map(lambda one, part: one(part).sum().backward(), copies, x.chunk(comm.world_size)))
        for parameter, *others in zip(model.parameters(), *[one.parameters() for one in copies], strict=True):
            parameter.grad = torch.stack([other.grad for other in others if other.grad is not None]).sum(0)

    stage.screen(
        "One process, many threads",
        "Rank 0 alone does all of it, the other ranks have nothing to do. In every step the weights are copied to all"
        " devices and the gradients come back to one; the threads share one interpreter, so the parts between the "
        "kernels run one after the other. It cannot leave its machine.",
    )
    took = stage.median_ms(with_threads if comm.rank == 0 else lambda: None)
    if comm.rank == 0:
        stage.show(threads_ms=took)

    stage.screen(
        "One process for each device",
        "DistributedDataParallel on the same batch: the replicas stay where they are and stay equal, only gradients "
        "move, and they move while backward still computes.",
    )
    ddp = lockstep.DistributedDataParallel(model)
    mine = x.chunk(comm.world_size)[comm.rank]
    stage.show(ddp_ms=stage.median_ms(lambda: ddp(mine).sum().backward()))


if __name__ == "__main__":
    run(data_parallel)
