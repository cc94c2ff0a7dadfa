"""The training loop, readable from top to bottom.

Everything that decides a number is a function of the step: which windows of text, which learning rate, which dropout.
So a run goes on from its step alone, and the global batch of a step is the same for every number of ranks.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from lockstep.comm.communicator import Communicator
from lockstep.data.loader import TokenLoader, validation_batches
from lockstep.data.tokens import TokenizedText, prepare_tokens
from lockstep.errors import ConfigError, DataError
from lockstep.parallel.materialize import materialize
from lockstep.parallel.named_state import is_cut
from lockstep.parallel.strategy import parallelize
from lockstep.train.checkpoints import restore, save
from lockstep.train.config import RunConfig, microbatches_per_rank, to_json
from lockstep.train.console import Console, open_console
from lockstep.train.evaluate import evaluate, prove_equal, sample
from lockstep.train.metrics import Meter, MetricsFile, StepMetrics
from lockstep.train.model import build_model
from lockstep.train.optim import build_optimizer, learning_rate
from lockstep.train.run_dir import Start, checkpoints_of, find_start, make_ready
from lockstep.train.step import accumulate_gradient, agree, clip_gradient


class Stop(Protocol):
    """Who may ask the loop to stop between two steps."""

    def arm(self) -> None:
        """The loop looks at `is_set` from now on."""
        ...

    def is_set(self) -> bool:
        """True once somebody has asked."""
        ...


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int  # optimizer steps done
    val_loss: float | None  # None where the run was stopped
    digest: str  # of the weights, equal on all ranks
    checkpoint: Path  # that holds them
    was_stopped: bool


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
    metrics: MetricsFile | None  # on rank 0
    start: Start
    moved: str  # where an older run was moved to


def train(run: RunConfig, comm: Communicator, stop: Stop, resume: str = "") -> TrainResult:
    """Train `run` on the ranks of `comm`, from the beginning or from the checkpoint that `resume` names.

    resume: "auto" takes the newest one of the run directory, if there is one; else a path.
    Collective: every rank of `comm`, with equal arguments; blocks until the run has ended or any rank's `stop` is set.
    Raises: ConfigError, DataError, CheckpointError before the first step; NonFiniteLoss, ReplicaError, CommError.
    """
    console = open_console(comm.rank, run.train.steps)
    try:
        return run_steps(prepare(run, comm, console, resume), stop)
    finally:
        console.close()


def prepare(run: RunConfig, comm: Communicator, console: Console, resume: str) -> Job:
    """Everything as it is before the first step. Only once all of it fits, the run directory is touched.

    Collective: every rank of `comm`; blocks.
    """
    text = prepare_tokens(
        run.data.path,
        kind=run.data.tokens,
        vocab_size=run.data.vocab_size,
        held_out=run.data.val_fraction,
        comm=comm,
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
    start = find_start(run, comm, resume)
    model = build_model(run.model, text.tokenizer)
    fill = partial(materialize, seed=run.seed, device=comm.device)
    replica = parallelize(model, run.train.sharding, mesh=comm, fill=fill)
    optimizer = build_optimizer(replica, run.optim)
    if start.found:
        check_same_text(start, text)
        restore(comm, Path(start.found), model, optimizer)
        loader.load_state_dict(start.values["data"])
    moved = make_ready(run, comm, start)
    metrics = MetricsFile(run.out / "metrics.jsonl", start.step) if comm.rank == 0 else None
    return Job(run, comm, console, text, loader, model, optimizer, replica, metrics, start, moved)


def run_steps(job: Job, stop: Stop) -> TrainResult:
    """The loop."""
    run, comm, start, metrics = job.run, job.comm, job.start, job.metrics
    introduce(job)
    step, tokens_done, was_stopped = start.step, start.tokens, False
    meter = Meter(step, run.train.steps)
    gc.freeze()  # collections need not walk what torch and the model brought along, in the loop or at exit
    stop.arm()
    while step < run.train.steps:
        microbatches = job.loader.step_at(job.loader.consumed)
        tokens, was_stopped = agree(comm, microbatches, stop.is_set())
        if was_stopped:
            break

        lr = learning_rate(step, run.train.steps, run.optim)
        for group in job.optimizer.param_groups:
            group["lr"] = lr
        loss = accumulate_gradient(job.replica, microbatches, tokens, run.seed, step, comm)
        grad_norm = clip_gradient(job.replica, run.optim.clip_norm, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.loader.consumed += run.train.batch
        step, tokens_done = step + 1, tokens_done + tokens

        meter.count(tokens)
        if metrics and (step % run.train.log_every == 0 or step in (start.step + 1, run.train.steps)):
            record = StepMetrics(step, loss, lr, grad_norm, tokens_done, *meter.read(step))
            metrics.write(record)
            job.console.step(record)
        with meter.pause():
            if is_due(step, run.train.eval_every, run.train.steps):
                validate(job, step)
            if is_due(step, run.checkpoint.every, run.train.steps):
                save_checkpoint(job, step, tokens_done)

    checkpoint = save_checkpoint(job, step, tokens_done)
    val_loss = None if was_stopped else validate(job, step)
    result = TrainResult(step, val_loss, prove_equal(job.model, comm), checkpoint, was_stopped)
    written = "" if was_stopped else write_sample(job)
    if metrics:
        metrics.close()
        conclude(job, result, written)
    return result


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
    before = start.values["data"]["digest"]
    if before != text.digest:
        raise ConfigError(
            f"checkpoint {start.found} was trained on other text (sha256 {before[:12]}) than {text.source} is "
            f"({text.digest[:12]}): give the same --data.path, or start a new run without --resume"
        )


def is_due(step: int, every: int, steps: int) -> bool:
    """True after every `every` steps, except the last, which has an end of its own."""
    return every > 0 and step % every == 0 and step != steps


def save_checkpoint(job: Job, step: int, tokens_done: int) -> Path:
    """Put everything that `step` has come to on disk. Collective: every rank; blocks."""
    values = {
        "step": step,
        "tokens": tokens_done,
        "world_size": job.comm.world_size,
        "config": to_json(job.run),
        "data": job.loader.state_dict(),
    }
    keep = job.run.checkpoint.keep
    return save(job.comm, checkpoints_of(job.run), step, job.model, job.optimizer, values, keep)


def validate(job: Job, step: int) -> float:
    """Loss on the held-out text, said and written down. Collective: every rank; blocks."""
    batches = validation_batches(
        job.text.held_out,
        context=job.run.model.context,
        microbatch=job.loader.microbatch,
        rank=job.comm.rank,
        world_size=job.comm.world_size,
    )
    val_loss = evaluate(job.model, batches, job.comm)
    job.console.say(f"validation after step {step}: loss {val_loss:.4f}")
    if job.metrics:
        job.metrics.write({"step": step, "val_loss": val_loss})
    return val_loss


def write_sample(job: Job) -> str:
    """What the model writes after a line's end. Collective: every rank, as the model's parameters may be cut."""
    run, tokenizer = job.run, job.text.tokenizer
    if not run.train.sample_tokens:
        return ""
    prompt = tokenizer.encode([b"\n"])[0].tolist()  # in the middle of a document, at the beginning of a line
    tokens = sample(job.model, prompt, run.train.sample_tokens, run.model.context, job.comm.device, run.seed)
    return tokenizer.decode(tokens)


def introduce(job: Job) -> None:
    """What is about to be trained, on what, and where it is written."""
    run, say = job.run, job.console.say
    millions = sum(parameter.numel() for parameter in job.model.parameters()) / 1e6
    shape = f"{run.model.layers} layers, width {run.model.width}, context {run.model.context}"
    for news in (*job.start.news, f"an older run is now in {job.moved}" if job.moved else ""):
        if news:
            say(news)
    say(f"text   {job.text.description}")
    cut = "" if run.train.sharding == "none" else f", sharding {run.train.sharding}"
    say(f"model  {run.model.family}, {shape}, {millions:.2f} M parameters{cut}")
    say(
        f"batch  {run.train.batch} sequences = {run.train.batch * run.model.context:,} tokens per step: "
        f"{job.comm.world_size} ranks x {microbatches_per_rank(run.train, job.comm.world_size)} microbatch(es) x "
        f"{job.loader.microbatch} sequences"
    )
    say(f"out    {run.out}")
    if job.start.step >= run.train.steps:
        say(f"already at step {job.start.step}, asked for {run.train.steps}: nothing left to train, see --train.steps")


def conclude(job: Job, result: TrainResult, written: str) -> None:
    """The last words of rank 0: a sample, the proof, where the weights are and how to go on."""
    run, say = job.run, job.console.say
    job.console.close()
    if written:
        (run.out / "sample.txt").write_text(written)
        say("sample of what the model writes:\n" + "\n".join(f"  | {line}" for line in written.splitlines()))
    ranks, what = job.comm.world_size, "pieces of the same weights" if is_cut(job.model) else "the same weights"
    say(f"proof  {ranks} of {ranks} ranks hold {what}: sha256 {result.digest}")
    say(f"saved  {result.checkpoint}")
    if result.was_stopped:
        say(
            f"stopped after step {result.step} of {run.train.steps}; "
            "the same command with --resume auto goes on from there"
        )
