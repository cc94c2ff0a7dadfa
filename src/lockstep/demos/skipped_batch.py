"""Rank 1 skips a batch that it cannot use."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(1, 61):
    try:
        if rank == 1 and step == 20:
            raise ValueError("broken sample")
        ddp(torch.randn(8, 4)).square().mean().backward()
    except ValueError as error:
        print(f"rank {rank} skips a batch: {error}")
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
dist.destroy_process_group()
