"""torch's FullyShardedDataParallel and ours under one name, for cases that run on both; see ddp_sides."""

from __future__ import annotations

from typing import Any

import torch
from ddp_sides import SGD, Side, scalar, seeded
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lockstep.parallel.fsdp import FullyShardedDataParallel


class Block(nn.Module):
    """Uneven sizes: 7 rows for two ranks, 22 for three."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), Block(), Block(), nn.Linear(7, 3))


BLOCKS = ModuleWrapPolicy({Block})


def fsdp_class(side: Side) -> Any:
    """The class of this side: both have the same static methods."""
    return FullyShardedDataParallel if side.is_ours else TorchFsdp


def wrap(side: Side, module: nn.Module, **kwargs: Any) -> Any:
    """The wrapped module. torch's needs to be told that it is the CPU it runs on."""
    return fsdp_class(side)(module, **{"device_id": torch.device("cpu"), "use_orig_params": True, **kwargs})


def whole(side: Side, model: nn.Module) -> dict[str, Tensor]:
    """The full state dict, copied."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def whole_gradients(side: Side, model: nn.Module) -> dict[str, Tensor | None]:
    """Each parameter's whole gradient, copied."""
    with fsdp_class(side).summon_full_params(model, with_grads=True):
        named = [(name.replace("_fsdp_wrapped_module.", ""), p.grad) for name, p in model.named_parameters()]
        return {name: None if grad is None else grad.detach().clone() for name, grad in named}


def train(side: Side, model: Any, steps: int = 3, clip: float | None = None, width: int = 5) -> dict[str, Any]:
    """The usual loop; the end state, the losses and the norms."""
    optimizer = SGD([param for param in model.parameters() if param.requires_grad])
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = scalar(model(side.batch(step, 6, width)))
        loss.backward()
        losses.append(loss.detach())
        norms += [] if clip is None else [model.clip_grad_norm_(clip)]
        optimizer.step()
    return {"losses": losses, "norms": norms, "state": whole(side, model)}


def wrapped_net(side: Side, **kwargs: Any) -> Any:
    """The same model on every rank and side."""
    return wrap(side, seeded(net), **{"auto_wrap_policy": BLOCKS, **kwargs})
