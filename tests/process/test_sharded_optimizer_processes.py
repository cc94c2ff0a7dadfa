"""On real processes: over torch's DistributedDataParallel and ours, and over DTensors, with torch's own tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.testing.worlds import run_processes
from optimizer_cases import same_tensors, weights

ADAMW = torch.optim.AdamW


def net() -> nn.Sequential:
    """The same on every rank; one row fewer than ranks, and rows that no number of ranks divides."""
    made = nn.Sequential(nn.Linear(17, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 300), nn.Linear(300, 3))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 10)
    return made


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(8, 17, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(inputs(step, dist.get_rank())).square().mean().backward()
        optimizer.step()


# ------------------------------------------------------------------ over whole parameters


def replicated(wrap: Callable[..., Any], sharded: bool, joined: bool = False) -> list[Tensor]:
    ddp = wrap(net())
    optimizer: torch.optim.Optimizer
    if joined:
        optimizer = ShardedOptimizer(ddp.parameters(), ADAMW, lr=0.01, ddp=ddp)
    elif sharded:
        optimizer = ShardedOptimizer(ddp.parameters(), ADAMW, lr=0.01)  # torch's default group
    else:
        optimizer = ADAMW(ddp.parameters(), lr=0.01, fused=True)
    train(ddp, optimizer, steps=6)
    return weights(ddp)


def over_ddp(comm: Communicator) -> dict[str, bool]:
    def ours(module: nn.Module) -> Any:
        return lockstep.DistributedDataParallel(module, bucket_cap_mb=0.01)

    of_torch, of_ours = replicated(TorchDdp, sharded=False), replicated(ours, sharded=False)
    return {
        "torch's": same_tensors(replicated(TorchDdp, sharded=True), of_torch),
        "ours": same_tensors(replicated(ours, sharded=True), of_ours),
        "joined": same_tensors(replicated(ours, sharded=True, joined=True), of_ours),
    }


@pytest.mark.parametrize(("world_size", "shm"), [(3, "on"), (2, "off")])
def test_over_ddp(world_size: int, shm: str) -> None:
    for found in run_processes(world_size, over_ddp, env={"LOCKSTEP_SHM": shm}):
        assert found == {"torch's": True, "ours": True, "joined": True}


# ------------------------------------------------------------------ over DTensors


def by_torch(model: nn.Sequential) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            torch_fully_shard(layer)
    return torch_fully_shard(model)


def by_lockstep(model: nn.Sequential) -> Any:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def make_sharded(model: nn.Module) -> torch.optim.Optimizer:
    return ShardedOptimizer(model.named_parameters(), ADAMW, lr=0.01)


def make_plain(model: nn.Module) -> torch.optim.Optimizer:
    return ADAMW(model.named_parameters(), lr=0.01)


def local(model: nn.Module) -> list[Tensor]:
    return [param.to_local().detach().clone() for param in model.parameters() if isinstance(param, DTensor)]


def layout(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each value its kind, and of a DTensor how it lies."""
    return {
        name: {
            key: (value.shape, value.stride(), value.placements, value.to_local().shape)
            if isinstance(value, DTensor)
            else type(value)
            for key, value in state.items()
        }
        for name, state in saved["state"].items()
    }


def over_shards(comm: Communicator, shard: Callable[[nn.Sequential], nn.Module]) -> dict[str, Any]:
    """ShardedOptimizer beside AdamW over DTensors: weights, state, and a state that changes sides half way."""
    left, right = shard(net()), shard(net())
    ours, torchs = make_sharded(left), make_plain(right)
    train(left, ours, 4)
    train(right, torchs, 4)
    saved, expected = get_optimizer_state_dict(left, ours), get_optimizer_state_dict(right, torchs)
    found = {
        "weights": close(local(left), local(right)),
        "layout": layout(saved) == layout(expected),
        "values": close(values(saved), values(expected)),
    }
    swapped_left, swapped_right = make_sharded(left), make_plain(right)
    set_optimizer_state_dict(left, swapped_left, expected)
    set_optimizer_state_dict(right, swapped_right, saved)
    train(left, swapped_left, 3, start=4)
    train(right, swapped_right, 3, start=4)
    found["after the swap"] = close(local(left), local(right))
    return found


def values(saved: dict[str, Any]) -> list[Tensor]:
    tensors = [value for state in saved["state"].values() for value in state.values()]
    return [value.to_local().clone() if isinstance(value, DTensor) else value.clone() for value in tensors]


def close(left: list[Tensor], right: list[Tensor]) -> bool:
    """To rounding: torch steps DTensors by its unfused implementation."""
    return len(left) == len(right) and all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(("world_size", "shard"), [(2, by_torch), (4, by_lockstep)])
def test_over_dtensors(world_size: int, shard: Callable[[nn.Sequential], nn.Module]) -> None:
    for found in run_processes(world_size, over_shards, shard):
        assert found == dict.fromkeys(["weights", "layout", "values", "after the swap"], True)


def whole_state(comm: Communicator) -> dict[str, bool]:
    """A whole state_dict of one process is cut as the DTensors are."""
    model, single = by_lockstep(net()), net()
    alone = make_plain(single)
    for step in range(3):
        alone.zero_grad()
        torch.stack([single(inputs(step, rank)).square().mean() for rank in range(comm.world_size)]).mean().backward()
        alone.step()
    with torch.no_grad():
        for param, whole in zip(model.parameters(), single.parameters(), strict=True):
            assert isinstance(param, DTensor)
            piece = whole.chunk(comm.world_size)
            param.to_local().copy_(piece[comm.rank] if comm.rank < len(piece) else whole[:0])
    optimizer = make_sharded(model)
    optimizer.load_state_dict(alone.state_dict())
    train(model, optimizer, 2, start=3)
    for step in range(3, 5):
        alone.zero_grad()
        torch.stack([single(inputs(step, rank)).square().mean() for rank in range(comm.world_size)]).mean().backward()
        alone.step()
    pieces = [list(p.detach().chunk(comm.world_size)) for p in single.parameters()]
    mine = [piece[comm.rank] if comm.rank < len(piece) else piece[0][:0] for piece in pieces]
    return {"weights": close(local(model), mine), "state": len(optimizer.state) == len(list(model.parameters()))}


def test_whole_state_over_dtensors() -> None:
    for found in run_processes(4, whole_state):
        assert found == {"weights": True, "state": True}
