"""AdamW with decay for matrices only, and its learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from lockstep.parallel.strategy import optimizer_for
from lockstep.train.config import OptimConfig


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up to `lr`, then a half cosine down to `min_lr`.

    Source: Loshchilov and Hutter 2017, arXiv 1608.03983 (cosine).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress))


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters: matrices and embeddings decay, biases and norms do not.

    Collective: every rank that trains `model`.
    Source: Loshchilov and Hutter 2019, arXiv 1711.05101.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return optimizer_for(model, torch.optim.AdamW, groups, lr=config.lr, betas=betas)
