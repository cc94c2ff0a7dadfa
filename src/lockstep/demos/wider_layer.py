"""The hidden layer of rank 1 is wider."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
hidden = 8 if rank == 0 else 16
model = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 2))
torch.nn.parallel.DistributedDataParallel(model)
