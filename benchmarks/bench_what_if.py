"""What the profile foretells of a change, against the same run with that change made.

    python benchmarks/bench_what_if.py [--quick] [--record] [WAY-CASE ...]

`what_if_script.py` runs under `lockstep run` and takes turns: some steps as they are, some with one thing really
changed, so that both see the machine in the same mood. The steps of a turn as it is are judged as a run of their own;
what it answers is compared with what the steps of the next turn took. Half the bytes per second: the ranks run in a
network of their own, whose device `tc` shapes; where that is not allowed, these cases are left out. The cases that
docs/profile.md has take two and a half minutes; a WAY (ddp, lockstep, plain, fsdp) and a CASE (late, slow, network,
data) may be asked for in any pair.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness import Result, arguments, compare, paired, report
from lockstep.observe.profile.run_record import RankRecord, Run, Steps
from lockstep.observe.profile.verdict import judge
from lockstep.observe.report.source import RunReader
from machine import ROOT
from what_if_script import RATE_MBIT, SETTLING, SHAPE, TURN

SCRIPT = ROOT / "benchmarks" / "what_if_script.py"
ANSWERS = {"late": "as fast as", "slow": "as fast as", "network": "network twice", "data": "data always"}
CASES = [*(f"ddp-{case}" for case in ANSWERS), "lockstep-late", "lockstep-slow"]
CASES += [f"{way}-network" for way in ("lockstep", "plain", "fsdp")]
RANKS = {"ddp-late": 3}  # else 2
GOAL = "0.90 to 1.10"


def shaped(command: str) -> list[str]:
    """`command` in a network of its own, with no other device than a slow loopback."""
    shape = SHAPE.format(RATE_MBIT)
    return ["unshare", "--net", "sh", "-c", f"ip link set lo up && tc qdisc add dev lo root tbf {shape} && {command}"]


def record_of(name: str, folder: Path, turns: int) -> Run:
    """Run the script in that case."""
    way, case = name.split("-")
    size = RANKS.get(name, 2)
    words = [sys.executable, "-m", "lockstep", "run", f"--nproc-per-node={size}", f"--record={folder}"]
    words += [str(SCRIPT), way, case, str(turns)]
    command = shaped(" ".join(words)) if case == "network" else words
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_SHM": "off"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=folder.parent)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return RunReader(folder).read().run


def turn_of(run: Run, number: int) -> Run:
    """The steps of one turn, as if they were all of the run; with what was noted in turns like it."""

    def cut(record: RankRecord) -> RankRecord:
        first = number * TURN + SETTLING - 1  # one more: what follows is without the first two
        lines = [line for line in record.lines if first <= line.step <= (number + 1) * TURN]
        notes = tuple(one for one in record.notes if one.step is None or (one.step - 2) // TURN % 2 == number % 2)
        return replace(record, lines=tuple(lines), notes=notes)

    return replace(run, ranks={rank: cut(record) for rank, record in run.ranks.items()})


def taken_ms(run: Run) -> float:
    """A step of the run, by its steady ones."""

    def mean(lines: tuple[Steps, ...]) -> float:
        return sum(line.wall_us for line in lines) / sum(line.count for line in lines) / 1e3

    return max(mean(record.steady) for record in run.ranks.values())


def figures(name: str, turns: int) -> Iterator[tuple[float, float, float, float]]:
    """Of each pair of turns: a step as it was, as it was played again, as foretold, and as it then was."""
    with tempfile.TemporaryDirectory() as folder:
        run = record_of(name, Path(folder) / "record", turns)
    for number in range(0, turns - 1, 2):
        before, after = turn_of(run, number), turn_of(run, number + 1)
        answers = judge(before).what_ifs
        foretold = next(answer for answer in answers if ANSWERS[name.split("-")[1]] in answer.name)
        yield taken_ms(before), answers[0].step_ms, foretold.step_ms, taken_ms(after)


def result(name: str, turns: int) -> Result:
    """The claim of one case."""
    before, again, foretold, measured = zip(*figures(name, turns), strict=True)
    gains = [(was - will) / (was - is_) for was, will, is_ in zip(before, foretold, measured, strict=True)]
    return compare(
        f"{name}: step as foretold / as measured after the change",
        foretold,
        measured,
        unit="ms",
        world_size=RANKS.get(name, 2),
        goal=GOAL,
        before_ms=round(statistics.median(before), 1),
        played_again=round(statistics.median(a / b for a, b in zip(again, before, strict=True)), 3),
        gain_of_gain=round(statistics.median(gains), 2),
        **paired(foretold, measured),
    )


def main() -> None:
    """Measure each case."""
    parser = arguments("what-if answers against runs that were changed")
    parser.add_argument("cases", nargs="*", metavar="WAY-CASE", default=CASES)
    options = parser.parse_args()
    may = subprocess.run(shaped("true"), capture_output=True, check=False).returncode == 0
    found = [
        result(name, 4 if options.quick else 10) for name in options.cases or CASES if may or "network" not in name
    ]
    report("what_if", found, record=options.record)


if __name__ == "__main__":
    main()
