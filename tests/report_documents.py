"""Documents for the page of a report: runs as they could have been, the same each time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

PHASES = ("data", "forward", "backward", "exposed", "optimizer", "other")
_BUCKETS = ((8 << 20, "train.py:58 in step"), (25 << 20, "train.py:58 in step"), (25 << 20, "train.py:58 in step"))
_LOG = (4, "train.py:71 in log")


def run_document(ranks: int, steps: int, *, slow: int | None = None, seed: int = 7) -> dict[str, Any]:
    """A run of data parallel training. slow: a rank whose forward takes longer, from the middle of the run on."""
    dice = random.Random(seed)
    heat = _heat(ranks, steps, slow, dice)
    lanes = _lanes(ranks, steps, slow, dice)
    last = max(heat["last"])
    return {
        "version": 1,
        "run": _run(ranks, steps),
        "cards": _cards(ranks, steps, slow),
        "curves": _curves(steps, dice),
        "heat": heat,
        "lanes": lanes,
        "overlap": _overlap(ranks, slow),
        "owners": owners(ranks, sharded=ranks > 2),
        "coverage": {"epochs": [_epoch(0, ranks, 50_000), _epoch(1, ranks, 50_000)]},
        "replicas": {
            "what": "parameters, buffers, optimizer state",
            "checks": [[step, True] for step in range(min(100, last), last + 1, max(100, last // 60))],
            "sealed_until": last,
            "digest": "3f9c01ab77de2210",
            "differs": "",
        },
    }


def empty_document() -> dict[str, Any]:
    """A run that has recorded nothing."""
    nothing = dict.fromkeys(("heat", "lanes", "overlap", "owners", "coverage", "replicas"))
    run = {"id": "20261122-0512-empty", "folder": "runs/20261122-0512-empty", "status": "failed", "began": None}
    run |= {"wall_s": 0.4, "world_size": 2, "steps": 0, "attempts": [], "facts": []}
    return {"version": 1, "run": run, "cards": [], "curves": [], **nothing}


def _run(ranks: int, steps: int) -> dict[str, Any]:
    facts = [
        ["command", "command", f"lockstep run --nproc-per-node {ranks} train.py --batch-size 32 --lr 3e-4", "shell"],
        ["command", "folder", "experiments/gpt-30m", "shell"],
        ["versions", "python", "3.11.9", ""],
        ["versions", "torch", "2.13.0", ""],
        ["versions", "lockstep", "0.1.0", ""],
        ["versions", "commit", "9d2f4c1 (clean)", "git"],
        ["environment", "WORLD_SIZE", str(ranks), "launcher"],
        ["environment", "MASTER_ADDR", "127.0.0.1", "launcher"],
        ["environment", "MASTER_PORT", "29517", "launcher"],
        ["environment", "OMP_NUM_THREADS", "4", "user's environment"],
        ["environment", "NCCL_SOCKET_IFNAME", "ens5", "Slurm"],
        ["hashes", "config", "sha256 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae", "computed"],
        ["hashes", "data", "sha256 fcde2b2edba56bf408601fb721fe9b5c338d10ee429ea04fae5511b68fbf8fb9", "computed"],
    ]
    attempts = [{"name": "a1", "world_size": ranks, "began_s": 0.0, "ended_s": None, "first_step": 0}]
    attempts[0] |= {"last_step": steps - 1, "causes": []}
    if steps > 100:
        middle = steps * 2 // 5
        cause = "rank 1 was killed by SIGKILL (out of memory: 61.2 of 62.0 GiB used on host node-1)"
        attempts[0] |= {"ended_s": 0.026 * middle, "last_step": middle + 11, "causes": [cause]}
        second = {"name": "a2", "world_size": ranks, "began_s": 0.026 * middle + 0.3, "ended_s": 0.026 * steps}
        attempts.append({**second, "first_step": middle, "last_step": steps - 1, "causes": []})
    return {
        "id": f"20261122-0512-gpt-30m-{ranks}x",
        "folder": f"runs/20261122-0512-gpt-30m-{ranks}x",
        "status": "finished",
        "began": "2026-11-22T05:12:09",
        "wall_s": 0.0263 * steps + 1.7,
        "world_size": ranks,
        "steps": steps,
        "attempts": attempts,
        "facts": facts,
    }


def _cards(ranks: int, steps: int, slow: int | None) -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = []
    if slow is not None:
        cards.append(
            {
                "severity": "error",
                "title": f"rank {slow} reads the same batches as rank 0",
                "text": f"Culprit: rank {slow} (host node-1, pid 4711), step {steps // 2}\n"
                f"  its batch has the digest of rank 0's: 9f31c2d4 at train.py:44 in batches\n"
                "  results stay finite and are wrong: the gradient counts these samples twice",
                "ranks": [0, slow],
                "step": steps // 2,
                "lever": "give the sampler rank and world size: DistributedSampler(data, num_replicas=W, rank=R)",
            }
        )
        cards.append(
            {
                "severity": "warning",
                "title": f"rank {slow} is late: the others wait 6.1 ms of a step of 26.3 ms for it",
                "text": f"rank {slow} spends 14.9 ms in forward, the others 8.8 ms; 23 % of each step is lost.",
                "ranks": [slow],
                "step": steps * 3 // 4,
                "lever": f"give rank {slow} as much work as the others; else its core is slower: lockstep doctor",
            }
        )
    cards.append(
        {
            "severity": "note",
            "title": "communication that nothing hides takes 18 % of the step",
            "text": "Three buckets move 58 MiB a step; the last one is alone on the wire.",
            "ranks": [],
            "step": None,
            "lever": "larger batches per rank, or bf16_compress_hook",
        }
    )
    cards.append(
        {
            "severity": "good",
            "title": f"all {ranks} replicas are equal, bit for bit",
            "text": "",
            "ranks": [],
            "step": steps - 1,
            "lever": "",
        }
    )
    return cards


def _curves(steps: int, dice: random.Random) -> list[dict[str, Any]]:
    every = max(1, math.ceil(steps / 1000))
    at = list(range(0, steps, every))
    loss = [2.1 + 8.6 * math.exp(-5 * step / steps) + dice.gauss(0, 0.05) for step in at]
    rate = [
        3e-4 * min(1, (step + 1) / (0.05 * steps)) * (0.55 + 0.45 * math.cos(math.pi * step / steps)) for step in at
    ]
    tokens = [1.24e6 * (0.82 if step > steps // 2 else 1) * dice.gauss(1, 0.015) for step in at]
    norm = [0.4 + 3 * math.exp(-9 * step / steps) + abs(dice.gauss(0, 0.08)) for step in at]
    return [
        _curve("loss", "", at, loss, [0.94 * each for each in loss], [1.06 * each for each in loss]),
        _curve("throughput", "tokens/s", at, tokens),
        _curve("learning rate", "", at, rate),
        _curve("gradient norm", "", at, norm, [0.8 * each for each in norm], [1.3 * each for each in norm]),
    ]


def _curve(name: str, unit: str, steps: Sequence[int], values: Sequence[float], *band: list[float]) -> dict[str, Any]:
    low, high = band or (None, None)
    return {"name": name, "unit": unit, "steps": list(steps), "values": [_short(v) for v in values]} | {
        "low": low and [_short(v) for v in low],
        "high": high and [_short(v) for v in high],
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _heat(ranks: int, steps: int, slow: int | None, dice: random.Random) -> dict[str, Any]:
    width = max(1, math.ceil(steps / 400))
    first = list(range(0, steps, width))
    last = [min(steps - 1, step + width - 1) for step in first]
    own: dict[str, list[list[int]]] = {phase: [[] for _ in range(ranks)] for phase in PHASES}
    wall: list[list[int]] = [[] for _ in range(ranks)]
    for step in first:
        forward = [8_800 * dice.gauss(1, 0.02) for _ in range(ranks)]
        if slow is not None and step > steps // 2:
            forward[slow] *= 1.7
        data = [600 * dice.gauss(1, 0.1) + (9_000 if dice.random() < 0.004 else 0) for _ in range(ranks)]
        backward = [9_900 * dice.gauss(1, 0.015) for _ in range(ranks)]
        latest = max(map(sum, zip(forward, data, backward, strict=True)))
        for rank in range(ranks):
            stood = latest - forward[rank] - data[rank] - backward[rank] + 2_600
            parts = (data[rank], forward[rank], backward[rank], stood, 1_500.0, 420.0)
            for phase, us in zip(PHASES, parts, strict=True):
                own[phase][rank].append(round(us))
            wall[rank].append(round(sum(parts)))
    found = {"first": first, "last": last, "ranks": list(range(ranks)), "wall_us": wall}
    return found | {"phases": list(PHASES), "phases_us": own}


def _lanes(ranks: int, steps: int, slow: int | None, dice: random.Random) -> dict[str, Any]:
    words = [
        {
            "group": "",
            "text": f"all_reduce float32 [{size // 4}] sum",
            "site": site,
            "label": f"bucket {n}",
            "bytes": size,
        }
        for n, (size, site) in enumerate(_BUCKETS)
    ]
    words.append(
        {"group": "", "text": "all_reduce float32 [] mean", "site": _LOG[1], "label": "loss", "bytes": _LOG[0]}
    )
    chosen = sorted({min(steps - 1, max(0, at)) for at in (steps // 10, steps // 2, steps * 3 // 4, steps - 1)})
    why = ("typical", "finding", "slowest", "last")
    return {
        "words": words,
        "steps": [
            _step(step, why[max(0, 4 - len(chosen)) + n], ranks, slow if step >= steps // 2 else None, dice)
            for n, step in enumerate(chosen)
        ],
    }


def _step(step: int, why: str, ranks: int, slow: int | None, dice: random.Random) -> dict[str, Any]:
    """Buckets are started in backward, each ends on all ranks once the last has started it and the wire is free."""
    data = [round(500 + 250 * dice.random()) for _ in range(ranks)]
    forward = [round(8_800 * dice.gauss(1, 0.03) * (1.7 if rank == slow else 1)) for rank in range(ranks)]
    backward = [round(9_900 * dice.gauss(1, 0.02)) for _ in range(ranks)]
    starts = [round(40 * dice.random()) for _ in range(ranks)]
    ready = [starts[r] + data[r] + forward[r] for r in range(ranks)]
    entered = [[ready[r] + round(backward[r] * part) for r in range(ranks)] for part in (0.35, 0.7, 0.98)]
    free = 0
    ended: list[int] = []
    for (size, _), arrived in zip(_BUCKETS, entered, strict=True):
        free = max(free, *arrived) + round(size / 9_000 + 60)
        ended.append(free)
    done = [ready[r] + backward[r] for r in range(ranks)]
    on = [max(done[r], ended[-1]) for r in range(ranks)]
    logged = [on[r] + 1_500 + round(60 * dice.random()) for r in range(ranks)]
    met = max(logged) + 70
    rows = []
    for r in range(ranks):
        spans = [["data", starts[r], starts[r] + data[r]], ["forward", starts[r] + data[r], ready[r]]]
        spans += [["backward", ready[r], done[r]], ["exposed", done[r], on[r]], ["optimizer", on[r], logged[r]]]
        spans += [["exposed", logged[r], met], ["other", met, met + 400]]
        ops = [[n, n, entered[n][r], ended[n], -1, 0, 0] for n in range(3)]
        for n in range(3):
            if ended[n] > done[r]:
                from_us = max(done[r], ended[n - 1] if n else 0)
                ops[n][4:6] = [from_us, ended[n] - from_us]
        ops.append([3, 3, logged[r], met, logged[r], met - logged[r], 0])
        rows.append({"rank": r, "began_us": starts[r], "ended_us": met + 400, "spans": spans, "ops": ops})
    joins = [_join(rows, key, [entered[0], entered[1], entered[2], logged][key]) for key in range(4)]
    return {"step": step, "why": why, "began_us": step * 26_300, "ended_us": step * 26_300 + met + 400} | {
        "ranks": rows,
        "joins": joins,
    }


def _join(rows: Sequence[dict[str, Any]], key: int, arrived: Sequence[int]) -> list[Any]:
    """The rank that was in it for the shortest time came last, and its time is what the communication takes."""
    ops = [row["ops"][key] for row in rows]
    real = max(1, min(op[3] - op[2] for op in ops))
    for op in ops:
        op[6] = max(0, op[5] - real)
    waited = sum(op[6] for op in ops)
    size = (*(each for each, _ in _BUCKETS), _LOG[0])[key]
    return [key, max(range(len(rows)), key=lambda r: arrived[r]), real, waited, size * 10**6 // real]


def open_step(document: dict[str, Any], culprit: int) -> dict[str, Any]:
    """The step after the last one of a run that hangs: all ranks but one are in a collective."""
    last = document["lanes"]["steps"][-1]
    rows = []
    for row in last["ranks"]:
        rank, ended = row["rank"], row["began_us"] + 9_000_000
        is_late = rank == culprit
        row = {"rank": rank, "began_us": row["began_us"], "ended_us": ended, "culprit": is_late}
        row["step"] = last["step"] + 1
        row["says"] = "does not move: at train.py:41 load" if is_late else f"waits for rank {culprit}: all_reduce"
        began = 20_000 + 50 * rank
        row["ops"] = [[0, 0, began - 900, began, -1, 0, 0]]
        row["ops"] += [] if is_late else [[1, 1, began, ended, began, ended - began, ended - began]]
        phases = [("forward", row["began_us"]), ("backward", began - 900), ("exposed", began)]
        ends = [*(at for _, at in phases[1:]), ended]
        spans = [[name, at, end] for (name, at), end in zip(phases, ends, strict=True) if end > at]
        rows.append({**row, "spans": [["open", row["began_us"], ended]] if rank % 2 else spans})
    joins = [[0, culprit, 900, 0, None], [1, culprit, 0, 0, None]]
    step = {"step": last["step"] + 1, "why": "open", "began_us": last["ended_us"]}
    return {**step, "ended_us": last["ended_us"] + 9_000_000, "ranks": rows, "joins": joins, "estimated": True}


def _overlap(ranks: int, slow: int | None) -> dict[str, Any]:
    late = 0 if slow is None else slow
    each = [
        {"rank": r, "exposed_us": 2_700 if r == late else 7_900 + 90 * r, "hidden_us": 5_200 - 40 * r}
        for r in range(ranks)
    ]
    for row in each:
        row |= {"wall_us": 26_300, "waited_us": 0 if row["rank"] == late else 5_100}
    return {
        "ranks": each,
        "what_if": [
            {"name": "as recorded", "step_us": 26_300, "gain": 1.0},
            {"name": f"rank {late} as fast as the others", "step_us": 20_900, "gain": 1.26},
            {"name": "network twice as fast", "step_us": 24_800, "gain": 1.06},
            {"name": "no waiting for data", "step_us": 25_700, "gain": 1.02},
        ],
        "waiting": _waiting(ranks, late),
    }


def _waiting(ranks: int, late: int) -> list[dict[str, Any]]:
    dice = random.Random(ranks)
    found = []
    for (site, text, label), last, scale in (
        ((_BUCKETS[2][1], "all_reduce float32 [6553600] sum", "bucket 2"), late, 41e6),
        ((_LOG[1], "all_reduce float32 [] mean", "loss"), 0, 9e6),
        (("train.py:90 in save", "barrier", ""), 0, 7e6),
    ):
        for rank in (each for each in range(ranks) if each != last):
            row = {"site": site, "text": text, "label": label, "rank": rank, "last_rank": last}
            found.append({**row, "waited_us": round(scale * dice.uniform(0.8, 1.2))})
    whole = sum(each["waited_us"] for each in found)
    return [{**each, "share": round(each["waited_us"] / whole, 4)} for each in found]


def owners(ranks: int, *, sharded: bool) -> dict[str, Any]:
    """A small transformer, whole on each rank or in equal slices."""
    units = [("embed.weight", 50_257 * 384), *((f"blocks.{n}", 1_774_464) for n in range(8)), ("norm.weight", 384)]
    parts = ranks if sharded else 1
    whole = sum(numel for _, numel in units) * 4
    return {
        "strategy": "fully_shard" if sharded else "DistributedDataParallel",
        "units": [
            {"name": name, "numel": numel, "dtype": "float32", "bytes": 4 * numel}
            | {"ranks": {str(r): 4 * (numel // parts) for r in range(ranks)}}
            for name, numel in units
        ],
        "memory": [
            {"rank": r, "parameters": whole // parts, "gradients": whole // parts, "optimizer": 2 * whole // parts}
            | {"buffers": 1 << 20, "rss_mib": 812 + 3 * r, "device_mib": 0}
            for r in range(ranks)
        ],
    }


def _epoch(epoch: int, ranks: int, samples: int) -> dict[str, Any]:
    bounds = [samples * n // ranks for n in range(ranks + 1)]
    cells = [[r, bounds[r], bounds[r + 1] - 1, 1] for r in range(ranks)]
    found = {"epoch": epoch, "samples": samples, "sealed": True, "digest": "b5e1" * 4, "twice": 0, "missing": 0}
    return found | {"examples": "", "cells": cells}


HOSTILE = (
    "</script><script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 2'>",
    "<!-- <script> \" ' ` ${window.harmed = 3} &lt;",
    "abc \u202e\u2066dlrow\u2028\u2029\u200f\u0007\u0000 end",
    "javascript:window.harmed=4",
)


def hostile_document() -> dict[str, Any]:
    """A run in which every text is an attack, and some are long."""
    document = run_document(3, 60, slow=1)
    document["run"]["attempts"][0]["causes"] = ["x"]
    known = {*PHASES, "finished", "error", "warning", "note", "good", "typical", "slowest", "last", "finding"}
    count = 0

    def attack(value: Any) -> Any:
        nonlocal count
        if isinstance(value, str) and value not in known:
            count += 1
            return HOSTILE[count % len(HOSTILE)] * (40 if count % 17 == 0 else 1)
        if isinstance(value, dict):
            return {key: attack(each) for key, each in value.items()}
        return [attack(each) for each in value] if isinstance(value, list) else value

    return attack(document)
