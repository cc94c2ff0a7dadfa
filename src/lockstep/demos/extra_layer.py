"""The model of rank 1 has one layer more."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2 + rank)))
torch.nn.parallel.DistributedDataParallel(model)
