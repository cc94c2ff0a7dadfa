"""Rank 1 overwrites a tensor that is being reduced."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(1_000_000)
work = dist.all_reduce(tensor, async_op=True)
if rank == 1:
    tensor.fill_(5)
work.wait()
print(f"rank {rank} goes on with {sorted(set(tensor.tolist()))}")
time.sleep(1)
