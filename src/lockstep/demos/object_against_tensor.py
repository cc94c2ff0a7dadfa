"""Rank 0 gathers objects where rank 1 reduces a tensor."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    dist.all_gather_object([None] * dist.get_world_size(), {"rank": rank})
else:
    dist.all_reduce(torch.ones(4))
