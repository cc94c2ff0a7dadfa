"""Rank 0 gathers 4 elements of each rank, rank 1 gathers 6."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(4 if rank == 0 else 6)
dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor)
