"""A small model under FullyShardedDataParallel, for ranks that are threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.parallel.dtensors import local_tensor
from lockstep.parallel.fsdp import FullyShardedDataParallel
from lockstep.parallel.torch_fsdp import ModuleWrapPolicy


class Block(nn.Module):
    """With a buffer, and a row less than two ranks could share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 4, bias=False)
        self.register_buffer("scale", torch.tensor([0.5]))
        self.width = 7

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


def build(seed: int = 0) -> nn.Sequential:
    """Values that depend on the seed and not on the generator that threads share."""
    model = nn.Sequential(nn.Linear(3, 4), Block(), Block(), nn.Linear(4, 1))
    for number, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * seed + number)
        param.data = torch.randn(param.shape, generator=generator) / 2
    return model


def wrapped(comm: Communicator, seed: int = 0, **kwargs: Any) -> FullyShardedDataParallel:
    """The blocks are units."""
    return FullyShardedDataParallel(build(seed), comm, **{"auto_wrap_policy": ModuleWrapPolicy({Block}), **kwargs})


def batch(step: int, rank: int) -> Tensor:
    """Inputs that differ between ranks and steps."""
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2, first: int = 0) -> None:
    """The usual loop."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step, rank)).pow(2).mean().backward()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With momenta, a step that counts, and parameters in another order than the model's."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices[::-1], "lr": 0.03}]
    return torch.optim.AdamW(groups, lr=0.05)


def copied(state: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's pieces."""
    return {name: local_tensor(value).detach().clone() for name, value in state.items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """The same keys in the same order, and the same bits."""
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)
