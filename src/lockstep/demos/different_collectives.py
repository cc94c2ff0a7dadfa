"""Rank 0 calls all_reduce where rank 1 calls broadcast."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(4)
if rank == 0:
    dist.all_reduce(tensor)
else:
    dist.broadcast(tensor, src=0)
