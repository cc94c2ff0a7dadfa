"""All ranks meet and count each other, with lockstep.init."""

import torch

import lockstep

with lockstep.init(start_timeout_s=4) as comm:
    count = comm.all_reduce(torch.ones(()))
    print(f"rank {comm.rank} of {comm.world_size}: {int(count)} ranks are here")
