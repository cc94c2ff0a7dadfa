"""What a run spent its time on, what to make of it, and what to do about it. No clock and no file here."""

from __future__ import annotations

import itertools
import re
import statistics
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lockstep.observe.profile.phases import PHASES
from lockstep.observe.profile.replay import WhatIf, plays_of, what_ifs
from lockstep.observe.profile.run_record import RankRecord, Run, of_all
from lockstep.observe.profile.waits import Waits, unseen, waits_of, weighted
from lockstep.observe.wording import names

_COMMUNICATION, _IDLE, _DATA, _OTHER = 0.30, 0.10, 0.15, 0.30  # shares of the step above which they are said
_IMBALANCE = 1.10  # slowest rank's work over the mean
_SMALL_BYTES, _MANY = 256 << 10, 8  # a collective that is mostly latency; of how many in a step
_ONE_CAUSES = 0.6  # of all waiting: then it has a name
_OWN_FAULT = 0.5  # of what the others lose: what it does longer than they
_SEND_LESS = (  # of a model that is replicated; of one that is sharded
    "accumulate gradients over more microbatches with no_sync(), send bf16 (bf16_compress_hook)",
    "keep parameters after forward (reshard_after_forward=False), send bf16 (MixedPrecisionPolicy), shard larger units",
)
_LEVERS = {
    "bubbles": "even out the work: batches of equal length, the same number of microbatches (in a pipeline more), "
    "fewer processes per core",
    "data": "more num_workers, persistent_workers=True, a larger prefetch_factor, or prepare the data once",
    "other": "checkpoints in the background (save_async), validate less often, call .item() and print less often",
    "unknown": "give all machines one --record folder, on a disk that they share",
}
_SEND_LARGER = (  # as _SEND_LESS
    "larger buckets (bucket_cap_mb), one flat tensor in place of many small ones, or fewer statistics per step",
    "shard larger units: fully_shard for several layers together, not for each",
)


class Share(NamedTuple):
    """One rank over the whole run, without its first steps; milliseconds per step."""

    rank: int
    steps: int
    step_ms: float
    phases_ms: Mapping[str, float]  # together `step_ms`
    hidden_ms: float  # communication behind the rank's own work; of the steps whose operations are listed
    waited_ms: float  # of "exposed": for another rank, not for data
    longest_ms: float  # step
    tokens_per_s: float  # of all ranks
    samples_per_s: float  # of this rank
    rss_mib: int
    cuda_mib: int

    @property
    def work_ms(self) -> float:
        """All but standing in communication."""
        return self.step_ms - self.phases_ms["exposed"]


class Advice(NamedTuple):
    """One thing that costs time."""

    kind: str  # "communication", "straggler", "bubbles", "data", "small buckets", "other", "unknown"
    share: float  # of the step that it costs
    text: str
    lever: str
    rank: int | None = None  # whose fault it is


@dataclass(frozen=True)
class Verdict:
    """A run, judged."""

    shares: tuple[Share, ...]  # by rank
    imbalance: float  # the slowest rank's work over the mean
    overlap: float | None  # part of moving data that is hidden; None where none was listed, or that is not known
    advice: tuple[Advice, ...]  # what costs most first; empty where nothing stands out
    waits: Waits
    what_ifs: tuple[WhatIf, ...]
    unseen: str = ""  # of which communication nobody knows when ranks stood in it; what is exposed is at least as given
    flops_per_s: float | None = None  # arithmetic of one rank, forward and backward
    mfu: float | None = None  # part of what its device can do
    is_on_gpu: bool = False  # times are those of the ranks' GPUs

    @property
    def step_ms(self) -> float:
        """Mean over ranks."""
        return statistics.fmean(share.step_ms for share in self.shares)


def judge(run: Run, *, peak_flops: float = 0.0, flops_per_token: float = 0.0) -> Verdict:
    """Of the ranks that were there in the end, and the steps in which all of them were.

    peak_flops: of one rank's device per second. flops_per_token: forward and backward; 0 takes what the run says. Of a
    program whose tokens nobody counts, it is per sample.
    """
    run = _together(run.of_last_attempt())
    waits = waits_of(run)
    shares = tuple([share for record in run.ranks.values() if (share := share_of(record, waits)) is not None])
    if not shares:
        return Verdict((), 1.0, None, (), waits, ())
    kinds = list(unseen(run).values())
    work = [share.work_ms for share in shares]
    hidden = statistics.fmean(share.hidden_ms for share in shares)
    moving = statistics.fmean(max(0.0, share.phases_ms["exposed"] - share.waited_ms) for share in shares)
    per_token = flops_per_token or max(record.starts[-1].flops_per_token for record in run.ranks.values())
    rate = max(share.tokens_per_s for share in shares) or sum(share.samples_per_s for share in shares)
    is_partial = bool(kinds or _silent(run))
    done = per_token * rate / len(shares) or None
    return Verdict(
        shares,
        max(work) / max(1e-9, statistics.fmean(work)),
        hidden / (hidden + moving) if hidden + moving > 0 and not is_partial else None,
        tuple(sorted(_advice(run, shares, waits), key=lambda advice: -advice.share)),
        waits,
        () if _silent(run) else tuple(what_ifs(plays_of(run), are_least=bool(kinds))),
        f"{kinds[0].text} at {kinds[0].site}" + f" and {len(kinds) - 1} more" * (len(kinds) > 1) if kinds else "",
        done,
        done / peak_flops if done and peak_flops else None,
        run.is_on_gpu,
    )


def _together(run: Run) -> Run:
    """Without steps that a rank knows nothing of: it joined later, was killed, or its record is cut."""
    begun = [record for record in run.ranks.values() if record.lines]
    first = max((record.lines[0].step for record in begun), default=0)
    last = min((record.lines[-1].step for record in begun), default=0)

    def cut(record: RankRecord) -> RankRecord:
        here = slice(*(bisect(record.lines, at, key=lambda line: line.step) for at in (first - 1, last)))
        return replace(record, lines=record.lines[here])

    return Run(run.folder, {rank: cut(record) for rank, record in run.ranks.items()})


def share_of(record: RankRecord, waits: Waits) -> Share | None:
    """One rank's means; None where it has ended no step."""
    lines = record.steady
    steps = sum(line.count for line in lines)
    if not steps:
        return None
    wall_us = sum(line.wall_us for line in lines)
    listed = [line.hidden_us for line in lines if line.hidden_us is not None]
    return Share(
        rank=record.rank,
        steps=steps,
        step_ms=wall_us / steps / 1e3,
        phases_ms={name: sum(line.phases_us[at] for line in lines) / steps / 1e3 for at, name in enumerate(PHASES)},
        hidden_ms=(statistics.fmean(listed or [0]) + (record.buckets or {"hidden_us": 0})["hidden_us"]) / 1e3,
        waited_ms=1e3 * waits.waited_s.get(record.rank, 0.0) / steps,
        longest_ms=max(line.longest_us for line in lines) / 1e3,
        tokens_per_s=sum(line.tokens for line in lines) / max(1e-9, wall_us / 1e6),
        samples_per_s=sum(line.samples for line in lines) / max(1e-9, wall_us / 1e6),
        rss_mib=max(line.rss_mib for line in lines),
        cuda_mib=max(line.cuda_mib for line in lines),
    )


def _advice(run: Run, shares: Sequence[Share], waits: Waits) -> list[Advice]:
    step_ms = statistics.fmean(share.step_ms for share in shares)
    exposed = statistics.fmean(share.phases_ms["exposed"] for share in shares) / step_ms
    still = statistics.fmean(share.waited_ms for share in shares) / step_ms
    moving = max(0.0, exposed - still)
    late = _straggler(shares, waits)
    found = [] if late is None else [late]
    if exposed > _COMMUNICATION and (silent := _silent(run)):
        takes = f"communication that nothing hides takes {exposed:.0%} of the step"
        text = f"{takes}; how much of that is waiting is not known: {names(silent)} recorded no step"
        found.append(Advice("unknown", exposed, text, _LEVERS["unknown"]))
    elif exposed > _COMMUNICATION and moving > still:
        parts = f"(moving data {moving:.0%}, waiting for other ranks {still:.0%})"
        text = f"communication that nothing hides takes {exposed:.0%} of the step {parts}"
        lever = f"{_SEND_LESS[_is_sharded(run)]}, or use larger batches per rank"
        found.append(Advice("communication", moving, text, lever))
    if late is None and still > _IDLE:
        text = f"ranks stand still {still:.0%} of the step for others, and no rank does that much more than the rest"
        found.append(Advice("bubbles", still, text, _LEVERS["bubbles"]))
    rest = [share for share in shares if late is None or share.rank != late.rank]
    for name, least, words in (
        ("data", _DATA, "ranks wait {:.0%} of the step for data"),
        ("other", _OTHER, "{:.0%} of the step is none of data, forward, backward, optimizer"),
    ):
        part = statistics.fmean(share.phases_ms[name] for share in rest) / step_ms
        if part > least and not (run.is_whole and name == "other"):  # a program without steps may do what it likes
            found.append(Advice(name, part, words.format(part), _LEVERS[name]))
    return found + _small_buckets(run, moving)


def _silent(run: Run) -> Sequence[int]:
    """Ranks that recorded no step: who waits for these cannot be told from who moves data."""
    return sorted({*range(run.world_size)} - {rank for rank, record in run.ranks.items() if record.lines})


def _straggler(shares: Sequence[Share], waits: Waits) -> Advice | None:
    """The rank that the others wait for, and what it does meanwhile."""
    caused = waits.caused_s
    late = max(caused, key=lambda rank: caused[rank])
    is_named = caused[late] > _ONE_CAUSES * sum(caused.values())
    mine = next((share for share in shares if share.rank == late), None)
    others = [share for share in shares if share.rank != late]
    if mine is None or not others:
        return None
    lost_ms = statistics.fmean(share.waited_ms for share in others)
    is_slow = mine.work_ms > _IMBALANCE * statistics.fmean(share.work_ms for share in shares)
    if not (is_named and (is_slow or lost_ms > _IDLE * mine.step_ms)):
        return None
    usual = {name: statistics.median(share.phases_ms[name] for share in others) for name in PHASES if name != "exposed"}
    longer = {name: mine.phases_ms[name] - ms for name, ms in usual.items()}
    phase = max(longer, key=lambda name: longer[name])
    if sum(ms for ms in longer.values() if ms > 0) < _OWN_FAULT * lost_ms:
        return None  # the middle of a pipeline, or a core that is taken from each in turn: it does no more than they
    text = (
        f"rank {late} is late: the others wait {lost_ms:.1f} ms of a step of {mine.step_ms:.1f} ms for it, "
        f"{caused[late]:.2f} s in all; it spends {mine.phases_ms[phase]:.1f} ms in {phase}, the others "
        f"{usual[phase]:.1f} ms"
    )
    lever = f"give rank {late} as much work as the others; else its core or device is slower: lockstep doctor"
    if phase in ("data", "other"):
        what = "in its loader" if phase == "data" else "outside data, forward, backward and optimizer"
        lever = f"look at what rank {late} does {what} that the others do not: add --profile steps=10:13 for a trace"
    return Advice("straggler", lost_ms / mine.step_ms, text, lever, late)


def _small_buckets(run: Run, moving: float) -> list[Advice]:
    """Many small collectives: each pays the latency anew."""
    record = run.ranks[min(run.ranks)]
    listed = [line for line, _ in weighted(record.lines) if line.ops][-_MANY:]
    members = Counter(op.key for one in run.ranks.values() for line in one.lines for op in line.ops or ())
    stood = [[op for op in line.ops or () if not op.is_message and op.began_us >= 0] for line in listed]
    sizes = [[of_all(op, members[op.key]).bytes for op in each] for each in stood]
    small = [[size for size in each if 0 < size < _SMALL_BYTES] for each in sizes]
    count = statistics.fmean(map(len, small)) if small and min(map(len, small)) >= _MANY else 0.0
    size = statistics.fmean(itertools.chain(*small)) if count else 0.0
    sent = record.buckets
    if sent is not None and sent["count"] >= _MANY and sent["bytes"] < _SMALL_BYTES * sent["count"]:
        count, size = sent["count"], sent["bytes"] / sent["count"]
    if not count or moving < _COMMUNICATION / 3 or _silent(run):
        return []
    text = f"{count:.0f} collectives of {size / 1024:.0f} KiB in each step pay their latency one by one"
    return [Advice("small buckets", moving, text, _SEND_LARGER[_is_sharded(run)])]


def _is_sharded(run: Run) -> bool:
    layouts = [note.fields for record in run.ranks.values() for note in record.notes if note.kind == "layout"]
    return any(re.search("shard|FSDP|FullySharded", str(layout.get("strategy"))) for layout in layouts[-1:])
