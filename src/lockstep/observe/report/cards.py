"""What somebody should know of a run, in a few cards: what went wrong, what costs time, and what is proved."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lockstep.observe.profile.run_record import WHOLE_MAX, Run
from lockstep.observe.profile.verdict import Verdict
from lockstep.observe.replica_diff import alike
from lockstep.observe.report.curves import values_of
from lockstep.observe.report.run_rows import STOPPED, Status, attempts_of, facts_by_rank, world_size_of
from lockstep.observe.report.source import Source
from lockstep.observe.wording import names

Severity = Literal["error", "warning", "note", "good"]
Card = dict[str, Any]
Section = Mapping[str, Any]  # of the document
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note", "good")
_CARDS_MAX, _TEXT_MAX = 60, 4000
_STEPS_MIN = 4  # before that nothing is known of what a step costs
_SAME = ("torch", "lockstep", "python", "commit", "config_sha256")  # on all ranks
_TITLES = {
    "communication": "Moving data between ranks costs {share:.0%} of the step",
    "straggler": "Rank {rank} is late: the others lose {share:.0%} of the step",
    "bubbles": "Ranks wait for each other {share:.0%} of the step",
    "data": "Ranks wait {share:.0%} of the step for data",
    "small buckets": "Many small collectives cost up to {share:.0%} of the step",
    "other": "{share:.0%} of the step is none of training",
    "unknown": "Ranks stand {share:.0%} of the step in communication",
}


def cards_of(
    source: Source, status: Status, verdict: Verdict, coverage: Section | None, replicas: Section | None
) -> list[Card]:
    """The most severe first."""
    found = [
        *_findings(source),
        *_ends(source, status),
        *_not_finite(source),
        *_unlike(source),
        *_missing(source, status),
        *_costs(verdict),
        *_covered(coverage),
        *_equal(replicas),
    ]
    if not any(card["severity"] != "good" for card in found) and _is_judged(verdict):
        found.insert(0, _card("good", "Nothing stands out", _summary(verdict)))  # the answer comes before its proofs
    return sorted(found, key=lambda card: SEVERITIES.index(card["severity"]))[:_CARDS_MAX]


def _card(
    severity: Severity,
    title: str,
    text: str = "",
    *,
    ranks: Sequence[int] = (),
    step: int | None = None,
    lever: str = "",
) -> Card:
    text = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    return {"severity": severity, "title": title, "text": text, "ranks": list(ranks), "step": step, "lever": lever}


# ------------------------------------------------------------------ what went wrong


def _findings(source: Source) -> Iterator[Card]:
    """What guards have said, once each."""
    last = attempts_of(source)[-1:]
    for finding, attempt, step in findings_of(source):
        head, *lines = finding["text"].removeprefix("lockstep: ").split("\n")
        fixes = [line.removeprefix("Likely fix: ") for line in lines if line.startswith("Likely fix: ")]
        rest = "\n".join(line for line in lines if not line.startswith("Likely fix: "))
        is_past = attempt != last[0].name  # the run went on after it
        is_end = finding["kind"] == "hang" and source.launch is not None and bool(source.launch.code)
        severe: Severity = "error" if (finding["is_certain"] or is_end) and not is_past else "warning"
        is_slow = finding["kind"] in ("waiting", "idle") and not finding["is_certain"]
        if not is_past and _tells_of_end(source, finding):
            rest += "\nThe run failed: " + "\n".join(last[0].causes)
        severity: Severity = "note" if is_slow or _was_asked(source, finding) else severe
        yield _card(severity, head, rest, ranks=finding["culprits"], step=step, lever=" ".join(fixes))


def _was_asked(source: Source, finding: Mapping[str, Any]) -> bool:
    """Whether a rank has raised because the run was to stop, as by Ctrl-C."""
    return finding["kind"] == "raised" and source.launch is not None and source.launch.code in STOPPED


def findings_of(source: Source) -> list[tuple[Mapping[str, Any], str, int | None]]:
    """(finding, the attempt, the step that it is about, or that its first rank was in), once, of the newest attempt.

    None for one that is not known, and for one that a later attempt has done again: what is recorded is not it.
    """
    found: dict[str, tuple[Mapping[str, Any], str, int | None]] = {}
    order = {attempt.name: number for number, attempt in enumerate(attempts_of(source))}
    for rank, note in sorted(source.notes("finding"), key=lambda told: -order.get(told[1].attempt, -1)):
        done = note.fields.get("done")
        step = step_at(source.run, rank, note.attempt, note.at_us) if done is None else done + 1
        at_step = [line for line in source.run.ranks[rank].lines if line.step - line.count < (step or 0) <= line.step]
        if any(line.attempt != note.attempt for line in at_step):
            step = None
        found.setdefault(note.fields["key"], (note.fields, note.attempt, step))
    for attempt, fields in source.launch.elsewhere if source.launch else ():
        found.setdefault(fields["key"], (fields, attempt, None if fields["done"] is None else fields["done"] + 1))
    return list(found.values())


def culprits_of(source: Source) -> tuple[int, ...]:
    """Who is to blame for the end of the last attempt, or for its standstill; nobody where that is not known."""
    last = attempts_of(source)[-1:]
    all_found = [finding for finding, attempt, _ in findings_of(source) if last and attempt == last[0].name]
    found = [finding for finding in all_found if not _was_asked(source, finding)]
    certain, uncertain = ([one["culprits"] for one in found if one["is_certain"] == is_so] for is_so in (True, False))
    causes = [] if not last or last[0].code in STOPPED else list(filter(None, map(_named, last[0].causes)))
    return tuple(next(iter([*certain, *causes, *uncertain]), ()))


def _named(cause: str) -> tuple[int, ...]:
    named = re.match(r"rank (\d+)", cause)
    return (int(named[1]),) if named else ()


def step_at(run: Run, rank: int, attempt: str, at_us: int) -> int | None:
    """The step that a rank was in; None before its first one has ended."""
    lines = [line for line in run.ranks[rank].lines if line.attempt == attempt and line.at_us + line.wall_us <= at_us]
    return lines[-1].step + 1 if lines else None


def _tells_of_end(source: Source, finding: Mapping[str, Any]) -> bool:
    """Whether the launcher's causes of the end of the last start are of the same fault: its rank, or its words."""
    cause = next(iter(attempts_of(source)[-1].causes), "")
    head = finding["text"].removeprefix("lockstep: ").partition("\n")[0]
    return finding["is_certain"] and (head in cause or not {*finding["culprits"]}.isdisjoint(_named(cause)))


def _ends(source: Source, status: Status) -> Iterator[Card]:
    """How each start ended, and the run."""
    attempts, launch = attempts_of(source), source.launch
    failed = [number for number, attempt in enumerate(attempts, 1) if attempt.code not in (None, 0, *STOPPED)]
    for number in failed:
        attempt = attempts[number - 1]
        causes = attempt.causes or ("its launcher does not say why",)
        ranks = _named(causes[0])
        if number < len(attempts):
            title = f"Start {number} of {len(attempts)} failed, and the run was started again"
            yield _card("warning", title, "\n".join(causes), ranks=ranks)
        elif not any(_tells_of_end(source, one) for one, name, _ in findings_of(source) if name == attempt.name):
            yield _card("error", f"The run failed: {causes[0]}", "\n".join(causes[1:]), ranks=ranks)
    for text in launch.found if launch else ():
        head, _, rest = text.removeprefix("lockstep: ").partition("\n")
        yield _card("error", head, rest)
    if status == "failed" and launch is not None and len(attempts) not in failed:
        without = "The launcher has ended without a word: it was killed, or its machine went down"
        yield _card("error", without if launch.code is None else f"The run failed with exit code {launch.code}")
    if status == "stopped":
        yield _card("note", "The run was stopped before its end")


def _not_finite(source: Source) -> Iterator[Card]:
    first: dict[str, tuple[int, int]] = {}
    for name, step, rank, value in values_of(source):
        if not math.isfinite(value):
            first[name] = min(first.get(name, (step, rank)), (step, rank))
    for name, (step, rank) in first.items():
        title = f"{name} is not finite from step {step} on"
        yield _card("error", title, f"first on rank {rank}", ranks=[rank], step=step)


def _unlike(source: Source) -> Iterator[Card]:
    said = facts_by_rank(source)
    for name in _SAME:
        told = {rank: said.get(rank, {}).get(name) for rank in source.run.of_last_attempt().ranks}
        by_value = alike({rank: str(value) for rank, value in told.items() if value})
        if len(by_value) > 1:
            lines = [f"{names(ranks)}: {value}" for value, ranks in by_value.items()]
            few = min(by_value.values(), key=len)
            yield _card("warning", f"The ranks differ in {name}", "\n".join(lines), ranks=few)


# ------------------------------------------------------------------ what is not known


def _missing(source: Source, status: Status) -> Iterator[Card]:
    if source.problems:
        lever = "what came before is shown; for the rest, let the file be read, or take the line out that is none"
        title = "Some of the record cannot be read" if source.run.ranks else "Nothing that ranks recorded can be read"
        yield _card("warning", title, "\n".join(source.problems), lever=lever)
    ranks = source.run.ranks
    size = world_size_of(source)
    silent = sorted(set(range(size)) - set(source.run.of_last_attempt().ranks))
    if silent and status == "running":
        yield _card("note", f"{names(silent)} of {size}: not begun yet".capitalize(), ranks=silent)
    elif silent and not source.problems:
        text = "Nothing was recorded before the end, or another machine has its own folder of that name."
        yield _card("warning", f"{names(silent)} of {size} left no record".capitalize(), text, ranks=silent)
    is_whole = source.run.is_whole
    if ranks and not source.problems and (is_whole or not any(record.lines for record in ranks.values())):
        when = "has ended yet" if status == "running" else "was ended"
        text = "Times are known from the first step on."
        if is_whole:
            text = f"The operations of the program, at most its last {WHOLE_MAX}, are shown as if they were one."
        lever = "steps are told apart by step() of torch's optimizers; those within join(), where ranks differ, are not"
        yield _card("note", f"No step {when}", text, lever=lever)


# ------------------------------------------------------------------ what it costs


def _is_judged(verdict: Verdict) -> bool:
    return min((share.steps for share in verdict.shares), default=0) >= _STEPS_MIN


def _costs(verdict: Verdict) -> Iterator[Card]:
    if not _is_judged(verdict):
        return
    for advice in verdict.advice:
        title = _TITLES[advice.kind].format(share=advice.share, rank=advice.rank)
        ranks = [] if advice.rank is None else [advice.rank]
        text = "" if advice.text.lower() == title.lower() else advice.text
        yield _card("warning", title, text, ranks=ranks, lever=advice.lever)


def _summary(verdict: Verdict) -> str:
    hidden = "" if verdict.overlap is None else f"; {verdict.overlap:.0%} of communication is hidden"
    hidden += "; how much of communication is exposed is not known" * bool(verdict.unseen)
    hidden += "; times are the GPU's" * verdict.is_on_gpu
    return f"{verdict.step_ms:.1f} ms per step; the slowest rank works {verdict.imbalance:.2f} x the mean{hidden}"


# ------------------------------------------------------------------ what is proved


def _covered(coverage: Section | None) -> Iterator[Card]:
    epochs = coverage["epochs"] if coverage else []
    sealed = [epoch for epoch in epochs if epoch["sealed"]]
    for epoch in epochs:
        if epoch["twice"] or (epoch["missing"] and not epoch["running"]):
            counts = f"{epoch['twice']} uses too many, {epoch['missing']} samples missing, of {epoch['length']}"
            lever = "set_epoch, drop_last and the sampler's world size decide; lockstep.DistributedSampler proves it"
            title = f"Epoch {epoch['epoch']} did not use each sample once"
            yield _card("warning", title, f"at least {counts}\n{epoch['examples']}", lever=lever)
    if sealed:
        which = f"epoch {sealed[0]['epoch']}" if len(sealed) == 1 else f"{len(sealed)} epochs"
        length = sealed[-1]["length"]
        text = f"{length} samples, digest {sealed[-1]['digest']}"
        yield _card("good", f"Each sample was used exactly once in {which}", text)


def _equal(replicas: Section | None) -> Iterator[Card]:
    if replicas is None:
        return
    differing = [step for step, is_equal in replicas["checks"] if not is_equal]
    if differing:
        since = replicas["sealed_until"]
        text = "they were never equal" if since is None else f"after step {since} they were equal"
        yield _card("error", f"The ranks' models differ at step {differing[0]}", text, step=differing[0])
    else:
        count = replicas["count"]
        title = f"The ranks held one model through step {replicas['sealed_until']}"
        yield _card("good", title, f"{count} comparison{'s' * (count != 1)} of {replicas['what']}")
