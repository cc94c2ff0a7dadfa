"""The loss of rank 1 becomes NaN in step 3."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(1, 11):
    x = torch.randn(8, 4)
    if rank == 1 and step == 3:
        x[0, 0] = float("nan")
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank} ends with {ddp.module.weight.flatten()[0].item()}")
dist.destroy_process_group()
