"""What the loop works with: everything as it is before the first step."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.comm.communicator import Communicator
from lockstep.comm.pulse import Pulse, open_pulse
from lockstep.data.loader import TokenLoader
from lockstep.data.tokens import TokenizedText, prepare_tokens
from lockstep.errors import ConfigError, DataError
from lockstep.observe.process_guard import guard_of
from lockstep.observe.profile.session import Profile, open_profile
from lockstep.observe.replica import ReplicaCheck
from lockstep.parallel.materialize import materialize
from lockstep.parallel.strategy import parallelize
from lockstep.train.checkpoints import load, state_of
from lockstep.train.config import RunConfig, to_json
from lockstep.train.console import Console
from lockstep.train.metrics import Logs, flops_per_token
from lockstep.train.model import build_model
from lockstep.train.optim import build_optimizer
from lockstep.train.run_dir import Launch, Start, checkpoints_of, find_start, goes_on, make_ready, news_of, token_cache


@dataclass(frozen=True)
class Begin:
    """Where the loop begins."""

    step: int = 0  # optimizer steps done before
    tokens: int = 0  # trained on before, over all ranks
    saved: Path | None = None  # the checkpoint of that step, where it is one of this run
    news: tuple[str, ...] = ()  # what the user should know about it


@dataclass(frozen=True)
class Job:
    """What the loop works with on one rank."""

    run: RunConfig
    comm: Communicator
    console: Console
    text: TokenizedText
    loader: TokenLoader
    model: nn.Module
    optimizer: torch.optim.Optimizer
    replica: nn.Module  # the model, with its gradients averaged over ranks
    equality: ReplicaCheck  # of the replicas, from time to time
    checkpointer: Checkpointer
    logs: Logs | None  # on rank 0
    pulse: Pulse
    profile: Profile  # where the time of each step goes
    begin: Begin


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int  # optimizer steps done
    val_loss: float | None  # None where the run was stopped
    digest: str  # of the weights, equal on all ranks
    checkpoint: Path  # that holds them
    was_stopped: bool


def prepare(run: RunConfig, comm: Communicator, console: Console, resume: str, launch: Launch) -> Job:
    """Everything as it is before the first step. Only once all of it fits, the run directory is touched.

    Collective: every rank of `comm`; blocks.
    """
    data, cache = run.data, token_cache()
    text = prepare_tokens(
        data.path, kind=data.tokens, vocab_size=data.vocab_size, held_out=data.val_fraction, cache=cache, comm=comm
    )
    loader = TokenLoader(
        text.train,
        context=run.model.context,
        batch=run.train.batch,
        microbatch=run.train.microbatch,
        rank=comm.rank,
        world_size=comm.world_size,
        seed=run.seed,
        order="keyed",
        digest=text.digest,
    )
    check_enough(run, loader, text)
    start = find_start(run, comm, resume, launch)
    check_same_text(start, text)
    model = build_model(run.model, text.tokenizer)
    fill = partial(materialize, seed=run.seed, device=comm.device)
    replica = parallelize(model, run.train.sharding, mesh=comm, fill=fill)
    optimizer = build_optimizer(replica, run.optim)
    checkpointer = Checkpointer(checkpoints_of(run), comm, keep=run.checkpoint.keep)
    begin = Begin(news=start.news)
    if start.origin is not None:
        loaded = load(comm, start.origin, checkpointer, state_of(replica, optimizer, loader))
        is_own = goes_on(run, start) and loaded.path.parent == checkpointer.directory
        saved = loaded.path if is_own else None
        begin = Begin(loaded.step, loaded.state["tokens"], saved, (*news_of(loaded), *start.news))
    comm.barrier()  # nobody looks at the directory any more
    moved = make_ready(run, comm, start, launch, text.tokenizer.to_json())
    if moved:
        begin = replace(begin, news=(*begin.news, f"an older run is now in {moved}"))
    logs = Logs.open(run, begin.step) if comm.rank == 0 else None
    equality = ReplicaCheck(comm, replica, optimizer)
    profile = open_profile(
        run.out / "profile",
        guard_of(comm.rank, comm.world_size),
        rank=comm.rank,
        world_size=comm.world_size,
        device=str(comm.device),
        flops_per_token=flops_per_token(model, run.model),
        config=to_json(run),
        data=text.digest,
        begins_after=begin.step,
    )
    return Job(
        run=run,
        comm=comm,
        console=console,
        text=text,
        loader=loader,
        model=model,
        optimizer=optimizer,
        replica=replica,
        equality=equality,
        checkpointer=checkpointer,
        logs=logs,
        pulse=open_pulse(os.environ),
        profile=profile,
        begin=begin,
    )


def check_enough(run: RunConfig, loader: TokenLoader, text: TokenizedText) -> None:
    """Raises: DataError where the text does not fill one step, or what is held out of it one window."""
    windows, context = len(loader.windows), run.model.context
    if windows < run.train.batch:
        raise DataError(
            f"{text.source} is too short: {len(text.train)} tokens are {windows} sequences of {context}, and one step "
            f"trains on {run.train.batch}: use more text, or a smaller --train.batch or --model.context"
        )
    if len(text.held_out) <= context:
        raise DataError(
            f"{text.source} is too short to validate on: {len(text.held_out)} tokens are held out, one sequence needs "
            f"{context + 1}: use more text, or a larger --data.val_fraction"
        )


def check_same_text(start: Start, text: TokenizedText) -> None:
    """Raises: ConfigError where the checkpoint was trained on other text."""
    before = start.values["data"]["digest"] if start.origin else text.digest
    if start.origin and before != text.digest:
        raise ConfigError(
            f"the checkpoint in {start.origin.directory} was trained on other text (sha256 {before[:12]}) than "
            f"{text.source} is ({text.digest[:12]}): give the same --data.path, or start a new run without --resume"
        )
