"""The gradient scaler on real processes, over torch's fully_shard and ours, with torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.parallel.clip import clip_grad_norm_
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.grad_scaler import GradScaler
from lockstep.testing.worlds import run_processes

Shard = Callable[..., Any]
SHARDERS: dict[str, Shard] = {"torch": torch_fully_shard, "ours": fully_shard}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, whole: list[Parameter], scaler: Any, clip: Any, fused: bool) -> list[Any]:
    """Six steps; in the third one element of the last gradient, which is on one rank only, is not finite."""
    params = [*model.parameters(), *whole]
    groups = [{"params": list(model.parameters())}, {"params": whole}]  # torch does not mix DTensors and others in one
    optimizer = torch.optim.AdamW(groups, lr=0.05, fused=fused)
    told = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean() + sum(param.square().sum() for param in whole)
        scaler.scale(loss).backward()
        grad: Any = params[3].grad
        last = grad.to_local() if isinstance(grad, DTensor) else grad
        mine = not isinstance(grad, DTensor) or grad.device_mesh.get_local_rank() == 0
        if step == 2 and mine:
            last[0] = math.nan
        norm = 0.0
        if not fused:
            scaler.unscale_(optimizer)
            norm = clip(params, 0.5).item()
        scaler.step(optimizer)
        scaler.update()
        told.append((scaler.get_scale(), norm))
    values: list[Any] = [param.detach() for param in params]
    return [told, [value.full_tensor() if isinstance(value, DTensor) else value for value in values]]


def train_sharded(comm: Communicator, sharder: str, fused: bool) -> list[Any]:
    model = build()
    SHARDERS[sharder](model[0])
    SHARDERS[sharder](model)
    scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    return train(model, [Parameter(torch.full((2,), 0.25))], scaler, clip_grad_norm_, fused)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharder", SHARDERS)
def test_training_is_that_of_one_process(sharder: str, fused: bool, world_size: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    whole = [Parameter(torch.full((2,), 0.25))]
    expected: list[Tensor]
    told, expected = train(build(), whole, scaler, torch.nn.utils.clip_grad_norm_, fused)
    assert [scale / 2.0**12 for scale, _ in told] == [1, 2, 1, 1, 2, 2], "grows, is halved, grows again"
    for found, values in run_processes(world_size, train_sharded, sharder, fused):
        assert [scale for scale, _ in found] == [scale for scale, _ in told]
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in told], rel=1e-5, nan_ok=True)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
