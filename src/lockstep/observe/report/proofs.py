"""What is proved of a run: that each sample was used once, and that the ranks hold one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lockstep.observe.report.source import Source
from lockstep.observe.tally import Tally, tally_from

_CELLS_MAX, _ALL_CELLS_MAX, _EPOCHS_MAX = 2000, 6000, 200
_CHECKS_MAX = 1000

Fields = Mapping[str, Any]
Told = tuple[int, Fields]  # by which rank


# ------------------------------------------------------------------ coverage


def coverage_of(source: Source) -> dict[str, Any] | None:
    """Epoch by epoch; None where no rank has said which samples it used."""
    said: dict[int, dict[str, list[Told]]] = defaultdict(lambda: defaultdict(list))
    for rank, note in source.notes("coverage"):
        said[note.fields["epoch"]][note.attempt].append((rank, note.fields))
    if not said:
        return None
    order: dict[str, int] = {}  # of the attempts: a rank that came later has not seen the first ones
    sizes: dict[str, int] = {}
    for record in source.run.ranks.values():
        for number, start in enumerate(record.starts):
            order[start.attempt] = max(number, order.get(start.attempt, 0))
            sizes[start.attempt] = start.world_size
    epochs: list[dict[str, Any]] = []
    room = _ALL_CELLS_MAX
    for epoch in sorted(said, reverse=True)[:_EPOCHS_MAX]:  # the newest are drawn, where not all can be
        names = sorted(said[epoch], key=order.__getitem__)
        starts = [said[epoch][name] for name in names]
        is_known = len(starts[-1]) == sizes[names[-1]]  # what a rank says last is lost where it is killed
        found = _epoch(epoch, starts, is_last=epoch == max(said) or not is_known)
        room -= len(found["cells"])
        if room < 0:
            found["cells"] = []
        epochs.append(found)
    return {"epochs": epochs[::-1]}


def _epoch(epoch: int, starts: Sequence[Sequence[Told]], *, is_last: bool) -> dict[str, Any]:
    """starts: all that ranks have told of that epoch, by the start of the run."""
    by_rank = dict(starts[-1])
    some = by_rank[min(by_rank)]
    length, (bins, unknown) = some["length"], _bins(starts)
    total = next((fields["total"] for fields in by_rank.values() if "total" in fields), None)
    used = sum((_tally(fields["digest"]) for fields in by_rank.values()), start=Tally())
    samples = total["samples"] if total else sum(fields["samples"] for fields in by_rank.values())
    words = total.get("words", "") if total else ""
    is_sealed = total.get("verdict") == "exact" if total else used == _due(some)
    is_open = is_last or any(fields.get("left_early") for fields in by_rank.values())
    earlier = some.get("earlier", 0)
    twice, missing, where = (0, 0, "") if is_sealed else _uneven(length, bins)
    return {
        "epoch": epoch,
        "length": length,
        "samples": samples,
        "sealed": is_sealed,
        "running": is_open and not is_sealed and samples < length - some.get("dropped", 0) - earlier,
        "digest": total["digest"] if total else used.digest().hex(),
        "twice": max(0, twice - some.get("repeated", 0)),
        "missing": max(0, missing - some.get("dropped", 0) - earlier),
        "earlier": earlier or unknown,
        "repeated": some.get("repeated", 0),
        "dropped": some.get("dropped", 0),
        "examples": "; ".join(filter(None, ("" if is_sealed else words, where))),
        "cells": _cells(length, bins),
    }


def _bins(starts: Sequence[Sequence[Told]], samples: int | None = None) -> tuple[dict[int, list[int]], int]:
    """By rank: how often the last start, and those that it went on from, used samples of each part of the epoch.

    samples: that all had used when this was told; None: the newest. And how many of them are of a start of which
    nothing is known.
    """
    *before, told = starts
    by_rank = {rank: fields for rank, fields in told if samples is None or _whole(fields) == samples}
    bins = {rank: list(fields.get("bins", ())) for rank, fields in by_rank.items()}
    wholes = {_whole(fields) for fields in by_rank.values()}
    whole = wholes.pop() if len(wholes) == 1 else None
    earlier = 0 if whole is None else whole - sum(fields["samples"] for fields in by_rank.values())
    if earlier <= 0:
        return bins, 0
    while before and not any(_whole(fields) == earlier for _, fields in before[-1]):
        before.pop()
    if not before:
        return bins, earlier
    others, unknown = _bins(before, earlier)
    for rank, counts in others.items():
        bins[rank] = [sum(each) for each in zip_longest(bins.get(rank, ()), counts, fillvalue=0)]
    return dict(sorted(bins.items())), unknown


def _whole(fields: Fields) -> int | None:
    """Samples of all ranks, of all starts, where they have put together what they know."""
    return fields["total"]["samples"] if "total" in fields else None


def _due(fields: Fields) -> Tally | None:
    """The tally of all samples, those that the sampler uses twice or leaves out taken into account; None: unknown."""
    if not fields.get("whole"):
        return None
    whole, again, left = (_tally(fields.get(name, "")) for name in ("whole", "again", "left"))
    return whole + again - left


def _tally(digest: str) -> Tally:
    return tally_from(bytes.fromhex(digest)) if digest else Tally()


def _uneven(length: int, bins: Mapping[int, Sequence[int]]) -> tuple[int, int, str]:
    """At least how many samples were used too often, and not at all; where the first of each lie."""
    parts = max(map(len, bins.values()), default=0)
    twice = missing = 0
    words: dict[str, str] = {}
    for part in range(parts):
        first, stop = _first(part, parts, length), _first(part + 1, parts, length)
        used = sum(counts[part] for counts in bins.values() if len(counts) == parts)
        twice += max(0, used - (stop - first))
        missing += max(0, stop - first - used)
        if used != stop - first:
            word = "too often" if used > stop - first else "missing"
            words.setdefault(word, f"{word} among {first} to {stop - 1}: {used} uses of {stop - first} samples")
    return twice, missing, "; ".join(words.values())


def _first(part: int, parts: int, length: int) -> int:
    """The first sample of a bin, as `tally.bins_of` cuts them."""
    return -(-part * length // parts)


def _cells(length: int, bins: Mapping[int, Sequence[int]]) -> list[list[Any]]:
    """[rank, first sample, last sample, uses of each on average]; neighbours that are alike are one."""
    parts = max(map(len, bins.values()), default=0)
    every = max(1, -(-parts * len(bins) // _CELLS_MAX))
    cells: list[list[Any]] = []
    for rank, counts in bins.items():
        row: list[list[Any]] = []
        for part in range(0, len(counts), every):
            first, stop = (_first(min(at, len(counts)), len(counts), length) for at in (part, part + every))
            times = round(sum(counts[part : part + every]) / (stop - first), 6)
            if row and row[-1][3] == times:
                row[-1][2] = stop - 1
            else:
                row.append([rank, first, stop - 1, times])
        cells += row
    return cells


# ------------------------------------------------------------------ replicas


def replicas_of(source: Source) -> dict[str, Any] | None:
    """Each comparison of the ranks' models; None where there was none."""
    equal: dict[int, bool] = {}
    last: Fields = {}
    for _, note in source.notes("replicas"):
        step = note.fields["step"]
        equal[step] = equal.get(step, True) and bool(note.fields["equal"])
        if step >= last.get("step", step):
            last = note.fields
    if not equal:
        return None
    steps = sorted(equal)
    differing = [step for step in steps if not equal[step]]
    good = [step for step in steps if not differing or step < differing[0]]
    shown = sorted({*differing[:_CHECKS_MAX], *steps[:: -(-len(steps) // _CHECKS_MAX)], steps[-1]})
    return {
        "what": last.get("what", ""),
        "checks": [[step, equal[step]] for step in shown],
        "count": len(steps),
        "sealed_until": good[-1] if good else None,
        "digest": last.get("digest", ""),
        "differs": next((n.fields["text"] for _, n in source.notes("finding") if n.fields["kind"] == "replica"), ""),
    }
