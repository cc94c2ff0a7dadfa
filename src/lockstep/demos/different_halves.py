"""Rank 0 reduces bfloat16, rank 1 float16: both have two bytes."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(4, dtype=torch.bfloat16 if rank == 0 else torch.float16)
dist.all_reduce(tensor)
print(f"rank {rank} goes on with {tensor.tolist()}")
time.sleep(1)
