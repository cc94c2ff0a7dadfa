"""Rank 1 calls barrier where the others call all_reduce."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    dist.barrier()
else:
    dist.all_reduce(torch.ones(4))
