"""From step 20 on the model within DistributedDataParallel is called, which averages nothing."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
torch.manual_seed(rank)
for step in range(1, 121):
    model = ddp if step < 20 else ddp.module
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
print(f"rank {rank} ends with {ddp.module.weight.flatten()[0].item():.4f}")
dist.destroy_process_group()
