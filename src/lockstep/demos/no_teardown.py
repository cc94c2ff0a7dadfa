"""Nobody calls destroy_process_group."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(5):
    ddp(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
