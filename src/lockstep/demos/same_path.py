"""Every rank saves to the same path."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(20):
    ddp(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": ddp.module.state_dict(), "rank": rank}, "checkpoint.pt")
dist.barrier()
time.sleep(1)
dist.destroy_process_group()
