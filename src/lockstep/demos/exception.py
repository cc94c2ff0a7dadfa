"""Rank 1 raises."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1000):
    if rank == 1 and step == 500:
        raise ValueError("label 7 is not one of 0 to 4")
    dist.all_reduce(torch.ones(4))
