"""Rank 1 has one batch less than rank 0."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(5 - rank):
    ddp(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
