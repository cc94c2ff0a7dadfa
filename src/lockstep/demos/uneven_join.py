"""Rank 1 has one batch less, and join() sees to it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
with ddp.join():
    for _ in range(5 - rank):
        ddp(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {rank} ends with {ddp.module.weight.flatten()[0].item():.4f}")
dist.destroy_process_group()
