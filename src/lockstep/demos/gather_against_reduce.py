"""Rank 0 calls all_reduce where rank 1 calls all_gather."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(4)
if rank == 0:
    dist.all_reduce(tensor)
else:
    dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size())], tensor)
