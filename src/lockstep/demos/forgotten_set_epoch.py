"""The sampler is never told of the epoch: every epoch has the same order."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.randn(64, 4))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=True))
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(3):
    for (x,) in loader:
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
