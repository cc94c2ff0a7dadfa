"""11 samples on 2 ranks: DistributedSampler gives one of them twice."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.randn(11, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
