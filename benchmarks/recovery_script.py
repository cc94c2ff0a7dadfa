"""A training script as people write them: plain torch, started by any launcher that keeps torchrun's contract.

    torchrun --nproc-per-node 2 benchmarks/recovery_script.py FOLDER

It trains until FOLDER/stop exists, keeps a checkpoint every few steps, and goes on from it when it is started again.
Every finished step is one line in FOLDER/steps-RANK: process id, step, and the clock that all processes share.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT_EVERY = 5
WIDTH = 64


def main(folder: Path) -> None:
    """Train as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    newest, step = folder / "newest.pt", 0
    if newest.exists():
        saved = torch.load(newest, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    with (folder / f"steps-{dist.get_rank()}").open("a", buffering=1) as steps:
        stop = torch.zeros(1)
        while not stop.item():
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % CHECKPOINT_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "newest.tmp")
                os.replace(folder / "newest.tmp", newest)
            stop[0] = float((folder / "stop").exists())
            dist.all_reduce(stop)
            steps.write(f"{os.getpid()} {step} {time.monotonic()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
