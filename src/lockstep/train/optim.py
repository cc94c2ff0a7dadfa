"""AdamW with decay for matrices only, its learning rate as a function of the step, and its state by parameter name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.train.config import OptimConfig


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up to `lr`, then a half cosine down to `min_lr`.

    Source: Loshchilov and Hutter 2017, arXiv 1608.03983 (cosine).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress))


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: matrices and embeddings decay, biases and norms do not.

    Source: Loshchilov and Hutter 2019, arXiv 1711.05101.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Parameter name -> what the optimizer keeps for it. Memory: no copy."""
    return {fqn: dict(optimizer.state[p]) for fqn, p in model.named_parameters() if p in optimizer.state}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]) -> None:
    """Put back what `optimizer_state` returned. Raises: CheckpointError for a name this model does not have."""
    by_name = dict(model.named_parameters())
    unknown = sorted(set(state) - set(by_name))
    if unknown:
        raise CheckpointError(f"the checkpoint has optimizer state for {unknown[0]!r}, which this model does not have")
    in_order = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(in_order)}
    numbered = {index[id(by_name[fqn])]: entry for fqn, entry in state.items()}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
