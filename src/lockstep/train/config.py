"""What a run is: one frozen record, returned by a recipe, changed from the command line, saved beside the weights.

This module imports no torch, so that the command line can parse, explain and refuse without loading it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import ConfigError
from lockstep.observe.loggers import logger_names


@dataclass(frozen=True)
class ModelConfig:
    """The transformer, randomly initialised."""

    family: Literal["gpt2", "llama32"] = "gpt2"
    """Architecture."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 2
    """Attention heads; they divide the width."""
    kv_heads: int | None = None
    """Heads of keys and values, of which each serves as many others; they divide the heads. None: as many as these."""
    width: int = 64
    """Size of the residual stream."""
    mlp_width: int | None = None
    """Size within a block's MLP; None is 4 times the width."""
    context: int = 64
    """Tokens the model looks back on."""
    dropout: float = 0.0
    """Probability of dropping an activation while training."""


@dataclass(frozen=True)
class DataConfig:
    """The text."""

    path: Path | None = None
    """A text file or a directory of text files; None is the source of this Python's standard library."""
    tokens: Literal["bytes", "bpe"] = "bytes"
    """One token per byte, or a byte-pair encoding trained on the text once and cached."""
    vocab_size: int = 4096
    """Size of the byte-pair encoding's vocabulary; bytes have their own."""
    val_fraction: float = 0.02
    """Share of the text held out for validation."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 1000
    """Optimizer steps."""
    batch: int = 48
    """Sequences per step, over all ranks and microbatches."""
    microbatch: int | None = None
    """Sequences in one forward on one rank; None takes a rank's whole share of the batch."""
    sharding: Literal["none", "optimizer", "gradients", "full", "hybrid"] = "none"
    """What each rank keeps a part of: nothing; the optimizer's state; gradients and parameters too, whole from forward
    to backward; whole in forward and in backward only (full), or so among the ranks of a host (hybrid)."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 250
    """Steps between two validations; 0 validates at the end only."""
    sample_tokens: int = 200
    """Tokens of the text written by the model at the end; 0 writes none."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, with a learning rate that warms up and then follows a cosine."""

    lr: float = 3e-3
    """Peak learning rate."""
    min_lr: float = 3e-4
    """Learning rate of the last step."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decay of matrices; vectors (biases, norms) have none."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the gradient's running square."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept on disk."""

    every: int = 250
    """Steps between two checkpoints; 0 saves at the end only."""
    keep: int = 2
    """How many checkpoints stay on disk, the newest first."""
    background: bool = True
    """Write them while training goes on, from a copy in memory; the last one of a run is always waited for."""


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    out: Path = Path("runs/run")
    """Directory of this run: checkpoints, metrics, config. An older run found there is moved aside."""
    seed: int = 1337
    """Weights, order of the data and dropout follow from it."""
    log: str = ""
    """Where figures go beside metrics.jsonl: any of tensorboard, wandb and trackio, with commas between them."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


_AT_LEAST = {
    "seed": 0,
    "model.layers": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.width": 1,
    "model.mlp_width": 1,
    "model.context": 1,
    "data.vocab_size": 257,
    "train.steps": 1,
    "train.batch": 1,
    "train.microbatch": 1,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "optim.lr": 0,
    "optim.min_lr": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
}
_BELOW_ONE = ("model.dropout", "data.val_fraction", "optim.beta1", "optim.beta2")

_WITH_STEP = re.compile(r"(.+):(\d+)")
# A checkpoint of another model or of other tokens cannot be continued; everything else may change on the way.
_FIXED = ("seed", "model.", "data.tokens", "data.vocab_size", "data.val_fraction")


def check(config: RunConfig, world_size: int) -> None:
    """Refuse what cannot be trained on `world_size` ranks. Raises: ConfigError, naming the option to change."""
    values = dict(flatten(config))
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name} {value} is not a finite number")
        if name in _AT_LEAST and value is not None and value < _AT_LEAST[name]:
            raise ConfigError(f"--{name} {value} is too small: it must be at least {_AT_LEAST[name]}")
        if name in _BELOW_ONE and isinstance(value, float) and not 0 <= value < 1:
            raise ConfigError(f"--{name} {value} must be at least 0 and below 1")
    if config.data.val_fraction == 0:
        raise ConfigError("--data.val_fraction 0.0 leaves nothing to validate on: 0.02 is usual")
    _check_heads(config.model)
    if config.data.path is not None and not config.data.path.exists():
        raise ConfigError(f"--data.path {config.data.path} does not exist")
    logger_names(config.log)
    microbatches_per_rank(config.train, world_size)


def _check_heads(model: ModelConfig) -> None:
    kv_heads, size = model.kv_heads or model.heads, model.width // model.heads
    for name, parts, cut in (("heads", model.heads, "width"), ("kv_heads", kv_heads, "heads")):
        if getattr(model, cut) % parts:
            raise ConfigError(f"--model.{name} {parts} does not divide --model.{cut} {getattr(model, cut)}")
    if model.family == "gpt2" and kv_heads != model.heads:
        raise ConfigError(f"--model.kv_heads {kv_heads}: GPT-2 has as many as --model.heads {model.heads}")
    if model.family == "llama32" and size % 2:
        raise ConfigError(f"--model.heads {model.heads} gives each {size} of --model.width: Llama needs an even number")


def microbatches_per_rank(train: TrainConfig, world_size: int) -> int:
    """How many forwards each rank runs per step. Raises: ConfigError where the batch cannot be cut evenly."""
    share, rest = divmod(train.batch, world_size)
    if rest:
        near = max(world_size, round(train.batch / world_size) * world_size)
        raise ConfigError(
            f"--train.batch {train.batch} cannot be divided among {world_size} processes: try --train.batch {near}"
        )
    size = train.microbatch or share
    if share % size:
        fitting = max(n for n in range(1, size + 1) if share % n == 0)
        raise ConfigError(
            f"--train.microbatch {size} does not divide a rank's share of the batch, {train.batch} / {world_size} = "
            f"{share} sequences: try --train.microbatch {fitting}"
        )
    return share // size


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every option with its dotted name, in order."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def to_json(config: RunConfig) -> dict[str, Any]:
    """The options as one flat JSON object: dotted name -> value."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in flatten(config)}


def read_resume(resume: str) -> tuple[Path, int | None]:
    """The path and the step of "PATH" or "DIR:step".  Raises: ConfigError where there is no such path."""
    path, step = Path(resume), None
    if not path.exists() and (found := _WITH_STEP.fullmatch(resume)):
        path, step = Path(found[1]), int(found[2])
    if not path.exists():
        raise ConfigError(f"--resume {path} does not exist; `--resume auto` finds the newest checkpoint in --out")
    return path, step


def changes_on_resume(saved: dict[str, Any], config: RunConfig) -> list[str]:
    """What differs from the config in a checkpoint and may, as `name: old -> new`; without options it did not know.

    Raises: ConfigError for what may not: the model and the tokens.
    """
    current = to_json(config)
    names = [name for name in current if saved.get(name) != current[name] and name not in ("out", "data.path")]
    for name in names:
        if name.startswith(_FIXED):
            raise ConfigError(
                f"the checkpoint was made with --{name} {saved.get(name)}, this run has {current[name]}: "
                f"leave --{name} as it was, or start a new run without --resume"
            )
    return [f"{name}: {saved[name]} -> {current[name]}" for name in names if name in saved]
