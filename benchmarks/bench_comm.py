"""Collectives between ranks of one host: shared memory against Gloo, MPI, and what the machine's memory can do.

    python benchmarks/bench_comm.py [--ranks 2] [--op all_reduce] [--size 1MiB] [--no-mpi] [--only-memory] [--record]

Variants, interleaved: lockstep's shared memory with tensors made by `comm.empty` ("zero-copy") and with tensors from
anywhere ("staged"), Gloo through torch.distributed, MPI where mpi4py and its mpiexec are installed (for root, Open MPI
wants OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1), and plain copies. Each is called back to back
after a barrier, so a figure is the time per call while every rank waits for it, from the first rank's start to the last
one's end. (A root that need not wait for the others may run ahead: small broadcasts show throughput, in all variants.)

The size is that of the whole tensor: what all_reduce and broadcast work on, what reduce_scatter reads, what all_gather
writes. Bandwidth is this size by time. `of_memcpy` is the share of the limit, which is the time that the operation's
unavoidable bytes take as plain copies on all ranks at once (`copied_bytes` says how many), by torch's copy or by the C
library's, whichever is faster in this run. `of_peer_memcpy` is the same with copies of what another rank has just
written, which no core finds in its own cache. Every variant's values are checked once for each size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from comm_memory import measure_memory
from comm_variants import (
    OPS,
    Call,
    Copies,
    OpName,
    PeerCopies,
    by_lockstep,
    by_mpi,
    by_torch,
    check,
    copied_bytes,
    operands,
    over_gloo,
    over_shared_memory,
)
from harness import (
    Rank,
    Result,
    Samples,
    arguments,
    compare,
    interleaved,
    report,
    run_ranks,
    threads_per_rank,
)
from lockstep.comm.communicator import Communicator
from mpi_world import load_mpi, why_no_mpi

UNITS = {"KiB": 2**10, "MiB": 2**20}
SIZES = ("4KiB", "64KiB", "1MiB", "4MiB", "16MiB", "64MiB", "128MiB")
ROUNDS = 24
CALLS_MAX = 1000
OURS = ("zero-copy", "staged")

GOAL_US = 20.0  # at 4 KiB, where every rank has a core to wait on
GOAL_TIMES_GLOO = 6.0  # from 1 MiB up
GOAL_OF_MEMCPY = 0.7  # from 1 MiB up


# ------------------------------------------------------------------ one rank


def measure(rank: Rank) -> dict[str, Any]:
    """Every operation on every size: the figures of each, by "operation size"."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    mpi = load_mpi() if rank.settings["mpi"] else None
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    gloo = over_gloo()
    shared = over_shared_memory(gloo)
    figures = {}
    for op in rank.settings["ops"]:
        for size in rank.settings["sizes"]:
            figures[f"{op} {size}"] = measure_one(rank, op, bytes_of(size), shared, mpi)
    shared.close()
    dist.destroy_process_group()
    library = ""
    if mpi is not None:
        library = " ".join(mpi.Get_library_version().splitlines()[0].split(",")[0].split())
        mpi.Finalize()
    return {"figures": figures, "mpi_library": library}


def measure_one(rank: Rank, op: OpName, nbytes: int, shared: Communicator, mpi: Any) -> dict[str, Samples]:
    """When every variant began and ended, and how many calls that were. Checks the values of each."""
    numel = nbytes // 4 // rank.world_size * rank.world_size
    zero_copy = operands(numel, rank.world_size, shared.empty)
    ordinary = operands(numel, rank.world_size, torch.empty)
    collectives = {
        "zero-copy": (by_lockstep(shared, op, zero_copy), zero_copy),
        "staged": (by_lockstep(shared, op, ordinary), ordinary),
        "gloo": (by_torch(op, ordinary), ordinary),
    }
    if mpi is not None:
        collectives["mpi"] = (by_mpi(mpi, op, ordinary), ordinary)
    calls = {name: call for name, (call, _) in collectives.items()}
    calls |= copies(copied_bytes(op, numel * 4, rank.world_size), shared)
    seconds = rank.settings["seconds"]
    variants = {name: back_to_back(call, agreed_calls(call, seconds, shared)) for name, call in calls.items()}
    if op == "broadcast" and rank.rank == 0:  # only the others have anything to copy
        variants |= {name: back_to_back(lambda: None, 1) for name in variants if "memcpy" in name}
    figures = interleaved(variants, rank.settings["rounds"], warmup=1, together=shared.barrier)
    for name, (call, on) in collectives.items():
        check(name, op, call, on, rank.rank, rank.world_size)
    return figures


def copies(nbytes: int, comm: Communicator) -> dict[str, Call]:
    """The plain copies of so many bytes; those between ranks where the system has memory without a name."""
    own = Copies(nbytes)
    found: dict[str, Call] = {"memcpy by torch": own.by_torch, "memcpy by libc": own.by_libc}
    if hasattr(os, "memfd_create"):
        found["peer memcpy"] = PeerCopies(comm, nbytes).by_torch
    return found


def agreed_calls(call: Call, seconds: float, comm: Communicator) -> int:
    """How many calls take about `seconds`, the same number on every rank."""

    def per_call(calls: int) -> float:
        figures = back_to_back(call, calls)(0)
        took = torch.tensor([figures["end"] - figures["start"]])
        comm.all_reduce(took, "max")
        return float(took) / calls

    call()
    took = per_call(1)
    if took < seconds / 20:
        took = per_call(10)
    return min(CALLS_MAX, max(1, int(seconds / took)))


def back_to_back(call: Call, calls: int) -> Callable[[int], dict[str, float]]:
    """A variant: so many calls, with nothing in between."""

    def run(_: int) -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return {"start": start, "end": time.perf_counter(), "calls": calls}

    return run


# ------------------------------------------------------------------ what it means


def bytes_of(size: str) -> int:
    """`64KiB` -> 65536."""
    for unit, scale in UNITS.items():
        if size.endswith(unit) and size.removesuffix(unit).isdigit():
            return int(size.removesuffix(unit)) * scale
    raise argparse.ArgumentTypeError(f"{size!r} is not a whole number and a unit, as in {', '.join(SIZES)}")


def size_name(text: str) -> str:
    """A size as it was typed, if it is one."""
    bytes_of(text)
    return text


def us_per_call(by_rank: list[dict[str, Samples]]) -> Samples:
    """From the first rank's start to the last rank's end: ranks that share a core take turns, and all must end."""

    def of_round(variant: str, number: int) -> float:
        start = min(figures["start"][variant][number] for figures in by_rank)
        end = max(figures["end"][variant][number] for figures in by_rank)
        return (end - start) / max(figures["calls"][variant][number] for figures in by_rank) * 1e6

    rounds = {variant: range(len(starts)) for variant, starts in by_rank[0]["start"].items()}
    return {variant: [of_round(variant, number) for number in numbers] for variant, numbers in rounds.items()}


def results(by_rank: list[dict[str, Any]], world_size: int) -> list[Result]:
    """Ours against Gloo, in every operation and size, with what MPI and plain copies took in the same rounds."""
    found = []
    for name in by_rank[0]["figures"]:
        samples = us_per_call([rank["figures"][name] for rank in by_rank])
        nbytes = bytes_of(name.split()[1])
        median = {variant: statistics.median(figures) for variant, figures in samples.items()}
        limit = min(median["memcpy by torch"], median["memcpy by libc"])
        scale, unit = (1.0, "us") if nbytes < UNITS["MiB"] else (1e-3, "ms")
        for ours in OURS:
            extra: dict[str, Any] = {
                "gb_per_s": round(nbytes / median[ours] / 1e3, 3),
                "times_gloo": round(median["gloo"] / median[ours], 2),
                "of_memcpy": round(limit / median[ours], 3),
                "of_peer_memcpy": round(median["peer memcpy"] / median[ours], 3) if "peer memcpy" in median else None,
            }
            if "mpi" in median:
                extra |= {"mpi": round(median["mpi"] * scale, 4), "mpi_library": by_rank[0]["mpi_library"]}
            found.append(
                compare(
                    f"{name}: {ours} / gloo",
                    [us * scale for us in samples[ours]],
                    [us * scale for us in samples["gloo"]],
                    unit=unit,
                    world_size=world_size,
                    goal=goals(ours, nbytes, median[ours], world_size, extra),
                    **extra,
                )
            )
    return found


def goals(ours: str, nbytes: int, us: float, world_size: int, extra: dict[str, Any]) -> str:
    """The goals that this figure has, each with whether it was met."""
    goals: list[tuple[str, bool]] = []
    if nbytes == 4 * UNITS["KiB"] and world_size <= len(os.sched_getaffinity(0)):
        goals.append((f"at most {GOAL_US:.0f} us", us <= GOAL_US))
    if nbytes >= UNITS["MiB"]:
        goals.append((f"at least {GOAL_TIMES_GLOO:.0f} x Gloo", extra["times_gloo"] >= GOAL_TIMES_GLOO))
        if ours == "zero-copy":
            goals.append((f"at least {GOAL_OF_MEMCPY} of memcpy", extra["of_memcpy"] >= GOAL_OF_MEMCPY))
    return ", ".join(f"{text}: {'met' if met else 'missed'}" for text, met in goals)


def main() -> None:
    """Measure the chosen worlds, operations and sizes, and print."""
    parser = arguments("collectives between ranks of one host: shared memory, Gloo, MPI, plain copies")
    parser.add_argument("--ranks", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--op", choices=OPS, action="append", help="default: all")
    parser.add_argument("--size", type=size_name, action="append", help=f"default: {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--no-mpi", action="store_true", help="leave MPI out even where it is installed")
    parser.add_argument("--only-memory", action="store_true", help="what the transport and buckets occupy, no times")
    options = parser.parse_args()
    found: list[Result] = []
    for world_size in options.ranks or (2, 4):
        found += measure_memory(world_size)
        if not options.only_memory:
            found += measure_times(options, world_size)
    report("comm", found, record=options.record)


def measure_times(options: argparse.Namespace, world_size: int) -> list[Result]:
    """One world: in one MPI world where that can be."""
    without_mpi = "it was asked for" if options.no_mpi else why_no_mpi(world_size)
    if without_mpi:
        print(f"without MPI on {world_size} ranks: {without_mpi}", file=sys.stderr)
    settings = {
        "ops": options.op or OPS,
        "sizes": options.size or SIZES,
        "rounds": options.rounds or (4 if options.quick else ROUNDS),
        "seconds": 0.002 if options.quick else 0.01,
        "mpi": not without_mpi,
    }
    return results(run_ranks(measure, world_size, settings, mpi=not without_mpi), world_size)


if __name__ == "__main__":
    main()
