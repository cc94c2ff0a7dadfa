"""Rank 1 raises, but a thread of its keeps the process alive."""

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    threading.Thread(target=time.sleep, args=(1000,)).start()
for step in range(1000):
    if rank == 1 and step == 500:
        raise ValueError("label 7 is not one of 0 to 4")
    dist.all_reduce(torch.ones(4))
