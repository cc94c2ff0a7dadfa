"""Rank 0 reduces float32, rank 1 float64."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4, dtype=torch.float32 if rank == 0 else torch.float64))
