"""Every rank broadcasts from itself."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.broadcast(torch.ones(4), src=rank)
