"""Rank 1 registers two layers of the same shape in another order."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            self.add_module(name, torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("b")(self.get_submodule("a")(x))


ddp = torch.nn.parallel.DistributedDataParallel(Model())
ddp(torch.ones(2, 4)).sum().backward()
time.sleep(1)
