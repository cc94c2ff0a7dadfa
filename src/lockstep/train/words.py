"""What rank 0 says of a run, before its first step and after its last."""

from __future__ import annotations

from lockstep.data.coverage import Verdict
from lockstep.parallel.named_state import is_cut
from lockstep.train.config import microbatches_per_rank
from lockstep.train.evaluate import sample
from lockstep.train.job import Job, TrainResult


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
    ranks, tokens = job.comm.world_size, run.train.batch * run.model.context
    share = f"{microbatches_per_rank(run.train, ranks)} microbatch(es) x {job.loader.microbatch} sequences"
    say(f"batch  {run.train.batch} sequences = {tokens:,} tokens per step: {ranks} ranks x {share}")
    say(f"out    {run.out}")
    if job.begin.step >= run.train.steps:
        say(f"already at step {job.begin.step}, asked for {run.train.steps}: nothing left to train, see --train.steps")


def conclude(job: Job, result: TrainResult, written: str) -> None:
    """The last words of rank 0: a sample, the proof, where the weights are and how to go on."""
    run, say = job.run, job.console.say
    job.console.close()
    if written:
        (run.out / "sample.txt").write_text(written, encoding="utf-8")
        say("sample of what the model writes:\n" + shown(written))
    ranks, what = job.comm.world_size, "pieces of the same weights" if is_cut(job.model) else "the same weights"
    say(f"proof  {ranks} of {ranks} ranks hold {what}: sha256 {result.digest}")
    for verdict in job.loader.verdicts():
        if not verdict.is_exact or verdict.epoch == int(job.loader.epoch):  # the others were said when they ended
            say_coverage(job, verdict)
    say(f"saved  {result.checkpoint}")
    if result.was_stopped:
        again = "the same command with --resume auto goes on from there"
        say(f"stopped after step {result.step} of {run.train.steps}; {again}")


def shown(written: str) -> str:
    """`written` for a terminal, on which what a model that knows little writes would act: bells, escapes."""
    seen = ("".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line) for line in written.splitlines())
    return "\n".join(f"  | {line}" for line in seen)


def write_sample(job: Job) -> str:
    """What the model writes after a line's end. Collective: every rank, as the model's parameters may be cut."""
    run, tokenizer = job.run, job.text.tokenizer
    if not run.train.sample_tokens:
        return ""
    prompt = tokenizer.encode([b"\n"])[0].tolist()  # in the middle of a document, at the beginning of a line
    tokens = sample(job.model, prompt, run.train.sample_tokens, run.model.context, job.comm.device, run.seed)
    return tokenizer.decode(tokens)


def say_coverage(job: Job, verdict: Verdict) -> None:
    """One line on whether every window of an epoch was used exactly once."""
    job.console.say(f"coverage of {verdict}, digest {job.loader.coverage.digest(verdict.epoch).hex()}")
