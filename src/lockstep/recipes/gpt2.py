"""GPT-2 in the sizes people train: each function returns one whole run."""

from __future__ import annotations

from pathlib import Path

from lockstep.train.config import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig


def tiny() -> RunConfig:
    """A 0.1 M parameter GPT-2 on bytes: about a minute on two CPU cores, no download."""
    return RunConfig(
        out=Path("runs/gpt2-tiny"),
        model=ModelConfig(layers=2, heads=2, width=64, context=64),
        data=DataConfig(tokens="bytes", val_fraction=0.01),
        train=TrainConfig(steps=1000, batch=48, log_every=20, eval_every=250, sample_tokens=300),
        optim=OptimConfig(lr=5e-3, min_lr=5e-4, warmup_steps=50),
        checkpoint=CheckpointConfig(every=250, keep=2),
    )


def gpt2_124m() -> RunConfig:
    """GPT-2 small with nanoGPT's settings: 480 sequences of 1024 tokens per step, in microbatches of 12."""
    return RunConfig(
        out=Path("runs/gpt2-124m"),
        model=ModelConfig(layers=12, heads=12, width=768, context=1024),
        data=DataConfig(tokens="bpe", vocab_size=32768, val_fraction=0.01),
        train=TrainConfig(steps=20_000, batch=480, microbatch=12, log_every=10, eval_every=1000, sample_tokens=200),
        optim=OptimConfig(lr=6e-4, min_lr=6e-5, warmup_steps=700),
        checkpoint=CheckpointConfig(every=1000, keep=3),
    )
