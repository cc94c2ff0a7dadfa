"""Who holds which part of the model, and in how much memory."""

from __future__ import annotations

from typing import Any

from lockstep.observe.report.source import Source

_PARTS_MAX = 12_000  # of units times ranks
_KINDS = ("parameters", "gradients", "optimizer", "buffers")


def owners_of(source: Source) -> dict[str, Any] | None:
    """What each rank of the last attempt has said last; None where none has."""
    ranks = source.run.of_last_attempt().ranks
    latest = {rank: note.fields for rank, note in source.notes("layout") if rank in ranks}
    if not latest:
        return None
    units: dict[str, dict[str, Any]] = {}
    for rank, fields in latest.items():
        for name, numel, dtype, whole, here in fields["units"]:
            unit = units.setdefault(name, {"name": name, "numel": numel, "dtype": dtype, "bytes": whole, "ranks": {}})
            unit["ranks"][str(rank)] = here
    by_size = sorted(units.values(), key=lambda unit: -unit["bytes"])
    smaller = by_size[max(1, _PARTS_MAX // len(latest)) :]
    for unit in smaller:
        del units[unit["name"]]
    return {
        "strategy": latest[min(latest)].get("strategy", ""),
        "step": latest[min(latest)]["step"],
        "units": [*units.values(), *([_together(smaller)] if smaller else [])],
        "memory": [_memory(source, rank, fields) for rank, fields in latest.items()],
    }


def _together(units: list[dict[str, Any]]) -> dict[str, Any]:
    ranks: dict[str, int] = {}
    for unit in units:
        for rank, here in unit["ranks"].items():
            ranks[rank] = ranks.get(rank, 0) + here
    numel, whole = (sum(unit[name] for unit in units) for name in ("numel", "bytes"))
    return {"name": f"{len(units)} smaller ones", "numel": numel, "dtype": "", "bytes": whole, "ranks": ranks}


def _memory(source: Source, rank: int, fields: Any) -> dict[str, Any]:
    lines = source.run.ranks[rank].lines
    return {
        "rank": rank,
        **{kind: fields.get("memory", {}).get(kind, 0) for kind in _KINDS},
        "rss_mib": max((line.rss_mib for line in lines), default=0),
        "device_mib": max((line.cuda_mib for line in lines), default=0),
    }
