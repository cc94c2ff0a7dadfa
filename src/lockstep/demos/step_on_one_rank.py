"""Only rank 0 takes an optimizer step, once."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(1, 301):
    ddp(torch.randn(8, 4)).square().sum().backward()
    if rank == 0 or step != 20:
        optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank} ends with {ddp.module.weight.flatten()[0].item():.4f}")
dist.destroy_process_group()
