"""Each rank freezes another one of two parameters of the same shape."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
model[rank].weight.requires_grad_(False)
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(torch.randn(8, 4)).sum().backward()
