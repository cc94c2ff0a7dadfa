"""The result of an asynchronous all_reduce is used before it is there."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.ones(1_000_000)
work = dist.all_reduce(tensor, async_op=True)
tensor /= dist.get_world_size()
work.wait()
print(f"rank {rank} goes on with {sorted(set(tensor.tolist()))}")
time.sleep(1)
