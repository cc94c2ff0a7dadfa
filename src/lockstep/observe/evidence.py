"""What is kept of a finding: for every rank where it stands and what it did last, as text."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lockstep.observe.flight import Record
from lockstep.observe.status import Sight
from lockstep.observe.wording import Finding, step_after


def keep_evidence(
    folder: str, finding: Finding, sights: Mapping[int, Sight], records_of: Callable[[int], Sequence[Record]]
) -> None:
    """Write finding.txt, a file for each rank that is seen, and the stacks of all threads of this process.

    Nothing where that cannot be written (a full or read-only disk): the finding itself is said and raised.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with open(place / "finding.txt", "a") as file:
            file.write(finding.text + "\n\n")
        for rank, sight in sights.items():
            (place / f"rank-{rank}.txt").write_text("\n".join(_lines(sight, records_of(rank))) + "\n")
        with open(place / f"threads-of-pid-{os.getpid()}.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:
        return


def _lines(sight: Sight, records: Sequence[Record]) -> list[str]:
    status = sight.status
    gone = ", its process has ended" if sight.is_gone else ""
    return [
        f"rank {status.rank}, pid {status.pid} on {status.host}, {step_after(status.step)}, {status.state}{gone}",
        f"as of {sight.age_s:.1f} s ago; at this place without moving for {status.unmoved_s:.1f} s:",
        *(f"  {line}" for line in reversed(status.stack)),
        "last operations, the newest last:",
        *(f"  {line_of(record)}" for record in records),
    ]


def line_of(record: Record) -> str:
    """`#6503 step 812 world seq 6503  all_reduce float32 [262144] sum  train.py:88 train_step  1.200 ms`"""
    took = f"{(record.left_ns - record.entered_ns) / 1e6:.3f} ms" if record.left_ns else "under way"
    label = f"  {record.label!r}" if record.label else ""
    place = f"#{record.number} {step_after(record.step)} {record.group} seq {record.seq}"
    return f"{place}  {record.text}  {record.site}{label}  {took}"
