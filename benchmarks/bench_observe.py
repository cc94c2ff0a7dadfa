"""What the guard costs: a training step, and a bare small operation, with its record on and off in the same run.

    python benchmarks/bench_observe.py [--quick] [--record]

A step is arithmetic that takes some 10 ms, and in between 8 all-reduces over shared memory, as the buckets of a model
have them: half of them asynchronous, all from the user's own code. Every round runs a block of steps with the guard and
one without, in changing order; the figure of each is the wall time, and the processor time of the rank's main thread,
which no neighbour on the machine can lengthen much. The guard's own thread runs during both; what it takes of a core is
a figure of its own, from seconds in which the rank does nothing else.
"""

from __future__ import annotations

import statistics
import threading
import time
import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist

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
from lockstep.comm.choose import fastest
from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import Transport
from lockstep.observe.guard import GuardSettings
from lockstep.observe.init import meet
from lockstep.observe.recording import GuardLayer

STEP_MS = 10.0
COLLECTIVES = 8
BUCKET = 16_384  # elements of each
GOAL = "under 1 % of the step"


def work_of(milliseconds: float) -> Callable[[], None]:
    """Arithmetic that takes about so long here, out of the caches of the operations between."""
    matrix = torch.randn(160, 160)

    def turn() -> None:
        torch.mm(matrix, matrix)

    best = min(timeit.repeat(turn, number=10, repeat=100)) / 10  # the others of this machine come and go
    turns = max(1, round(milliseconds / 1e3 / best))

    def work() -> None:
        for _ in range(turns):
            turn()

    return work


def step_of(comm: Communicator, work: Callable[[], None]) -> Callable[[], None]:
    """One step: a piece of arithmetic before each operation; every second one is waited for after the next piece."""
    buckets = [comm.empty(BUCKET).zero_() for _ in range(COLLECTIVES)]

    def step() -> None:
        pending = None
        for number, bucket in enumerate(buckets):
            work()
            if pending is not None:
                pending.wait()
                pending = None
            if number % 2:
                comm.all_reduce(bucket, "mean", label="bucket")
            else:
                pending = comm.all_reduce(bucket, "mean", async_op=True, label="bucket")

    return step


def per_call(call: Callable[[], object], calls: int) -> Callable[[int], dict[str, float]]:
    """A variant that repeats `call` and returns microseconds of each: on the clock, and of this thread's processor."""

    def run(_: int) -> dict[str, float]:
        start, start_cpu = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            call()
        return {
            "wall": (time.perf_counter() - start) / calls * 1e6,
            "main thread": (time.thread_time() - start_cpu) / calls * 1e6,
        }

    return run


def measure(rank: Rank) -> dict[str, Samples]:
    """One rank: steps and bare operations, guarded and not, over the same shared memory."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    transport: Transport = fastest(TorchTransport.over())
    guard = meet(GuardSettings(evidence=""), transport, ["here"] * rank.world_size, None)
    assert guard is not None
    plain, guarded = Communicator(transport), Communicator(GuardLayer(transport, guard))
    work = work_of(STEP_MS / COLLECTIVES)
    tensor = plain.empty(8).zero_()
    steps, calls = rank.settings["steps"], rank.settings["calls"]
    variants = {
        "step": per_call(step_of(plain, work), steps),
        "step with the guard": per_call(step_of(guarded, work), steps),
        "call": per_call(lambda: plain.all_reduce(tensor), calls),
        "call with the guard": per_call(lambda: guarded.all_reduce(tensor), calls),
    }
    figures = interleaved(variants, rank.settings["rounds"], warmup=2, together=plain.barrier)
    figures["own thread"] = {"share": [idle_share(rank.settings["idle_s"]) for _ in range(5)]}
    guard.close()
    return figures


def idle_share(seconds: float) -> float:
    """Per cent of a core that the guard's thread takes while the rank's own does nothing."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "lockstep-guard")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(
        thread.ident
    )  # of this thread alone: Gloo's own wakes up a hundred times a second
    start, start_cpu = time.perf_counter(), time.clock_gettime(clock)
    time.sleep(seconds)
    return 100 * (time.clock_gettime(clock) - start_cpu) / (time.perf_counter() - start)


def results(metric: str, figures: Samples, world_size: int) -> list[Result]:
    """The claims that can be read from one metric's figures."""

    def against(name: str, goal: str) -> Result:
        on, off = figures[f"{name} with the guard"], figures[name]
        added = statistics.median(a - b for a, b in zip(on, off, strict=True))
        per_operation = added / (COLLECTIVES if name == "step" else 1)
        what = f"{COLLECTIVES} all_reduces in a {STEP_MS:g} ms step" if name == "step" else "all_reduce of 8 floats"
        return compare(
            f"{what}, {metric}: with the guard / without",
            on,
            off,
            unit="us",
            world_size=world_size,
            goal=goal,
            added_us_per_operation=round(per_operation, 3),
        )

    return [against("step", GOAL), against("call", "")]


def main() -> None:
    """Measure on two ranks of this machine."""
    options = arguments("cost of the guard").parse_args()
    settings = {
        "rounds": 6 if options.quick else 400,
        "steps": 5 if options.quick else 3,
        "calls": 100 if options.quick else 200,
        "idle_s": 0.5 if options.quick else 2.0,
    }
    figures = slowest_rank(run_ranks(measure, 2, settings))
    share = figures.pop("own thread")["share"]
    found = [line for metric in figures for line in results(metric, figures[metric], 2)]
    found.append(compare("the guard's own thread", share, None, unit="% of a core", world_size=2, goal="under 1 %"))
    report("observe", found, record=options.record)


if __name__ == "__main__":
    main()
