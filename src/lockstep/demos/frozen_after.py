"""A layer is frozen on rank 1 after the model was wrapped."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
if rank == 1:
    model[0].weight.requires_grad_(False)
for _ in range(40):
    ddp(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
