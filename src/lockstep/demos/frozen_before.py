"""A layer is frozen on rank 1 before the model is wrapped."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
if rank == 1:
    model[0].weight.requires_grad_(False)
torch.nn.parallel.DistributedDataParallel(model)
