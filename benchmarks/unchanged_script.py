"""A training script as people write them, of stock torch, but that it does each step when it is told to.

    torchrun --nproc-per-node 2 benchmarks/unchanged_script.py FOLDER

Every rank reads a byte from the pipe FOLDER/go-RANK, does a step, and writes to FOLDER/done-RANK what it took: seconds
on the clock, and of its main thread's processor. It ends with the pipe.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LAYERS, WIDTH, BATCH = 8, 256, 32
BUCKET_MIB = 0.25  # a layer each
FIGURES = struct.Struct("dd")


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


def main(folder: Path) -> None:
    """Train as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.AdamW(model.parameters())
    of_this_rank = batches()
    with (folder / f"go-{rank}").open("rb", 0) as go, (folder / f"done-{rank}").open("wb", 0) as done:
        while go.read(1):
            start, start_cpu = time.perf_counter(), time.thread_time()
            inputs, targets = next(of_this_rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            done.write(FIGURES.pack(time.perf_counter() - start, time.thread_time() - start_cpu))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]))
