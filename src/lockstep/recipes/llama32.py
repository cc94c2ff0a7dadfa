"""Llama 3.2, from random weights: each function returns one whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.recipes import gpt2
from lockstep.train.config import ModelConfig, OptimConfig, RunConfig


def tiny() -> RunConfig:
    """A 0.1 M parameter Llama on bytes, trained as the tiny GPT-2."""
    model = ModelConfig("llama32", layers=2, heads=4, kv_heads=2, width=64, mlp_width=192, context=64)
    return replace(gpt2.tiny(), out=Path("runs/llama32-tiny"), model=model)


def llama32_1b() -> RunConfig:
    """The shape of Llama 3.2 1B, parameters cut over the ranks: 0.5 M tokens per step, a sequence at a time."""
    run = gpt2.gpt2_124m()
    return replace(
        run,
        out=Path("runs/llama32-1b"),
        model=ModelConfig("llama32", layers=16, heads=32, kv_heads=8, width=2048, mlp_width=8192, context=8192),
        data=replace(run.data, vocab_size=128_256),
        train=replace(run.train, steps=100_000, batch=64, microbatch=1, sharding="full"),
        optim=OptimConfig(lr=4e-4, min_lr=4e-5, warmup_steps=2000),
    )
