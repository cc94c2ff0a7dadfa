"""Rank 0 makes a group, which every rank must do."""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    dist.new_group([0, 1])
else:
    time.sleep(1000)
