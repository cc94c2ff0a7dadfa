"""Sharded training beside torch's: step time and peak memory of GPT-2 with 30 M and 124 M parameters, in one run.

    python benchmarks/bench_sharded.py [--ranks 2] [--shape gpt-30m] [--topic fully] [--only time] [--record]

Two topics. "fully": fully_shard beside torch's FSDP2 (`fully_shard` per block and root), FSDP1 and the bare model
("alone": no communication at all). "optimizer": ShardedOptimizer on our DistributedDataParallel beside torch's DDP,
with AdamW and with ZeroRedundancyOptimizer. Torch's classes run on Gloo, and on shared memory as a group of the backend
"lockstep"; ours on communicators over the same two. AdamW is torch's default and torch's fused one, each beside
its like, and the fastest of ours beside the fastest of the peer's. ShardedOptimizer takes the fused one unless "plain".

Step time: every variant owns a copy of the model; a round runs two steps of each on the same batches and takes the
mean, so that what a step leaves to the next, parameters still on their way, is paid for.
Where the copies do not fit into the memory at once, each world has the peer that the others are held against.
At the end `weights_differ_by` is the largest distance of any weight to the peer with the same AdamW: 0.0 says that the
same work was done, bit for bit (torch's fused AdamW rounds differently, whoever calls it).
Memory: see sharded_memory (what is measured), memory_meter (how) and sharded_formula (what it should be).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpt import GPT_30M, GPT_124M, Groups, Shape, model_of
from harness import (
    Rank,
    Result,
    Samples,
    arguments,
    compare,
    interleaved,
    report,
    run_ranks,
    slowest_rank,
    threads_per_rank,
)
from sharded_contests import GOAL_STEP, TOPICS, Contest, contest_of, judged
from sharded_memory import measure_memory
from sharded_variants import OVER, Kind, Variant, distance

SHAPES: dict[str, Shape] = {"gpt-30m": GPT_30M, "gpt-124m": GPT_124M}
ROUNDS = {"gpt-30m": 24, "gpt-124m": 8}


# ------------------------------------------------------------------ which fit into the memory at once


def worlds_of(contest: Contest, nbytes: int, world_size: int, room: float) -> list[tuple[Kind, ...]]:
    """The kinds of one contest as worlds that fit into `room` bytes, each with the peers of the others in it."""

    def fits(kinds: Sequence[Kind]) -> bool:
        return sum(footprint(kind, nbytes, world_size) for kind in kinds) <= room

    if fits(contest.kinds):
        return [contest.kinds]
    worlds: list[tuple[Kind, ...]] = []
    for over in OVER:
        peers = tuple(contest.peers(over))
        world = peers
        for kind in (k for k in contest.kinds if k not in peers and (k.over == over or k.engine == "alone")):
            if world != peers and not fits((*world, kind)):
                worlds.append(world)
                world = peers
            world = (*world, kind)
        worlds.append(world)
    return worlds


def footprint(kind: Kind, nbytes: int, world_size: int) -> int:
    """Bytes that all ranks of a kind keep between steps, rounded up, for a model of `nbytes`."""
    if kind.engine in ("FSDP2", "FSDP1", "fully_shard"):
        return 5 * nbytes
    state = 2 if kind.shards_optimizer_only else 2 * world_size
    return (state + (1 if kind.engine == "alone" else 2) * world_size) * nbytes


def room_for_copies(nbytes: int, world_size: int) -> float:
    """Bytes for what is kept between steps: the rest is for the model that is copied and for one step under way."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))
    return 0.9 * free - 4 * world_size * nbytes


# ------------------------------------------------------------------ step time


def measure(rank: Rank) -> dict[str, Any]:
    """One rank: all variants of one world."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    groups, shape = Groups(), rank.settings["shape"]
    kinds = [Kind(*kind) for kind in rank.settings["kinds"]]
    module = model_of(shape)
    variants = {_key(kind): Variant(kind, copy.deepcopy(module), shape, rank.rank, groups) for kind in kinds}
    del module
    steps = {name: variant.step for name, variant in variants.items()}
    figures = interleaved(steps, rank.settings["rounds"], warmup=3, together=dist.barrier)
    distances = {
        name: distance(variants[name], variants[peer], rank.world_size)
        for name, peer in rank.settings["peer_of"].items()
    }
    dist.barrier()
    return {"figures": figures, "distances": distances}


def time_steps(shape_name: str, contest: Contest, world_size: int, rounds: int) -> list[Result]:
    """All worlds of a contest."""
    nbytes = 4 * sum(param.numel() for param in model_of(SHAPES[shape_name]).parameters())
    worlds = worlds_of(contest, nbytes, world_size, room_for_copies(nbytes, world_size))
    found = []
    for kinds in worlds:
        settings: dict[str, Any] = {"shape": SHAPES[shape_name], "kinds": kinds, "rounds": rounds}
        pairs = {kind: contest.peer_of(kind) for kind in kinds if kind.engine != "alone"}  # that trains by itself
        settings["peer_of"] = {_key(kind): _key(peer) for kind, peer in pairs.items() if peer is not None}
        by_rank = run_ranks(measure, world_size, settings)
        figures = {
            metric: {name: [second * 1e3 for second in seconds] for name, seconds in samples.items()}
            for metric, samples in slowest_rank([rank["figures"] for rank in by_rank]).items()
        }
        distances = {name: max(rank["distances"][name] for rank in by_rank) for name in by_rank[0]["distances"]}
        for over in OVER:
            peers = [kind for kind in contest.peers(over) if kind in kinds]
            for metric in figures if peers else ():
                more = {"world_size": world_size, "distances": distances}
                found += against_peers(f"{shape_name}, {metric}", figures[metric], kinds, peers, contest, more)
    return found


def against_peers(
    title: str, samples: Samples, kinds: Sequence[Kind], peers: Sequence[Kind], contest: Contest, more: dict[str, Any]
) -> list[Result]:
    """Every kind on the transport of `peers` beside the one with the same AdamW; the fastest of ours and of theirs."""
    measured = [kind for kind in kinds if kind.over == peers[0].over or kind.engine == "alone"]
    pairs = [
        (kind, peer) for kind in measured for peer in peers if kind not in peers and kind.is_fused == peer.is_fused
    ]
    pairs += [(peer, peers[0]) for peer in peers[1:]]
    ours = [kind for kind in measured if contest.has_goal(kind)]
    if ours:
        best, best_peer = (min(each, key=lambda kind: statistics.median(samples[_key(kind)])) for each in (ours, peers))
        pairs += [(best, best_peer)] if (best, best_peer) not in pairs else []
    found = []
    for kind, peer in pairs:
        result = compare(
            f"{title}: {kind.label} / {peer.label} on {peer.over}",
            samples[_key(kind)],
            samples[_key(peer)],
            unit="ms",
            world_size=more["world_size"],
            weights_differ_by=more["distances"].get(_key(kind)),
            interleaved=len(kinds),
        )
        has_goal = title.endswith("whole step") and contest.has_goal(kind)
        found.append(judged(result, GOAL_STEP[contest.topic]) if has_goal else result)
    return found


def _key(kind: Kind) -> str:
    return f"{kind.label} on {kind.over}"


# ------------------------------------------------------------------ all of it


def main() -> None:
    """Measure what was chosen and print."""
    parser = arguments("sharded training: step time and peak memory, ours and torch's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="default: both")
    parser.add_argument("--topic", choices=TOPICS, action="append", help="default: both")
    parser.add_argument("--only", choices=["time", "memory"], help="default: both")
    engines = sorted({kind.engine for topic in TOPICS for kind in contest_of(topic).kinds})
    parser.add_argument("--engine", choices=engines, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    options = parser.parse_args()
    found: list[Result] = []
    for shape in options.shape or SHAPES:
        rounds = options.rounds or (2 if options.quick else ROUNDS[shape])
        for topic in options.topic or TOPICS:
            contest = contest_of(topic, options.engine or ())
            if options.only != "memory":
                found += time_steps(shape, contest, options.ranks, rounds)
            if options.only != "time":
                found += measure_memory(shape, SHAPES[shape], contest, options.ranks)
    report("sharded", found, record=options.record)


if __name__ == "__main__":
    main()
