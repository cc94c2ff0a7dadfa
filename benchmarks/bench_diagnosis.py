"""How long after a fault lockstep says who did it: the programs of `lockstep demo`, from the fault to the report.

The moment of the fault is written down by the rank that does it, just before it does; where ranks contradict each
other it is that of the last of them. The end is when the first line of the report has been read.

python benchmarks/bench_diagnosis.py [--quick] [--record] [NAME ...]
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import Result, arguments, report
from lockstep.cli import demo_side
from lockstep.cli.demo_side import Side
from lockstep.demos.catalog import DEMOS, Demo

ROUNDS, PATIENCE_S = 3, 30.0
HANG_S = 2.0  # LOCKSTEP_HANG_S of all programs here
GOAL = "at most 3 s"
_BEGIN = str(Path(__file__).with_name("diagnosis_begin.py"))

FAULTS: Mapping[str, str] = {  # name -> the line before which the fault is, and on which ranks and when
    "skipped_collective": "17 rank == 1 and step == 20",
    "missing_collective": "13 True",
    "early_exit": "9 True",
    "different_collectives": "9 True",
    "gather_against_reduce": "9 True",
    "barrier_against_reduce": "8 True",
    "object_against_tensor": "8 True",
    "different_sizes": "8 True",
    "different_sizes_gathered": "9 True",
    "different_shapes": "11 True",
    "short_broadcast": "11 True",
    "different_dtypes": "11 True",
    "different_halves": "11 True",
    "wider_dtype": "8 True",
    "different_reductions": "11 True",
    "own_roots": "8 True",
    "both_receive": "9 True",
    "groups_in_other_order": "9 True",
    "group_on_one_rank": "9 True",
    "frozen_before": "11 True",
    "frozen_after": "12 True",
    "frozen_differently": "10 True",
    "wider_layer": "10 True",
    "extra_layer": "9 True",
    "other_order": "22 True",
    "other_seed": "13 True",
    "past_ddp": "15 step == 20",
    "step_on_one_rank": "13 rank == 1 and step == 20",
    "other_learning_rate": "12 True",
    "flipped_bit": "17 True",
    "skipped_batch": "15 True",
    "no_sync_on_one_rank": "14 rank == 1 and step == 20",
    "unused_parameter": "20 True",
    "unused_branch": "21 True",
    "fewer_batches": "11 rank == 0 and _ == 4",
    "forgotten_set_epoch": "14 _ == 1",
    "no_sampler": "13 True",
    "nan_on_one_rank": "13 True",
    "batch_norm_buffers": "14 True",
    "changed_in_flight": "13 True",
    "read_in_flight": "12 True",
    "same_path": "16 True",
    "killed": "13 True",
    "stopped": "13 True",
    "exception": "10 True",
    "exception_kept_alive": "15 True",
}
_MEETING = "7 True"  # of the programs whose environment is wrong: each process of them


def seconds_until_said(demo: Demo) -> float:
    """From the fault to the first line of what lockstep says of it.  Raises: RuntimeError where it says nothing."""
    head = re.compile(demo.says[0])
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        variables = {
            "LOCKSTEP_HANG_S": str(HANG_S),
            "LOCKSTEP_EVIDENCE": "",
            "DIAGNOSIS_FAULT": FAULTS.get(demo.name, _MEETING),
            "DIAGNOSIS_MARKS": str(folder / "marks"),
        }
        said: list[str] = []
        with Side(demo, "lockstep", folder, variables) as side:
            for line in side.lines(PATIENCE_S):
                now_s = time.monotonic()
                said.append(line.text)
                if head.search(line.text):
                    return now_s - max(map(float, (folder / "marks").read_text().split()))
    raise RuntimeError(f"{demo.name}: nobody said {demo.says[0]!r}:\n" + "\n".join(said))


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments("seconds from a fault to the report of it")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these demos")
    options = parser.parse_args(words)
    demo_side._BEGIN = _BEGIN  # pyright: ignore[reportPrivateUsage]
    names = options.names or [name for name, demo in DEMOS.items() if demo.says]
    rounds = 1 if options.quick else ROUNDS
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            taken[name].append(seconds_until_said(DEMOS[name]))
            print(f"round {number + 1}: {name} {taken[name][-1]:.2f} s", file=sys.stderr, flush=True)
    found = [
        Result.of_value(
            f"row {DEMOS[name].row}, {name}", statistics.median(each), unit="s", better="less",
            world_size=len(DEMOS[name].places) or DEMOS[name].ranks, rounds=rounds, goal=GOAL,
            worst=round(max(each), 3),
        )
        for name, each in taken.items()
    ]  # fmt: skip
    report("diagnosis", found, record=options.record)


if __name__ == "__main__":
    main()
