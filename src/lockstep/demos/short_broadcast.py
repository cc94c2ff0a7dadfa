"""Rank 0 sends 10 elements, rank 1 expects 20."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(10) if rank == 0 else torch.zeros(20)
dist.broadcast(tensor, src=0)
print(f"rank {rank} goes on with {int(tensor.sum())} ones of {tensor.numel()}")
time.sleep(1)
