"""What changes from step to step: the speed, and whatever the program has logged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.observe.profile.run_record import Run
from lockstep.observe.report.source import Source
from lockstep.observe.report.step_bins import bins_of

_POINTS_MAX, _ALL_POINTS_MAX, _CURVES_MAX = 1000, 9000, 30
_FIRST = ("loss", "val_loss", "tokens/s", "steps/s", "samples/s", "lr", "grad_norm")  # then by name

Points = dict[int, list[float]]  # of each step, of each rank


def curves_of(source: Source) -> list[dict[str, Any]]:
    """At most 1000 points each: means, with the lowest and the highest where one stands for several."""
    found = {**_speed(source.run), **_logged(source)}
    names = sorted(found, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))[:_CURVES_MAX]
    most = min(_POINTS_MAX, _ALL_POINTS_MAX // max(1, len(names)))
    return [_curve(name, found[name], most) for name in names]


def _curve(name: str, points: Points, most: int) -> dict[str, Any]:
    bins = bins_of(min(points), points, most)
    values: list[list[float]] = [[] for _ in bins.last]
    for step, seen in points.items():
        values[bins.of(step)] += seen
    is_thinned = any(min(seen) != max(seen) for seen in values if all(map(math.isfinite, seen)))
    return {
        "name": name,
        "steps": bins.last,
        "values": [_digits(sum(seen) / len(seen)) for seen in values],
        "low": [_digits(min(seen)) for seen in values] if is_thinned else None,
        "high": [_digits(max(seen)) for seen in values] if is_thinned else None,
    }


def _digits(value: float) -> float | None:
    """Six of them; None for what is not finite, which JSON has no word for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _logged(source: Source) -> Mapping[str, Points]:
    found: dict[str, Points] = defaultdict(dict)
    for name, step, _, value in values_of(source):
        found[name].setdefault(step, []).append(value)
    return found


def values_of(source: Source) -> Iterator[tuple[str, int, int, float]]:
    """(name, step, rank, value) of all that was logged; what was logged of a step again replaces it."""
    for rank, record in source.run.ranks.items():
        held = {}
        for note in record.notes:
            if note.kind == "values":
                step = note.fields["step"]
                held.update({(n, step): v for n, v in note.fields.items() if n != "step" and type(v) in (int, float)})
        yield from ((name, step, rank, float(value)) for (name, step), value in held.items())


def _speed(run: Run) -> Mapping[str, Points]:
    """Per second, of all ranks together: each rank's own view is one value."""
    found: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    for record in () if run.is_whole else run.ranks.values():
        for line in record.lines:
            for name, done in (("steps/s", line.count), ("tokens/s", line.tokens), ("samples/s", line.samples)):
                if done and line.wall_us > 0:
                    found[name][line.step].append(done / (line.wall_us / 1e6))
    samples = found.pop("samples/s", None)
    if samples and "tokens/s" not in found:
        found["samples/s"] = {step: [sum(rates)] for step, rates in samples.items()}
    return found
