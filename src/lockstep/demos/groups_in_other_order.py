"""Two groups of the same ranks, used in opposite order."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
for group in (first, second) if rank == 0 else (second, first):
    dist.all_reduce(torch.ones(4), group=group)
