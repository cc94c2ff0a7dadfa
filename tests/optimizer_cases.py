"""A model whose parameters are as uneven as they come, gradients for it, and training on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.parallel.sharded_optimizer import ShardedOptimizer

WORLDS = (1, 2, 3, 4)


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, none, one; two dtypes; strides; frozen, unused, now and then used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def values(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.matrix = nn.Parameter(values(7, 5))
        self.sometimes = nn.Parameter(values(3))
        self.turned = nn.Parameter(values(6, 4).t())
        self.scalar = nn.Parameter(values())
        self.doubles = nn.Parameter(values(33).double())
        self.nothing = nn.Parameter(values(0, 3))
        self.frozen = nn.Parameter(values(5), requires_grad=False)
        self.unused = nn.Parameter(values(9))
        self.large = nn.Parameter(values(70, 101))


def give_gradients(model: nn.Module, step: int) -> None:
    """The gradients of one step, the same on every rank: what an average leaves."""
    for index, (name, param) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        skipped = name in ("frozen", "unused") or (name == "sometimes" and step % 2 == 1)
        values = torch.randn(param.shape, generator=generator)
        param.grad = None if skipped else torch.empty_like(param).copy_(values)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with different options, whose parameters alternate in memory."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "lr": 0.02},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20, start: int = 0) -> list[Tensor]:
    """The usual loop with a schedule; the weights at its end."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(start, start + steps):
        give_gradients(model, step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [param.detach().clone() for param in model.parameters()]


def on_one(cls: Callable[..., Any], **kwargs: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights and state after training on one process by the class itself."""
    model = Uneven()
    optimizer = cls(groups(model), **kwargs)
    return train(model, optimizer), optimizer.state_dict()


def on_rank(comm: Communicator, cls: Callable[..., Any], **kwargs: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """The same by ShardedOptimizer. Collective."""
    model = Uneven()
    optimizer = ShardedOptimizer(groups(model), cls, process_group=comm, **kwargs)
    return train(model, optimizer), optimizer.state_dict()


def same_tensors(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def state_difference(left: dict[str, Any], right: dict[str, Any]) -> str | None:
    """What differs first between two state_dicts, bit for bit; None where nothing does."""
    if list(left["state"]) != list(right["state"]):
        return f"state of {list(left['state'])} against {list(right['state'])}"
    if left["param_groups"] != right["param_groups"]:
        return f"{left['param_groups']} against {right['param_groups']}"
    for number, state in left["state"].items():
        if list(state) != list(right["state"][number]):
            return f"{number}: {list(state)} against {list(right['state'][number])}"
        for key, value in state.items():
            other = right["state"][number][key]
            if isinstance(value, Tensor):
                if (value.shape, value.dtype) != (other.shape, other.dtype) or not torch.equal(value, other):
                    return f"{number}.{key}: {value} against {other}"
            elif value != other:
                return f"{number}.{key}: {value} against {other}"
    return None
