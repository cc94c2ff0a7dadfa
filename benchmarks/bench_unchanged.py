"""What `lockstep run` costs an unchanged script of stock DistributedDataParallel: guard and record on, as by default.

    python benchmarks/bench_unchanged.py [--quick] [--record]

Two ranks take turns of steps with all that lockstep puts into torch, and without: the same processes, the same minute.
The first steps of a turn do not count: they find caches that steps of the other kind have used. A step has 8 buckets,
each averaged by torch's C++. Twice: in the first hundred steps of a run, each of which is looked at closely, and
later, when one in sixteen is (see `observe/pace.py`). The ranks are started anew a few times, and what counts is the
median of the starts. The guard's own thread is there in both kinds; what it takes is a figure of its own.

Then the same, early steps of three starts, where Python calls each collective, and each is recorded in every step:
`fully_shard`, and gradients that are averaged by hand.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench_observe import GOAL
from harness import Result, Samples, arguments, compare, interleaved, interval_95, report
from machine import ROOT
from unchanged_turns import FIGURES

WORLD_SIZE = 2
SCRIPT = ROOT / "benchmarks" / "unchanged_turns.py"
TURN, SETTLING = 28, 4  # steps of a turn; those at its beginning that do not count
EARLY, LATER = 16, 32  # turns of each kind
OF_PYTHON = {"fsdp2": ("16 all-gathers and 8 reduce-scatters of fully_shard", 24), "hand": ("32 all_reduces", 32)}
PATIENCE_S = 1.0  # between two looks whether the job is there

Turn = Callable[..., dict[str, float]]  # microseconds of a step, of the slower rank or the mean of all


@contextlib.contextmanager
def job(folder: Path, kind: str) -> Iterator[Turn]:
    """A turn of a job, with what lockstep puts into torch or without."""
    names = [f"{way}-{rank}" for way in ("go", "done") for rank in range(WORLD_SIZE)]
    for name in names:
        os.mkfifo(folder / name)
    command = [sys.executable, "-m", "lockstep", "run", f"--nproc-per-node={WORLD_SIZE}", str(SCRIPT), ".", kind]
    with (folder / "output").open("w") as output, contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output, cwd=folder))
        files = [
            stack.enter_context((folder / name).open("r+b", 0)) for name in names
        ]  # both ways: opening waits for nobody
        goes, dones = files[:WORLD_SIZE], files[WORLD_SIZE:]

        def step() -> tuple[float, ...]:
            for done in dones:
                while not select.select([done], [], [], PATIENCE_S)[0]:
                    if process.poll() is not None:
                        raise RuntimeError((folder / "output").read_text()[-2000:])
            walls, cpus, guards = zip(*(FIGURES.unpack(done.read(FIGURES.size)) for done in dones), strict=True)
            return max(walls), statistics.fmean(cpus), statistics.fmean(guards)

        def turn(is_on: bool, is_later: bool = False) -> dict[str, float]:
            for go in goes:
                go.write(bytes([TURN, is_on, is_later]))
            steps = [step() for _ in range(TURN)][SETTLING:]
            means = [1e6 * statistics.fmean(figures) for figures in zip(*steps, strict=True)]
            return dict(zip(("wall", "main thread", "guard's thread"), means, strict=True))

        try:
            yield turn
        finally:
            process.terminate()


def measured(kind: str, early: int, later: int) -> dict[str, dict[str, Samples]]:
    """Part of the run -> metric -> "on" or "off" -> one figure per turn, of one start."""
    with tempfile.TemporaryDirectory() as folder, job(Path(folder), kind) as turn:
        first = interleaved({"on": lambda _: turn(True), "off": lambda _: turn(False)}, early, warmup=1)
        if not later:
            return {"first steps": first}
        variants = {"on": lambda _: turn(True, True), "off": lambda _: turn(False, True)}
        return {"first steps": first, "later": interleaved(variants, later, warmup=2)}


def ratio(what: str, metric: str, starts: Sequence[Samples], operations: int) -> Result:
    """How much longer a step is."""
    pairs = [[*zip(start["on"], start["off"], strict=True)] for start in starts]
    added = [statistics.median(on - off for on, off in turns) for turns in pairs]
    ratios = [statistics.median(on / off for on, off in turns) for turns in pairs]
    return compare(
        f"step of an unchanged script, {what}, {metric}: all on / all off",
        [on for turns in pairs for on, _ in turns],
        [off for turns in pairs for _, off in turns],
        unit="us",
        world_size=WORLD_SIZE,
        goal=GOAL,
        starts=len(starts),
        added_us=round(statistics.median(added), 1),
        added_us_per_operation=round(statistics.median(added) / operations, 2),
        added_us_95=interval_95(float, added),
        paired_ratio=round(statistics.median(ratios), 4),
        paired_95=interval_95(float, ratios),
    )


def own_thread(part: str, walls: Sequence[Samples], guards: Sequence[Samples]) -> Result:
    """What the guard's thread takes of a core while the ranks train."""
    shares = [
        100 * guard / wall
        for clock, spent in zip(walls, guards, strict=True)
        for wall, guard in zip(clock["on"], spent["on"], strict=True)
    ]
    return Result.of_value(
        f"step of an unchanged script, 8 buckets, {part}: the guard's own thread, of a core",
        statistics.fmean(shares),
        unit="%",
        better="less",
        world_size=WORLD_SIZE,
        rounds=len(shares),
        goal="",
    )


def main() -> None:
    """Measure on two ranks of this machine."""
    options = arguments("cost of lockstep run for an unchanged script").parse_args()
    starts = [measured("ddp", EARLY, LATER) for _ in range(1 if options.quick else 7)]
    results = []
    for part in starts[0]:
        walls, mains, guards = ([start[part][metric] for start in starts] for metric in starts[0][part])
        what = f"8 buckets, {part}"
        results += [
            ratio(what, "wall", walls, 8),
            ratio(what, "main thread", mains, 8),
            own_thread(part, walls, guards),
        ]
    for kind, (what, operations) in OF_PYTHON.items():
        starts = [measured(kind, EARLY, 0)["first steps"] for _ in range(1 if options.quick else 3)]
        for metric in ("wall", "main thread"):
            results.append(ratio(what, metric, [start[metric] for start in starts], operations))
    report("unchanged", results, record=options.record)


if __name__ == "__main__":
    main()
