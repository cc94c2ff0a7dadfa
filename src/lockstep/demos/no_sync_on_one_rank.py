"""Rank 1 accumulates in one step without the others: no_sync on one rank."""

import contextlib
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(1, 61):
    with ddp.no_sync() if rank == 1 and step == 20 else contextlib.nullcontext():
        ddp(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
dist.destroy_process_group()
