"""A few steps of all ranks on one clock: what each did, where it stood in collectives, and who came last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from lockstep.observe.pace import EVERY
from lockstep.observe.profile.chrome_trace import align, moments_of, placed_lines
from lockstep.observe.profile.phases import PHASES
from lockstep.observe.profile.run_record import TAIL_GROUP, Key, Op, Run, Steps, of_all
from lockstep.observe.profile.waits import Kind, Wait, compare, kind_of, unseen
from lockstep.observe.report.open_step import Moment, line_of

_STEPS_MAX = 12
_ROWS_MAX = 14_000  # operations and spans together: some 40 bytes each
_WARM_UP = 2  # first steps, which allocate and compile

Row = list[Any]
Sent = Mapping[str, Any]  # what DistributedDataParallel says of its buckets
_NOBODY: Mapping[Key, int] = {}


class Choice(NamedTuple):
    """A step that is drawn, and why."""

    step: int
    why: str


class Chosen(NamedTuple):
    """A step of each rank that has ended it, and when it began: microseconds since the epoch, on one clock."""

    lines: Mapping[int, Steps]
    zeros: Mapping[int, float]
    is_one_clock: bool  # else brought together, by collectives


def lanes_of(
    run: Run,
    began_us: float,
    findings: Iterable[int] = (),
    moments: Sequence[Moment] = (),
    culprits: Container[int] = (),
) -> dict[str, Any]:
    """The steps worth seeing, in order.

    began_us: of the run, since the epoch. findings: steps at which something was found. moments: of the step that was
    not ended, if there is one; culprits: ranks that are to blame for that.
    """
    by_step = _listed(run)
    sent = {rank: said for rank, record in run.ranks.items() if (said := record.buckets) is not None}
    words: dict[tuple[Any, ...], int] = {}
    kinds = unseen(run.of_last_attempt())
    steps: list[dict[str, Any]] = []
    room = _ROWS_MAX
    choices = choose(by_step, findings)
    placed, ahead_us = _placed(run, {choice.step: by_step[choice.step] for choice in choices})
    for choice in choices:  # the most telling first
        lane = _step(choice, placed[choice.step], began_us, words, sent, kinds)
        room -= sum(len(rank["spans"]) + len(rank["ops"]) for rank in lane["ranks"]) + len(lane["joins"])
        if room < 0 and steps:
            break
        steps.append(lane)
    steps += _open_step(run, moments, culprits, ahead_us, began_us, words)
    names = ("group", "text", "site", "label", "bytes", "unseen")
    listed = [dict(zip(names, (*word, word[1:3] in kinds), strict=True)) for word in words]
    return {"words": listed, "steps": sorted(steps, key=lambda lane: lane["step"])}


def choose(by_step: Mapping[int, Mapping[int, Steps]], findings: Iterable[int] = ()) -> list[Choice]:
    """Steps whose operations are listed: around each finding, a typical one, the slowest, the last; each once."""
    steps = sorted(by_step)
    if any(line.whole for lines in by_step.values() for line in lines.values()):
        return [Choice(step, "whole") for step in steps]
    steady = steps[_WARM_UP:] if len(steps) > 2 * _WARM_UP else steps
    if not steps:
        return []
    took = {step: max(line.wall_us for line in by_step[step].values()) for step in steady}
    by_time = sorted(steady, key=lambda step: (took[step], step))
    found: dict[int, str] = {}
    around = [max((step for step in steps if step <= at), default=steps[0]) for at in findings]
    named = [
        *((step, "finding") for step in around[:2]),
        (by_time[(len(by_time) - 1) // 2], "typical"),
        (by_time[-1], "slowest"),
        (steps[-1], "last"),
        *((step, "finding") for step in around[2:6]),
        *((step, "slowest") for step in reversed(by_time[-3:-1])),
        *((step, "last") for step in reversed(steps[-3:-1])),
    ]
    for step, why in named:
        found.setdefault(step, why)
    return [Choice(step, why) for step, why in found.items()][:_STEPS_MAX]


def _listed(run: Run) -> dict[int, dict[int, Steps]]:
    """Of each step that is listed the lines of the ranks that did it together."""
    found: dict[int, dict[str, dict[int, Steps]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in run.ranks.items():
        for line in record.lines:
            if line.ops is not None and line.count == 1:
                found[line.step][line.attempt][rank] = line
    return {step: max(attempts.values(), key=len) for step, attempts in found.items()}


def _placed(run: Run, steps: Mapping[int, Mapping[int, Steps]]) -> tuple[dict[int, Chosen], Mapping[int, float]]:
    """On the clock of the first rank's machine; and by how much each rank's is ahead of that.

    The clocks are compared by all the collectives of these steps.
    """
    hosts = {rank: record.starts[-1].host for rank, record in run.ranks.items()}
    ahead = dict.fromkeys(hosts, 0.0)
    if not run.is_of_one_host:
        ahead = align(moments_of(run, steps), hosts).ahead_us
    zeros: dict[int, dict[int, float]] = defaultdict(dict)
    for rank, line, zero_us in placed_lines(run, steps):
        zeros[line.step][rank] = zero_us - ahead[rank]
    placed = {step: {rank: zeros[step][rank] for rank in lines} for step, lines in steps.items()}
    return {step: Chosen(lines, placed[step], run.is_of_one_host) for step, lines in steps.items()}, ahead


def _step(
    choice: Choice,
    chosen: Chosen,
    began_us: float,
    words: dict[tuple[Any, ...], int],
    sent: Mapping[int, Sent],
    kinds: Container[Kind] = (),
    absent: Mapping[Key, int] = _NOBODY,
) -> dict[str, Any]:
    """kinds: `unseen`. absent: of operations that did not come about, a rank that was not there."""
    first_us = min(chosen.zeros.values())
    lags = {rank: round(zero - first_us) for rank, zero in chosen.zeros.items()}
    ops: dict[Key, dict[int, Op]] = defaultdict(dict)
    for rank, line in chosen.lines.items():
        for op in line.ops or ():
            ops[op.key][rank] = with_buckets(op, sent.get(rank)) if TAIL_GROUP in op.group else op
    for seen in ops.values():
        seen |= {rank: of_all(op, len(seen)) for rank, op in seen.items()}
    keys = {key: number for number, key in enumerate(ops)}
    clock = chosen.zeros if chosen.is_one_clock else None
    known = {key: seen for key, seen in ops.items() if not any(kind_of(op) in kinds for op in seen.values())}
    waits = {key: wait for key, seen in known.items() if (wait := compare(seen, clock)) is not None}
    joins = (
        [keys[key], absent[key], 0, 0, None]
        if key in absent
        else join_of(keys[key], seen, waits.get(key), sent if TAIL_GROUP in key[1] else {})
        for key, seen in ops.items()
        if key in absent or key in known
    )

    def row_of(rank: int, op: Op) -> Row:
        late = waits[op.key].waited_us.get(rank, 0) if op.key in waits else 0
        return _row(ops[op.key][rank], keys[op.key], lags[rank], words, op.waited_us if op.key in absent else late)

    return {
        "step": choice.step,
        "why": choice.why,
        "began_us": round(first_us - began_us),
        "ended_us": round(first_us - began_us) + max(lags[rank] + line.wall_us for rank, line in chosen.lines.items()),
        "ranks": [
            {
                "rank": rank,
                "began_us": lags[rank],
                "ended_us": lags[rank] + line.wall_us,
                "unlisted": line.unlisted,
                "spans": [[name, lags[rank] + begin, lags[rank] + end] for name, begin, end in spans_of(line)],
                "ops": [row_of(rank, op) for op in line.ops or ()],
            }
            for rank, line in chosen.lines.items()
        ],
        "estimated": not all(line.spans for line in chosen.lines.values()),
        "joins": [row for row in joins if row is not None],
    }


def _open_step(
    run: Run,
    moments: Sequence[Moment],
    culprits: Container[int],
    ahead_us: Mapping[int, float],
    began_us: float,
    words: dict[tuple[Any, ...], int],
) -> Iterator[dict[str, Any]]:
    """The last step, as far as each rank came; nothing where that is not known."""
    by_rank = {moment.rank: moment for moment in moments if moment.rank in run.ranks}
    lines = {rank: line_of(moment, run.ranks[rank]) for rank, moment in by_rank.items()}
    if not lines:
        return
    starts = {rank: run.ranks[rank].starts[-1] for rank in lines}
    zeros = {rank: starts[rank].time_ns / 1e3 + line.at_us - ahead_us[rank] for rank, line in lines.items()}
    ends = {rank: zeros[rank] + line.wall_us for rank, line in lines.items()}
    first_us = min((zeros[rank] for rank, line in lines.items() if line.ops or line.spans), default=0)
    for rank in (rank for rank, ended_us in ends.items() if ended_us < first_us):  # seen in a step before, died in this
        zeros[rank], lines[rank] = first_us, replace(lines[rank], wall_us=round(max(ends.values()) - first_us))
    missed = [(starts[rank].attempt, op) for rank in lines for op in by_rank[rank].ops if op.absent]
    absent = {(attempt, op.group, op.seq): op.absent[0] for attempt, op in missed}
    choice = Choice(max(line.step for line in lines.values()), "open")
    lane = _step(choice, Chosen(lines, zeros, run.is_of_one_host), began_us, words, {}, absent=absent)
    for row in lane["ranks"]:
        rank, line = row["rank"], lines[row["rank"]]
        row |= {"step": line.step, "says": by_rank[rank].says, "culprit": rank in culprits}
        known = row["spans"] if line.spans else []
        unknown = ["open", row["began_us"], known[0][1] if known else row["ended_us"]]
        is_seen = 1000 * (unknown[2] - unknown[1]) > lane["ended_us"] - lane["began_us"]
        row["spans"] = [unknown] * is_seen + known
    work, seen = {"forward", "backward", "optimizer"}, {name for row in lane["ranks"] for name, *_ in row["spans"]}
    is_counted = any(line.counted for record in run.ranks.values() for line in record.lines[-2 * EVERY :])
    yield lane | {"estimated": False, "counted": is_counted and not work & seen}


def _row(op: Op, key: int, lag_us: int, words: dict[tuple[Any, ...], int], late_us: int) -> Row:
    """late_us: of what the thread stood, for the last rank to come."""
    word = words.setdefault((op.group, op.text, op.site, op.label, op.bytes), len(words))
    began = -1 if op.began_us < 0 else lag_us + op.began_us
    return [word, key, lag_us + op.entered_us, lag_us + op.left_us, began, op.waited_us, late_us]


def with_buckets(op: Op, sent: Sent | None) -> Op:
    """All that DistributedDataParallel waits for, with what it says that this is."""
    count, size = (sent["count"], sent["bytes"]) if sent else (0, 0)
    label = f"{count} bucket{'s' * (count != 1)}" if sent else ""
    return op._replace(group="that of DistributedDataParallel", label=label, bytes=size)


def join_of(key: int, ops: Mapping[int, Op], waited: Wait | None, sent: Mapping[int, Sent]) -> Row | None:
    """[key, rank that came last, real microseconds, microseconds waited in all, bytes per second]; None of one rank.

    waited: as `compare` has it; where that knows nothing, the rank that was in it for the shortest time came last.
    sent: by each rank as buckets, a part of which was under way before.
    """
    if len(ops) < 2:
        return None
    inside = {rank: op.left_us - op.entered_us for rank, op in ops.items()}
    last = min(inside, key=lambda rank: (inside[rank], rank)) if waited is None else waited.last
    real_us = max(0, min(inside.values()), 0 if waited is None else waited.real_us)
    moved_us = real_us + (sent[last]["hidden_us"] if last in sent else 0)
    rate = round(1e6 * ops[last].bytes / moved_us) if ops[last].bytes and moved_us else None
    return [key, last, real_us, 0 if waited is None else sum(waited.waited_us.values()), rate]


Span = tuple[str, int, int]


def spans_of(line: Steps) -> list[Span]:
    """What the rank's thread did when: (phase, from, to), without gaps; of too many changes only the sums are known."""
    ends = list(accumulate(line.phases_us))
    spans = line.spans or list(enumerate([0, *ends[:-1]]))
    untils = [*(at for _, at in spans[1:]), line.wall_us]
    return [(PHASES[phase], at, until) for (phase, at), until in zip(spans, untils, strict=True) if until > at]
