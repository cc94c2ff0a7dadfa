"""What `lockstep run` costs an unchanged script of stock DistributedDataParallel: guard and record on, and both off.

    python benchmarks/bench_unchanged.py [--quick] [--record]

Two pairs of ranks train the same, one started with everything on, as it is by default, and one with `--guard off
--record off`. They take turns: while one pair does a step, the other waits at a pipe. So both see the machine in the
same mood, and both come back to caches that the other one has used. A step has 8 buckets, each averaged by torch's C++.
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
from harness import Result, Samples, arguments, compare, interleaved, paired, report
from machine import ROOT
from unchanged_script import FIGURES

WORLD_SIZE = 2
SCRIPT = ROOT / "benchmarks" / "unchanged_script.py"
PATIENCE_S = 1.0  # between two looks whether the job is there
OFF = ("--guard", "off", "--record", "off")


@contextlib.contextmanager
def job(flags: Sequence[str], folder: Path) -> Iterator[Callable[[int], Mapping[str, float]]]:
    """A variant: one step of a job that is started with `flags`. Microseconds of the slower rank, and of all ranks."""
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

        def step(_: int) -> dict[str, float]:
            for go in goes:
                go.write(b".")
            for done in dones:
                while not select.select([done], [], [], PATIENCE_S)[0]:
                    if process.poll() is not None:
                        raise RuntimeError((folder / "output").read_text()[-2000:])
            walls, cpus = zip(*(FIGURES.unpack(done.read(FIGURES.size)) for done in dones), strict=True)
            return {"wall": 1e6 * max(walls), "main thread": 1e6 * statistics.fmean(cpus)}

        try:
            yield step
        finally:
            process.terminate()


def ratio(metric: str, samples: Samples) -> Result:
    """How much longer a step is."""
    on, off = samples["on"], samples["off"]
    return compare(
        f"step of an unchanged script, 8 buckets, {metric}: all on / all off",
        on,
        off,
        unit="us",
        world_size=WORLD_SIZE,
        goal=GOAL,
        added_us=round(statistics.median(a - b for a, b in zip(on, off, strict=True)), 1),
        **paired(on, off),
    )


def main() -> None:
    """Measure on two ranks of this machine."""
    options = arguments("cost of lockstep run for an unchanged script").parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        flags = {"on": (), "off": OFF}
        variants = {name: stack.enter_context(job(given, Path(folder) / name)) for name, given in flags.items()}
        figures = interleaved(variants, 100 if options.quick else 3000, warmup=50)
    report("unchanged", [ratio(metric, samples) for metric, samples in figures.items()], record=options.record)


if __name__ == "__main__":
    main()
