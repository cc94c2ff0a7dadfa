"""`lockstep profile [RUN]`: where the time of a run went, per rank, and what would make it faster."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.launch.words import RUN_FOLDER, Words
from lockstep.observe.profile.phases import PHASES
from lockstep.observe.profile.run_record import Run
from lockstep.observe.profile.verdict import Verdict, judge
from lockstep.observe.report.run_rows import look
from lockstep.observe.report.source import RunReader, find_run
from lockstep.observe.report.writing import shown

_MATMULS, _MATMUL_S = (384, 1024), 0.2  # a core that is shared is ours for the small one; many threads need the large
_PAIRS_MAX = 5


def profile(words: Sequence[str]) -> int:
    """`lockstep profile ...`; the exit code. Raises: ConfigError for a folder without a record."""
    parser = Words(prog="lockstep profile", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=RUN_FOLDER)
    noted = "of a script per sample; by default what `lockstep train` has noted"
    arithmetic = f"arithmetic of forward and backward, {noted}"
    parser.add_argument("--flops-per-token", type=float, default=0.0, metavar="FLOPS", help=arithmetic)
    can = "what the device of one rank can do; by default as a short matrix product has it here"
    parser.add_argument("--peak-tflops", type=float, default=0.0, metavar="TFLOPS", help=can)
    args = parser.read([word.replace("_", "-") if word.startswith("--") else word for word in words])  # either way
    for flag, number in (("--flops-per-token", args.flops_per_token), ("--peak-tflops", args.peak_tflops)):
        if not 0 <= number < math.inf:
            raise ConfigError(f"{flag} {number:g}: it is a number above 0")
    lines = describe(args.run, args.flops_per_token, args.peak_tflops)
    sys.stdout.write("".join(line + "\n" for line in lines))
    return 0


def describe(folder: Path | None, flops_per_token: float = 0.0, peak_tflops: float = 0.0) -> Iterator[str]:
    """What is printed, line by line. None: of the newest run; 0: as the run, or a measurement here, says."""
    source, _ = look(RunReader(find_run(folder, Path("runs"))))
    run, problems = source.run, source.problems
    if not run.ranks:
        raise ConfigError("; ".join([f"{shown(source.folder)} has no record of a rank that can be read", *problems]))
    per_token = flops_per_token or max(record.starts[-1].flops_per_token for record in run.ranks.values())
    peak, how = _peak(peak_tflops, run) if per_token else (0.0, "")
    verdict = judge(run, peak_flops=peak, flops_per_token=per_token)
    if not verdict.shares:
        why = "; ".join(problems) or "step() of an optimizer of torch ends one, outside of join()"
        raise ConfigError(f"{shown(run.folder)} has no step that has ended: {why}")
    yield from (f"damaged  {problem}; what can be read is counted" for problem in problems)
    yield from _summary(run, verdict, how)
    yield ""
    yield from _table(verdict)
    if counted := max(sum(line.counted for line in record.lines) for record in run.ranks.values()):
        yield f"of {counted} steps only time and data were taken: the rest is as in steps that were timed before"
        yield "(what is beyond twice that is in `other`)"
    yield from _waiting(verdict)
    yield from _what_if(verdict)
    if (trace := run.folder / "trace.json").is_file():
        yield f"\ntrace    {shown(trace)}: open it in chrome://tracing or ui.perfetto.dev"


def _summary(run: Run, verdict: Verdict, how: str) -> Iterator[str]:
    share = verdict.shares[0]
    rates = [f"{verdict.step_ms:.1f} ms per step"]
    rates += [f"{share.tokens_per_s:,.0f} tokens/s"] if share.tokens_per_s else []
    samples = sum(each.samples_per_s for each in verdict.shares)
    rates += [f"{samples:,.0f} samples/s"] if samples else []
    missing = "--peak-tflops" if verdict.flops_per_s else "--flops-per-token, of a script per sample"
    unknown = f"give {missing}" if samples or share.tokens_per_s else "nobody counts samples"
    rates += [f"no MFU: {unknown}" if verdict.mfu is None else f"MFU {verdict.mfu:.1%} ({how})"]
    ranks = f"{len(run.ranks)} of {run.world_size} ranks"
    steps = "no step was ended: all of it is told as one" if run.is_whole else f"{share.steps} steps"
    yield f"run      {shown(run.folder)}: {ranks}, {steps}, {', '.join(rates)}"
    overlap = "" if verdict.overlap is None else f", {verdict.overlap:.0%} of communication is hidden"
    yield f"balance  the slowest rank works {verdict.imbalance:.2f} x the mean{overlap}"
    for advice in verdict.advice:
        yield f"verdict  {advice.kind}: {advice.text}"
        yield f"         to change that: {advice.lever}"
    if verdict.unseen:
        yield f"verdict  exposed communication is at least as given: of {verdict.unseen} nobody sees who stands in it"
    elif not verdict.advice:
        yield "verdict  nothing stands out"


def _table(verdict: Verdict) -> Iterator[str]:
    names = ("rank", "step", *PHASES, "waiting", "hidden", "longest", "RSS MiB")
    rows: list[tuple[str, ...]] = []
    for one in verdict.shares:
        times_ms = (one.step_ms, *one.phases_ms.values(), one.waited_ms, one.hidden_ms, one.longest_ms)
        rows.append((str(one.rank), *(f"{ms:.2f}" for ms in times_ms), str(one.rss_mib)))
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    if verdict.is_on_gpu:
        yield "times are the GPU's: when its stream came to what the rank's thread had queued"
    yield "milliseconds per step; `exposed` is communication that the rank stands in, of it `waiting` for another rank"
    for row in (names, *rows):
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def _waiting(verdict: Verdict) -> Iterator[str]:
    pairs = [pair for pair in verdict.waits.pairs if pair.waited_s >= 0.005][:_PAIRS_MAX]
    if pairs:
        yield "\nwho waited for whom"
    for pair in pairs:
        place = pair.label if pair.site.startswith("<") else pair.site  # a program without a file has no lines
        yield f"  rank {pair.rank} waited {pair.waited_s:.2f} s for rank {pair.last}, mostly at {place} ({pair.text})"


def _what_if(verdict: Verdict) -> Iterator[str]:
    if verdict.what_ifs:
        yield "\nwhat if (estimates: recorded steps, played again)"
    for answer in verdict.what_ifs:
        least = " at least: nothing is known of what torch's C++ hides" if answer.is_least else ""
        yield f"  {answer.name:<32} {answer.step_ms:8.2f} ms  {answer.speed_up:5.2f} x{least}"


def _peak(tflops: float, run: Run) -> tuple[float, str]:
    """(arithmetic per second of one rank's device, how that is known)."""
    if tflops:
        return tflops * 1e12, f"of {tflops:g} TFLOP/s per rank, as given"
    start = run.ranks[min(run.ranks)].starts[-1]
    if start.device != "cpu":
        return 0.0, ""
    peak = measured_peak(start.threads)
    return peak, f"of {peak / 1e12:.2f} TFLOP/s per rank, as a float32 matrix product has it here"


def measured_peak(threads: int) -> float:
    """Arithmetic per second of `threads` threads of this machine, by a float32 matrix product; takes half a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    best = 0.0
    try:
        for size in _MATMULS:
            matrix, until = torch.ones(size, size), time.perf_counter() + _MATMUL_S
            while (begin := time.perf_counter()) < until:
                torch.mm(matrix, matrix)
                best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    finally:
        torch.set_num_threads(before)
    return best
