"""The training loop, readable from top to bottom.

Everything that decides a number is a function of the step: which windows of text, which learning rate, which dropout.
So a run goes on from its step alone, no state of a random number generator is kept, and the global batch of a step is
the same for every number of ranks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import asdict

from lockstep.comm.communicator import Communicator
from lockstep.data.loader import validation_batches
from lockstep.launch.worker import StopRequest
from lockstep.observe.layout import layout_of
from lockstep.observe.profile.phases import DATA, OPTIMIZER, OTHER
from lockstep.train.checkpoints import state_of
from lockstep.train.config import RunConfig, to_json
from lockstep.train.console import Console
from lockstep.train.evaluate import evaluate, prove_equal
from lockstep.train.job import Job, TrainResult, prepare
from lockstep.train.metrics import Meter, StepMetrics
from lockstep.train.model import config_text
from lockstep.train.optim import learning_rate
from lockstep.train.run_dir import Launch
from lockstep.train.step import accumulate_gradient, agree, clip_gradient
from lockstep.train.words import conclude, introduce, say_coverage, write_sample


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


def run_steps(job: Job, stop: StopRequest) -> TrainResult:
    """The loop."""
    run, comm, begin, loader, clock = job.run, job.comm, job.begin, job.loader, job.profile.clock
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
        write_down(job, meter, step, tokens_done, loss, lr, grad_norm)
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
    if job.logs:
        conclude(job, result, written)
    return result


def write_down(job: Job, meter: Meter, step: int, tokens_done: int, loss: float, lr: float, grad_norm: float) -> None:
    """What rank 0 keeps of every step, and shows and logs of some."""
    train, loader, logs = job.run.train, job.loader, job.logs
    if logs is None:
        return
    job.profile.note("values", step=step, loss=loss, lr=lr, grad_norm=grad_norm)
    logs.samples.write({"step": step, **loader.samples_of_step(loader.consumed)})
    is_logged = step % train.log_every == 0 or step in (1, train.steps)
    if is_logged or step == job.begin.step + 1:
        record = StepMetrics(step, loss, lr, grad_norm, tokens_done, *meter.read(step))
        job.console.step(record)
        if is_logged:  # which steps are in the file does not depend on where the run was resumed
            logs.write(asdict(record))


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


def save_checkpoint(job: Job, step: int, tokens_done: int, *, wait: bool) -> None:
    """Put everything that `step` has come to on disk, once all ranks are seen to have come to the same.

    Collective: every rank; blocks, without `wait` until this rank's share is copied.
    Raises: ReplicaDrift, or what a guard has found, before anything is written; CheckpointError.
    """
    job.profile.raise_if_found()
    job.equality.check(step)
    job.loader.coverage.combine(job.comm)
    state = {
        **state_of(job.replica, job.optimizer, job.loader),
        "step": step,
        "tokens": tokens_done,
        "world_size": job.comm.world_size,
        "config": to_json(job.run),
        "model_config": config_text(job.model),
        "tokenizer": job.text.tokenizer.digest,
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
