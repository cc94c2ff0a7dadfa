"""The training loop, readable from top to bottom.

Everything that decides a number is a function of the step: which windows of text, which learning rate, which dropout.
So a run goes on from its step alone, no state of a random number generator is kept, and the global batch of a step is
the same for every number of ranks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.comm.communicator import Communicator
from lockstep.comm.pulse import Pulse, open_pulse
from lockstep.data.coverage import Verdict
from lockstep.data.loader import TokenLoader, validation_batches
from lockstep.data.tokens import TokenizedText, prepare_tokens
from lockstep.errors import ConfigError, DataError
from lockstep.launch.worker import StopRequest
from lockstep.observe.layout import layout_of
from lockstep.observe.process_guard import guard_of
from lockstep.observe.profile.session import Profile, open_profile
from lockstep.observe.profile.step_clock import DATA, OPTIMIZER, OTHER
from lockstep.observe.replica import ReplicaCheck
from lockstep.parallel.materialize import materialize
from lockstep.parallel.named_state import is_cut
from lockstep.parallel.strategy import parallelize
from lockstep.train.checkpoints import load, state_of
from lockstep.train.config import RunConfig, microbatches_per_rank, to_json
from lockstep.train.console import Console
from lockstep.train.evaluate import evaluate, prove_equal, sample
from lockstep.train.metrics import Logs, Meter, StepMetrics, flops_per_token
from lockstep.train.model import build_model
from lockstep.train.optim import build_optimizer, learning_rate
from lockstep.train.run_dir import Launch, Start, checkpoints_of, find_start, goes_on, make_ready, news_of, token_cache
from lockstep.train.step import accumulate_gradient, agree, clip_gradient


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
    equality: ReplicaCheck  # of the replicas, from time to time
    checkpointer: Checkpointer
    logs: Logs | None  # on rank 0
    pulse: Pulse
    profile: Profile  # where the time of each step goes
    begin: Begin


@dataclass(frozen=True)
class Begin:
    """Where the loop begins."""

    step: int = 0  # optimizer steps done before
    tokens: int = 0  # trained on before, over all ranks
    saved: Path | None = None  # the checkpoint of that step, where it is one of this run
    news: tuple[str, ...] = ()  # what the user should know about it


def train(
    run: RunConfig, comm: Communicator, stop: StopRequest, resume: str = "", environ: Mapping[str, str] = os.environ
) -> TrainResult:
    """Train `run` on the ranks of `comm`, from the beginning or from the checkpoint that `resume` names.

    resume: "auto" takes the newest one of the run directory, if there is one; else a path. A run that its launcher
        starts again, as `environ` says, goes on where it had come to.
    Collective: every rank of `comm`, with equal arguments; blocks until the run has ended or any rank's `stop` is set.
    Raises: ConfigError, DataError, CheckpointError before the first step; NonFiniteLoss, ReplicaError, CommError.
    """
    console = Console(comm.rank, run.train.steps)
    try:
        job = prepare(run, comm, console, resume, Launch.of(environ))
        try:
            with job.checkpointer:
                return run_steps(job, stop)
        finally:
            job.profile.close()
            if job.logs:
                job.logs.close()
    finally:
        console.close()


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
    moved = make_ready(run, comm, start, launch)
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


def run_steps(job: Job, stop: StopRequest) -> TrainResult:
    """The loop."""
    run, comm, begin, logs, loader, clock = job.run, job.comm, job.begin, job.logs, job.loader, job.profile.clock
    introduce(job)
    step, tokens_done, was_stopped = begin.step, begin.tokens, False
    saved = begin.step if begin.saved else None  # the last step of which this run has a checkpoint
    meter = Meter(step, run.train.steps)
    gc.freeze()  # collections need not walk what torch and the model brought along, in the loop or at exit
    job.pulse.step(step)
    if begin.saved:
        job.pulse.committed(step)
    stop.arm()
    clock.restart()
    while step < run.train.steps:
        clock.switch(DATA)
        microbatches = loader.step_at(loader.consumed)
        clock.switch(OTHER)
        tokens, was_stopped = agree(comm, microbatches, stop.is_set())
        if was_stopped:
            break

        lr = learning_rate(step, run.train.steps, run.optim)
        for group in job.optimizer.param_groups:
            group["lr"] = lr
        loss = accumulate_gradient(job.replica, microbatches, tokens, run.seed, step, comm, clock)
        clock.switch(OPTIMIZER)
        grad_norm = clip_gradient(job.replica, run.optim.clip_norm, step)
        job.optimizer.step()
        if step == begin.step:
            job.profile.note("layout", step=step + 1, **layout_of(job.model, job.optimizer, [job.replica]))
        job.optimizer.zero_grad()
        clock.switch(OTHER)
        step, tokens_done = step + 1, tokens_done + tokens
        job.pulse.step(step)
        job.equality.after_step(step)

        meter.count(tokens)
        if logs:
            job.profile.note("values", step=step, loss=loss, lr=lr, grad_norm=grad_norm)
            logs.samples.write({"step": step, **loader.samples_of_step(loader.consumed)})
            is_logged = step % run.train.log_every == 0 or step in (1, run.train.steps)
            if is_logged or step == begin.step + 1:
                record = StepMetrics(step, loss, lr, grad_norm, tokens_done, *meter.read(step))
                job.console.step(record)
                if is_logged:  # which steps are in the file does not depend on where the run was resumed
                    logs.write(record)
        with meter.pause():
            advance(job, step)
            if is_due(step, run.train.eval_every, run.train.steps):
                validate(job, step)
            if is_due(step, run.checkpoint.every, run.train.steps):
                save_checkpoint(job, step, tokens_done, wait=not run.checkpoint.background)
                saved = step
        job.profile.step_done(step, tokens)

    if saved != step:
        save_checkpoint(job, step, tokens_done, wait=True)
    job.checkpointer.wait()
    checkpoint = (begin.saved if step == begin.step else None) or job.checkpointer.path_of(step)
    val_loss = None if was_stopped else validate(job, step)
    result = TrainResult(step, val_loss, prove_equal(job.model, comm), checkpoint, was_stopped)
    written = "" if was_stopped else write_sample(job)
    loader.coverage.combine(comm)
    if logs:
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
    before = start.values["data"]["digest"] if start.origin else text.digest
    if start.origin and before != text.digest:
        raise ConfigError(
            f"the checkpoint in {start.origin.directory} was trained on other text (sha256 {before[:12]}) than "
            f"{text.source} is ({text.digest[:12]}): give the same --data.path, or start a new run without --resume"
        )


def is_due(step: int, every: int, steps: int) -> bool:
    """True after every `every` steps, except the last, which has an end of its own."""
    return every > 0 and step % every == 0 and step != steps


def advance(job: Job, step: int) -> None:
    """Count the windows that `step` was trained on; at the end of an epoch, say what the count proves.

    Collective: every rank; blocks at the end of an epoch only.
    """
    loader = job.loader
    epoch = int(loader.epoch)
    loader.advance()
    if int(loader.epoch) == epoch:
        return
    loader.coverage.combine(job.comm)
    for finished in range(epoch, int(loader.epoch)):
        verdict = loader.coverage.verdict(finished)
        say_coverage(job, verdict)
        if job.logs:
            digest = loader.coverage.digest(finished).hex()
            job.logs.write({"step": step, "epoch": finished, "coverage": verdict.words, "digest": digest})


def say_coverage(job: Job, verdict: Verdict) -> None:
    """One line on whether every window of an epoch was used exactly once."""
    job.console.say(f"coverage of {verdict}, digest {job.loader.coverage.digest(verdict.epoch).hex()}")


def save_checkpoint(job: Job, step: int, tokens_done: int, *, wait: bool) -> None:
    """Put everything that `step` has come to on disk, once all ranks are seen to have come to the same.

    Collective: every rank; blocks, without `wait` until this rank's share is copied.
    Raises: ReplicaDrift before anything is written; CheckpointError.
    """
    job.equality.check(step)
    job.loader.coverage.combine(job.comm)
    state = {
        **state_of(job.replica, job.optimizer, job.loader),
        "step": step,
        "tokens": tokens_done,
        "world_size": job.comm.world_size,
        "config": to_json(job.run),
    }
    if job.logs:
        job.logs.sync()  # whoever goes on from this checkpoint finds the lines of all its steps
    if wait:
        job.checkpointer.save(step, state)
    else:
        job.checkpointer.save_async(step, state)


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
    if job.logs:
        job.profile.note("values", step=step, val_loss=val_loss)
    if job.logs and step not in job.logs.metrics.validated:
        job.logs.write({"step": step, "val_loss": val_loss})
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
    for news in job.begin.news:
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
    if job.begin.step >= run.train.steps:
        say(f"already at step {job.begin.step}, asked for {run.train.steps}: nothing left to train, see --train.steps")


def conclude(job: Job, result: TrainResult, written: str) -> None:
    """The last words of rank 0: a sample, the proof, where the weights are and how to go on."""
    run, say = job.run, job.console.say
    job.console.close()
    if written:
        (run.out / "sample.txt").write_text(written, encoding="utf-8")
        say("sample of what the model writes:\n" + "\n".join(f"  | {line}" for line in written.splitlines()))
    ranks, what = job.comm.world_size, "pieces of the same weights" if is_cut(job.model) else "the same weights"
    say(f"proof  {ranks} of {ranks} ranks hold {what}: sha256 {result.digest}")
    for verdict in job.loader.verdicts():
        if not verdict.is_exact or verdict.epoch == int(job.loader.epoch):  # the others were said when they ended
            say_coverage(job, verdict)
    say(f"saved  {result.checkpoint}")
    if result.was_stopped:
        say(
            f"stopped after step {result.step} of {run.train.steps}; "
            "the same command with --resume auto goes on from there"
        )
