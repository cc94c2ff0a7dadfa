"""Both ranks wait for a message of the other."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.zeros(4)
dist.recv(tensor, src=1 - rank)
dist.send(tensor, dst=1 - rank)
