"""How long each rank took for its steps, and what with."""

from __future__ import annotations

from typing import Any

from lockstep.observe.profile.phases import PHASES
from lockstep.observe.profile.run_record import RankRecord, Run
from lockstep.observe.report.step_bins import Bins, bins_of

_BINS_MAX, _CELLS_MAX = 400, 48_000  # cells of all phases and ranks together


def heat_of(run: Run) -> dict[str, Any]:
    """Rank by bin of steps: microseconds per step, of it each phase, and the longest step; None where it has none."""
    ranks = sorted(run.ranks)
    lines = [line for rank in ranks for line in run.ranks[rank].lines]
    first = min((line.step - line.count + 1 for line in lines), default=1)
    most = min(_BINS_MAX, max(8, _CELLS_MAX // ((len(PHASES) + 2) * max(1, len(ranks)))))
    bins = bins_of(first, (line.step for line in lines), most)
    rows = [_row(run.ranks[rank], bins) for rank in ranks]
    return {
        "first": bins.first,
        "last": bins.last,
        "ranks": ranks,
        "wall_us": [row[0] for row in rows],
        "longest_us": [row[1] for row in rows],
        "phases": PHASES,
        "counted": max((sum(line.counted for line in record.lines) for record in run.ranks.values()), default=0),
        "phases_us": {name: [row[2 + at] for row in rows] for at, name in enumerate(PHASES)},
    }


def _row(record: RankRecord, bins: Bins) -> list[list[int | None]]:
    """Of each bin the mean step, the longest, and the mean of each phase."""
    count, longest, *sums = ([0] * len(bins.last) for _ in range(3 + len(PHASES)))
    for line in record.lines:
        at = bins.of(line.step)
        count[at] += line.count
        longest[at] = max(longest[at], line.longest_us)
        for total, spent_us in zip(sums, (line.wall_us, *line.phases_us), strict=True):
            total[at] += spent_us
    means = [[total // n if n else None for total, n in zip(row, count, strict=True)] for row in sums]
    return [means[0], [us if n else None for us, n in zip(longest, count, strict=True)], *means[1:]]
