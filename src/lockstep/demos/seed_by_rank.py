"""Each rank shuffles the whole dataset with a seed of its own: no sampler shares it out."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
torch.manual_seed(rank)
loader = DataLoader(data, batch_size=8, shuffle=True)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(2):
    for (x,) in loader:
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
