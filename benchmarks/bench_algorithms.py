"""The collectives made of messages: what the model of their cost predicts, and what they take.

    python benchmarks/bench_algorithms.py [--ranks 2] [--over shm] [--size 64KiB] [--record]

The model is `tests/algorithm_costs.py`: alpha for a step, beta for a byte that moves, gamma for a byte that is added.
They are fitted by least squares (of the relative error) to three things that are no collective: a message there and
back between two ranks while the others rest, a shift round the ring with all ranks at once, and a plain addition. What
sends one way (tree, naive) is predicted from the first; what does both at once (ring, halving, chain) from the second.
To that comes what a collective costs before it says anything: the same call on a communicator of one rank.

A byte costs more in a tensor that the caches do not hold: from IN_CACHE on, beta and gamma are those measured at the
tensor's own size, where that is slower than the line.

All of it is measured in the same interleaved rounds; what is received lies in plain memory, as the spare tensors of the
algorithms do. A broadcast is followed by a barrier by dissemination, in the measurement and in the prediction: else its
root would run ahead. The model knows nothing of cores: with more ranks than cores they take turns, and what it leaves
out shows.

A line is a measured time with its prediction as the baseline. `overtakes` is the size from which what the model would
choose for the largest tensors is faster than its choice for the smallest (0: nowhere between two measured sizes);
`regret` is how much slower than the fastest algorithm the one is that the model would choose.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from bench_comm import agreed_calls, back_to_back, bytes_of, size_name, us_per_call
from comm_variants import over_gloo, over_shared_memory
from harness import Rank, Result, Samples, arguments, compare, interleaved, report, run_ranks, threads_per_rank
from lockstep.comm.algorithms import chain
from lockstep.comm.algorithms.choice import ALGORITHMS
from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.communicator import Communicator
from machine import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import algorithm_costs as cost  # pyright: ignore[reportMissingImports]

SIZES = ("1KiB", "4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB")
IN_CACHE = 1 << 20
ROUNDS = 20
BROADCASTS = ("tree", "chain")
BOTH_WAYS = ("ring", "halving_doubling", "chain")
PARTS = ("there and back", "shift", "add", "call")


# ------------------------------------------------------------------ one rank


def measure(rank: Rank) -> dict[str, dict[str, Samples]]:
    """Every variant on every size: when each began and ended."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    comm = over_gloo() if rank.settings["over"] == "gloo" else over_shared_memory(over_gloo())
    figures = {size: measure_size(comm, bytes_of(size) // 4, rank.settings) for size in rank.settings["sizes"]}
    comm.close()
    dist.destroy_process_group()
    return figures


def measure_size(comm: Communicator, numel: int, settings: Mapping[str, Any]) -> dict[str, Samples]:
    """The parts of the model and the collectives, on float32 tensors of so many elements."""
    here, there = comm.empty(numel).zero_(), torch.zeros(numel)
    wire, alone = Wire(comm, "measured"), comm.split(comm.rank)
    assert alone is not None
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

    def there_and_back() -> None:
        for sender in (0, 1):
            if comm.rank == sender:
                wire.step(wire.send(here, 1 - sender))
            elif comm.rank < 2:
                wire.step(wire.recv(here, sender))

    def broadcast(name: str) -> None:
        comm.broadcast(here, algorithm=name)
        comm.barrier(algorithm="dissemination")

    calls: dict[str, Callable[[], object]] = {
        "there and back": there_and_back,
        "shift": lambda: wire.step(wire.send(here, right), wire.recv(there, left)),
        "add": lambda: torch.add(here, there, out=here),
        "call": lambda: alone.all_reduce(here[:1], algorithm="ring"),
        "all_reduce": lambda: comm.all_reduce(here),
    }
    calls |= {f"all_reduce {name}": partial(comm.all_reduce, here, algorithm=name) for name in ALGORITHMS["all_reduce"]}
    calls |= {f"broadcast {name}": partial(broadcast, name) for name in BROADCASTS}
    variants = {name: back_to_back(call, agreed_calls(call, settings["seconds"], comm)) for name, call in calls.items()}
    with alone:
        return interleaved(variants, settings["rounds"], warmup=1, together=comm.barrier)


# ------------------------------------------------------------------ the model


class Line(NamedTuple):
    """What `nbytes` take: at_once + each * nbytes, in microseconds."""

    at_once: float
    each: float
    measured: Mapping[int, float]  # what it is the line of

    def each_in(self, size: int) -> float:
        """For a byte, in the course of a collective on a tensor of `size` bytes."""
        own = (self.measured[size] - self.at_once) / size
        return self.each if size <= IN_CACHE else max(self.each, own)


def fitted(us: Mapping[int, float]) -> Line:
    """The line nearest to the times by size, by the squares of relative errors: small sizes count like large ones."""
    rows = numpy.array([[1 / took, nbytes / took] for nbytes, took in us.items()])
    at_once, each = numpy.linalg.lstsq(rows, numpy.ones(len(rows)), rcond=None)[0]
    return Line(max(float(at_once), 0.0), max(float(each), 0.0), us)


def predicted(
    name: str, size: int, world_size: int, one_way: Line, both_ways: Line, added: Line, call_us: float
) -> float:
    """Microseconds."""
    kind, algorithm = name.split()
    has_middle = world_size > 2 or algorithm != "chain"  # a chain of two only sends or only receives
    message = both_ways if algorithm in BOTH_WAYS and has_middle else one_way
    if kind == "all_reduce":
        whole = getattr(cost, f"{algorithm}_all_reduce")(world_size, size // 4, 4)
        return call_us + whole.path.time_s(message.at_once, message.each_in(size), added.each_in(size))
    segment = (chain.SEGMENT_BYTES,) if algorithm == "chain" else ()
    tell = getattr(cost, f"{algorithm}_broadcast")(world_size, size, 0, *segment).path
    meet = cost.dissemination_barrier(world_size).path
    both = tell.time_s(message.at_once, message.each_in(size)) + meet.time_s(both_ways.at_once, both_ways.each)
    return 2 * call_us + both


def crossover(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """The smallest size from which `second` is faster, between two measured ones on a line in the logarithms."""
    lead = {nbytes: math.log(first[nbytes] / second[nbytes]) for nbytes in first}  # above 0: the second is faster
    for (small, before), (large, after) in itertools.pairwise(lead.items()):
        if before <= 0 < after:
            return small * (large / small) ** (-before / (after - before))
    return None


# ------------------------------------------------------------------ what it means


def results(by_rank: Sequence[Mapping[str, dict[str, Samples]]], world_size: int, over: str) -> list[Result]:
    """The fitted parts, each algorithm against its prediction, where one overtakes another, and what a choice costs."""
    samples = {bytes_of(size): us_per_call([rank[size] for rank in by_rank]) for size in by_rank[0]}
    names = [name for name in next(iter(samples.values())) if " by " not in name and name not in PARTS]
    median = {n: {size: statistics.median(of[n]) for size, of in samples.items()} for n in (*PARTS, *names)}
    one_way = fitted({size: us / 2 for size, us in median["there and back"].items()})
    lines = (one_way, fitted(median["shift"]), fitted(median["add"]))
    call_us = statistics.median(median["call"].values())
    rounds = len(next(iter(samples.values()))["add"])
    state = partial(Result.of_value, better="less", world_size=world_size, rounds=rounds, goal="")
    found = [
        state(f"{over}: {what}", line.at_once, unit="us", gb_per_s=round(1e-3 / line.each, 3) if line.each else None)
        for what, line in zip(("alpha, beta one way", "alpha, beta both ways", "gamma"), lines, strict=True)
    ]
    found.append(state(f"{over}: a call that says nothing", call_us, unit="us"))
    names.remove("all_reduce")
    model = {n: {size: predicted(n, size, world_size, *lines, call_us) for size in samples} for n in names}
    for size, (name, forecast) in itertools.product(samples, model.items()):
        extra: dict[str, Any] = {"own": round(median["all_reduce"][size], 1)} if name.startswith("all_reduce") else {}
        title = f"{over}: {name} {size // 1024}KiB: measured / predicted"
        found.append(
            compare(title, samples[size][name], [forecast[size]] * rounds, unit="us", world_size=world_size, **extra)
        )
    for kind in ("all_reduce", "broadcast"):
        rivals = [name for name in names if name.startswith(kind)]
        chosen = {size: min(rivals, key=lambda name: model[name][size]) for size in samples}
        fastest = {size: min(rivals, key=lambda name: median[name][size]) for size in samples}
        small, large = chosen[min(chosen)], chosen[max(chosen)]
        if small != large:
            ours, forecast = (crossover(times[small], times[large]) for times in (median, model))
            what = f"{over}: {kind}: {large.split()[1]} overtakes {small.split()[1]}"
            kib = "none" if forecast is None else round(forecast / 1024, 1)
            found.append(state(what, (ours or 0.0) / 1024, unit="KiB", predicted_kib=kib))
        regret = {size: median[chosen[size]][size] / median[fastest[size]][size] for size in samples}
        what, worst = f"{over}: {kind}: regret, worst", max(regret.values())
        found.append(state(what, worst, unit="x", chosen=_in_words(chosen), fastest=_in_words(fastest)))
    return found


def _in_words(names: Mapping[int, str]) -> str:
    """`tree 1KiB 4KiB; ring 16KiB`."""
    runs = itertools.groupby(names.items(), key=lambda item: item[1])
    return "; ".join(f"{name.split()[1]} {' '.join(f'{size // 1024}KiB' for size, _ in run)}" for name, run in runs)


def main() -> None:
    """Measure the chosen worlds and transports, and print."""
    parser = arguments("collectives made of messages: measured against the model of their cost")
    parser.add_argument("--ranks", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--over", choices=("shm", "gloo"), action="append", help="default: both")
    parser.add_argument("--size", type=size_name, action="append", help=f"default: {', '.join(SIZES)}")
    options = parser.parse_args()
    settings = {
        "sizes": options.size or SIZES,
        "rounds": 4 if options.quick else ROUNDS,
        "seconds": 0.002 if options.quick else 0.01,
    }
    found: list[Result] = []
    for world_size, over in itertools.product(options.ranks or (2, 4), options.over or ("shm", "gloo")):
        found += results(run_ranks(measure, world_size, settings | {"over": over}), world_size, over)
    report("algorithms", found, record=options.record)


if __name__ == "__main__":
    main()
