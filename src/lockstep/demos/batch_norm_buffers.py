"""The running averages of BatchNorm are not broadcast, so each rank evaluates another model."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
torch.manual_seed(rank)
for _ in range(120):
    ddp(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
print(f"rank {rank} ends with {model[1].running_mean[0].item():.4f}")
dist.destroy_process_group()
