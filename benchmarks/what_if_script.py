"""A training script that is now so and now otherwise: turns of steps, every second one with a thing changed.

    lockstep run --nproc-per-node 2 benchmarks/what_if_script.py WAY CASE TURNS

WAY: `ddp` (torch's), `lockstep` (ours, buckets between processes over Gloo), `plain` (one all_reduce after the other),
`fsdp` (torch's fully_shard).
CASE: what is changed; in the first turn and in every second one after it, rank 1 sleeps longer in its forward (`late`)
or in each layer's backward (`slow`), the loopback device has half the rate (`network`), or the loader sleeps (`data`).
Work is sleep, so that neighbours on the machine change it little.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TURN, SETTLING = 16, 4  # steps of a turn; of them those that do not count
LAYERS, WIDTH, ROWS = 4, 256, 4
BUCKET_MIB = 0.2  # less than a layer
FORWARD_S, BACKWARD_S = 0.003, 0.006  # of each layer
MORE_S = {"late": 0.020, "slow": 0.006, "data": 0.020}
RATE_MBIT = 250  # slow; twice as much is fast, and still slower than the processors
SHAPE = "rate {}mbit burst 128k latency 5s"


class Turns:
    """Which way it is in the step that runs."""

    def __init__(self, case: str, rank: int) -> None:
        self.case, self.rank = case, rank
        self.steps = 0
        self.is_before = True

    def next_step(self) -> None:
        """A step begins."""
        self.is_before = self.steps // TURN % 2 == 0
        if self.case == "network" and self.steps % TURN == 0 and self.steps:
            dist.barrier()
            if self.rank == 0:
                rate = SHAPE.format(RATE_MBIT * (1 if self.is_before else 2))
                subprocess.run(["tc", "qdisc", "change", "dev", "lo", "root", "tbf", *rate.split()], check=True)
            dist.barrier()
        self.steps += 1

    def sleep(self, seconds: float, case: str) -> None:
        """So long, and more in the turns of `case`; "late" and "slow" are so on rank 1 alone."""
        is_longer = self.is_before and self.case == case and (self.rank == 1 or case == "data")
        time.sleep(seconds + (MORE_S[case] if is_longer else 0))


def slow_layer(turns: Turns) -> Callable[[Tensor], Tensor]:
    """The identity, which takes its time in both directions."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            turns.sleep(FORWARD_S, "none")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            turns.sleep(BACKWARD_S, "slow")
            return grads[0].clone()

    return cast("Callable[[Tensor], Tensor]", Slow.apply)


class Layer(nn.Module):
    """Some weights, and the time of larger ones."""

    def __init__(self, slow: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.slow = slow

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [ROWS, WIDTH] to the same."""
        return self.slow(self.linear(x))


def wrapped(way: str, layers: nn.Sequential) -> nn.Module:
    """For more than one rank."""
    if way == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(layers, bucket_cap_mb=BUCKET_MIB)
    if way == "lockstep":
        from lockstep import DistributedDataParallel as Ours

        return Ours(layers, bucket_cap_mb=BUCKET_MIB)
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in (*layers, layers):
            fully_shard(part)
    return layers


def main(way: str, case: str, count: int) -> None:
    """Train as one rank, for so many turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turns = Turns(case, dist.get_rank())
    model = wrapped(way, nn.Sequential(*(Layer(slow_layer(turns)) for _ in range(LAYERS))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def collate(rows: list[tuple[Tensor]]) -> Tensor:
        turns.next_step()
        turns.sleep(0, "data")
        return torch.stack([row for (row,) in rows])

    data = TensorDataset(torch.randn(ROWS * TURN * count, WIDTH))
    for x in DataLoader(data, batch_size=ROWS, collate_fn=collate):
        turns.sleep(0, "late")
        model(x).square().mean().backward()
        if way == "plain":
            for parameter in model.parameters():
                dist.all_reduce(cast("Tensor", parameter.grad))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
