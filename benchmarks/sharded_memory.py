"""What a way of training occupies on each rank: the peak of a step and its parts, each way in processes of its own.

A world measures one way, since ranks that train several models in turn would count all of them. Each rank first trains
one block of the same width and throws it away, so that the scratch memory of kernels and of the transports is part of
what is subtracted. Then three steps are measured:

    parameters    after the model is wrapped, without gradients or state
    state         what the first steps have added once gradients are gone: the optimizer's
    gradients     what stands between backward and the optimizer's step beyond both
    peak          the most that a step occupies at any moment, activations included
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gpt import Groups, Shape, model_of
from harness import Rank, Result, compare, run_ranks, threads_per_rank
from memory_meter import MIB, Meter, can_measure, return_large_blocks
from sharded_contests import GOAL_FORMULA, GOAL_MEMORY, Contest, judged
from sharded_formula import Unit, at_rest, peak
from sharded_variants import Kind, Variant, activation_bytes, units_of

STEPS = 3
Figures = dict[str, list[float]]  # MiB per measured step, beyond what the process had before


def occupy(rank: Rank) -> dict[str, Any]:
    """One rank of one kind."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    return_large_blocks()
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    kind, shape, groups = Kind(*rank.settings["kind"]), rank.settings["shape"], Groups()
    _train_one_block(kind, shape, rank, groups)
    meter = Meter(rank.world_size)
    before = _together(meter)
    module = model_of(shape)
    told = {"units": units_of(module), "activations": activation_bytes(module, shape)}
    variant = Variant(kind, module, shape, rank.rank, groups)
    del module
    parameters = _together(meter) - before
    for number in range(2):
        variant.step(number)
    found: Figures = {"parameters": [parameters] * STEPS}
    seen = []
    for number in range(STEPS):
        resting = _together(meter)
        with meter.peak() as backward:
            variant.backward(number)
        averaged = _together(meter)
        with meter.peak() as update:
            variant.update()
        peaks = [each.occupied.total / MIB - before for each in (backward, update)]
        seen += [backward.seen, update.seen]
        figures = {"state": resting - before - parameters, "gradients": averaged - resting}
        figures |= {"peak of forward+backward": peaks[0], "peak of update": peaks[1], "peak": max(peaks)}
        for name, figure in figures.items():
            found.setdefault(name, []).append(figure)
    dist.barrier()
    return {"figures": found, "seen": min(seen), **told}


def _train_one_block(kind: Kind, shape: Shape, rank: Rank, groups: Groups) -> None:
    variant = Variant(kind, model_of(shape | {"n_layer": 1}), shape, rank.rank, groups)
    for number in range(2):
        variant.step(number)


def _together(meter: Meter) -> float:
    """MiB now, on every rank at the same stage."""
    dist.barrier()
    now = meter.now().total / MIB
    dist.barrier()
    return now


# ------------------------------------------------------------------ all kinds


def measure_memory(title: str, shape: Shape, contest: Contest, world_size: int) -> list[Result]:
    """Every kind in turn, with the steps that are the default; nothing where the system does not tell.

    Whether torch's AdamW is fused makes no difference to these peaks: all are those of forward and backward.
    """
    if not can_measure():
        return []
    kinds = [kind for kind in contest.kinds if not kind.steps.startswith(("fused", "plain"))]
    by_kind = {kind: run_ranks(occupy, world_size, {"kind": kind, "shape": shape}) for kind in kinds}
    figures = {kind: _largest(by_rank) for kind, by_rank in by_kind.items()}
    found = []
    for kind in kinds:
        peer = next((each for each in contest.peers(kind.over) if each in kinds), None)
        baseline = None if peer is None or peer == kind else figures[peer]["peak"]
        beside = "" if peer is None or peer == kind else f" / {peer.label}"
        parts: dict[str, Any] = {
            name: round(statistics.median(part), 1) for name, part in figures[kind].items() if name != "peak"
        }
        parts["seen"] = round(min(rank["seen"] for rank in by_kind[kind]), 4)
        name = f"{title}, peak memory: {kind.label}{beside} on {kind.over}"
        result = compare(name, figures[kind]["peak"], baseline, unit="MiB", world_size=world_size, **parts)
        found.append(judged(result, GOAL_MEMORY) if baseline and contest.has_goal(kind) else result)
        if kind.engine == "fully_shard":
            found += against_formula(title, kind, figures[kind], by_kind[kind][0], world_size)
    return found


def _largest(by_rank: Sequence[dict[str, Any]]) -> Figures:
    """Of every part and step, the figure of the rank that occupies most."""
    parts = by_rank[0]["figures"]
    return {name: [max(each) for each in zip(*(r["figures"][name] for r in by_rank), strict=True)] for name in parts}


def against_formula(title: str, kind: Kind, figures: Figures, rank: dict[str, Any], world_size: int) -> list[Result]:
    """Each part and the peak of ours beside what `sharded_formula` says."""
    units = [Unit(*unit) for unit in rank["units"]]
    expected = at_rest(units, world_size)
    expected["peak"] = peak(units, world_size, rank["activations"], sharing=kind.over == "shared memory")
    found = []
    for part, nbytes in expected.items():
        name = f"{title}, memory, {part}: {kind.label} / formula on {kind.over}"
        formula = [nbytes / MIB] * STEPS
        found.append(judged(compare(name, figures[part], formula, unit="MiB", world_size=world_size), GOAL_FORMULA))
    return found
