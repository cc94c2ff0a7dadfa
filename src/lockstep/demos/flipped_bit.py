"""One bit of a weight flips on rank 1."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(1, 301):
    ddp(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1 and step == 50:
        model[1].weight.data.view(torch.int32)[0, 0] ^= 1 << 20
print(f"rank {rank} ends with {model[1].weight.flatten()[0].item():.4f}")
dist.destroy_process_group()
