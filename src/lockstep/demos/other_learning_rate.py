"""Rank 1 trains with another learning rate."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 if rank == 0 else 0.01)
for _ in range(120):
    ddp(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
print(f"rank {rank} ends with {ddp.module.weight.flatten()[0].item():.4f}")
dist.destroy_process_group()
