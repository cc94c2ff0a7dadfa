"""All ranks meet and count each other, with stock torch."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
count = torch.ones(())
dist.all_reduce(count)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {int(count)} ranks are here")
dist.destroy_process_group()
