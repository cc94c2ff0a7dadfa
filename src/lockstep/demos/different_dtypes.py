"""Rank 0 reduces floats, rank 1 integers of the same size."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(4, dtype=torch.float32 if rank == 0 else torch.int32)
dist.all_reduce(tensor)
print(f"rank {rank} goes on with {tensor.tolist()}")
time.sleep(1)
