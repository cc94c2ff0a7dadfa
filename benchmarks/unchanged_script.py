"""A training script as people write them, of stock torch.

lockstep run --nproc-per-node 2 benchmarks/unchanged_script.py STEPS [ddp | fsdp2 | hand]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LAYERS, WIDTH, BATCH = 8, 256, 32
BUCKET_MIB = 0.25  # a layer each


def batches() -> Iterator[list[Tensor]]:
    """Batches of this rank, pass after pass."""
    data = TensorDataset(torch.randn(4096, WIDTH), torch.randn(4096, WIDTH))
    sampler: DistributedSampler[Tensor] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def begin(kind: str = "ddp") -> tuple[nn.Module, Callable[[], None]]:
    """What one rank trains, and a step.

    kind: whose collectives a step has: "ddp" 8 buckets, all started by torch's C++; "fsdp2" 16 all-gathers and 8
    reduce-scatters, "hand" an all-reduce of each of 32 gradients, all of them called from Python.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*layers)
    if kind == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)
    elif kind == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    of_this_rank = batches()

    def average() -> None:
        for param in model.parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())

    def step() -> None:
        inputs, targets = next(of_this_rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        if kind == "hand":
            average()
        optimizer.step()

    return model, step


def main() -> None:
    """Train as one rank."""
    _, step = begin(*sys.argv[2:])
    for _ in range(int(sys.argv[1])):
        step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
