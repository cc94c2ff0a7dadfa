"""What `lockstep run` costs an unchanged script of stock DistributedDataParallel: guard and record on, and both off.

    python benchmarks/bench_unchanged.py [--quick] [--record]

Two pairs of ranks train the same, one started with everything on, as it is by default, and one with `--guard off
--record off`. They take turns of some steps: while one pair trains, the other waits at a pipe, and both see the machine
in the same mood. The first steps of a turn do not count: they find caches that the other pair has used, where in a run
each step finds those of a step of its own. A step has 8 buckets, each averaged by torch's C++. Where a process finds
its memory makes its steps longer or shorter for all of its life, by up to 0.1 milliseconds: so the pairs are started
anew again and again, and what counts is the median of the starts.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench_observe import GOAL
from harness import Result, Samples, arguments, compare, interleaved, interval_95, report
from machine import ROOT
from unchanged_script import FIGURES

WORLD_SIZE = 2
SCRIPT = ROOT / "benchmarks" / "unchanged_script.py"
TURN, SETTLING = 10, 3  # steps of a turn; those at its beginning that do not count
PATIENCE_S = 1.0  # between two looks whether the job is there
OFF = ("--guard", "off", "--record", "off")


@contextlib.contextmanager
def job(flags: Sequence[str], folder: Path) -> Iterator[Callable[[int], Mapping[str, float]]]:
    """A variant: a turn of a job that is started with `flags`. Microseconds of a step: of the slower rank, of all."""
    folder.mkdir()
    names = [f"{way}-{rank}" for way in ("go", "done") for rank in range(WORLD_SIZE)]
    for name in names:
        os.mkfifo(folder / name)
    command = [sys.executable, "-m", "lockstep", "run", *flags, f"--nproc-per-node={WORLD_SIZE}", str(SCRIPT), "."]
    with (folder / "output").open("w") as output, contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=output, stderr=output, cwd=folder))
        files = [
            stack.enter_context((folder / name).open("r+b", 0)) for name in names
        ]  # both ways: opening waits for nobody
        goes, dones = files[:WORLD_SIZE], files[WORLD_SIZE:]

        def step() -> tuple[float, float]:
            for go in goes:
                go.write(b".")
            for done in dones:
                while not select.select([done], [], [], PATIENCE_S)[0]:
                    if process.poll() is not None:
                        raise RuntimeError((folder / "output").read_text()[-2000:])
            walls, cpus = zip(*(FIGURES.unpack(done.read(FIGURES.size)) for done in dones), strict=True)
            return max(walls), statistics.fmean(cpus)

        def turn(_: int) -> dict[str, float]:
            steps = [step() for _ in range(TURN)][SETTLING:]
            walls, cpus = map(statistics.fmean, zip(*steps, strict=True))
            return {"wall": 1e6 * walls, "main thread": 1e6 * cpus}

        try:
            yield turn
        finally:
            process.terminate()


def measured(turns: int) -> dict[str, Samples]:
    """Metric -> variant -> one figure per turn, of one start of both."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        flags = {"on": (), "off": OFF}
        variants = {name: stack.enter_context(job(given, Path(folder) / name)) for name, given in flags.items()}
        return interleaved(variants, turns, warmup=5)


def ratio(metric: str, starts: Sequence[Samples]) -> Result:
    """How much longer a step is."""
    pairs = [[*zip(start["on"], start["off"], strict=True)] for start in starts]
    added = [statistics.median(on - off for on, off in turns) for turns in pairs]
    ratios = [statistics.median(on / off for on, off in turns) for turns in pairs]
    return compare(
        f"step of an unchanged script, 8 buckets, {metric}: all on / all off",
        [on for turns in pairs for on, _ in turns],
        [off for turns in pairs for _, off in turns],
        unit="us",
        world_size=WORLD_SIZE,
        goal=GOAL,
        starts=len(starts),
        added_us=round(statistics.median(added), 1),
        added_us_95=interval_95(float, added),
        paired_ratio=round(statistics.median(ratios), 4),
        paired_95=interval_95(float, ratios),
    )


def main() -> None:
    """Measure on two ranks of this machine."""
    options = arguments("cost of lockstep run for an unchanged script").parse_args()
    starts = [measured(40) for _ in range(3 if options.quick else 15)]
    results = [ratio(metric, [start[metric] for start in starts]) for metric in starts[0]]
    report("unchanged", results, record=options.record)


if __name__ == "__main__":
    main()
