"""What the guard and the record cost a training step: both on, as they are by default, and both off in the same run.

    python benchmarks/bench_observe.py [--quick] [--record]

A step is arithmetic that takes some 10 ms, as many turns of it on every rank, and in between 8 all-reduces over shared
memory, as the buckets of a model have them: half of them asynchronous, all from the user's own code. Every round runs
some steps with and some without, in changing order, so that the two see the machine in the same mood: the median of the
rounds' own ratios is the figure. The first of them does not count: it finds caches that steps of the other kind have
used, where in a run each step finds those of its own kind. Two figures: the wall time of the slower rank, and the
processor time of the ranks' main threads, which no neighbour on the machine can lengthen much.

The noise of the arithmetic is still larger than what is looked for. So the operations are measured alone, too, where
they stand: processor time from before to after each, over a transport that moves nothing, and the marks of the step.
What they take more with than without is what the step takes more, for nothing else differs. The same for torch's own
all_reduce over Gloo, as in an unchanged script. The guard's own thread runs during all of it; what it takes of a core
is a figure of its own, from seconds in which the rank does nothing else.
"""

from __future__ import annotations

import gc
import operator
import statistics
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from harness import (
    Rank,
    Result,
    Samples,
    arguments,
    compare,
    interleaved,
    interval_95,
    paired,
    report,
    run_ranks,
    slowest_rank,
    threads_per_rank,
)
from lockstep.comm.choose import fastest
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, CommOp, Work
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import Transport
from lockstep.errors import CommError
from lockstep.observe.guard import Guard, GuardSettings
from lockstep.observe.init import meet
from lockstep.observe.profile.session import Profile, open_profile
from lockstep.observe.profile.step_clock import PHASES
from lockstep.observe.recording import GuardLayer

STEP_MS = 10.0
COLLECTIVES = 8
BUCKET = 16_384  # elements of each
GOAL = "under 1 % of the step"
GOAL_US = "under 100 us, 1 % of 10 ms"
_TURN = 3, 1  # steps that count, after so many that do not
_WARM = 3  # operations after torch's calls were exchanged, which Python looks up anew then


def work_of(milliseconds: float, agree: Callable[[int], int] = int) -> Callable[[], None]:
    """Arithmetic that takes about so long here, out of the caches of the operations between.

    agree: from the number of turns that this rank would take to that of all ranks.
    """
    matrix = torch.randn(160, 160)

    def turn() -> None:
        torch.mm(matrix, matrix)

    best = min(timeit.repeat(turn, number=10, repeat=100)) / 10  # the others of this machine come and go
    turns = agree(max(1, round(milliseconds / 1e3 / best)))

    def work() -> None:
        for _ in range(turns):
            turn()

    return work


def fewest(comm: Communicator) -> Callable[[int], int]:
    """The smallest number of all ranks'."""

    def agree(mine: int) -> int:
        number = torch.tensor([mine])
        comm.all_reduce(number, "min")
        return int(number)

    return agree


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


def alone(
    make: Callable[[Callable[[], None]], Callable[[], object]], work: Callable[[], None]
) -> Callable[[int], dict[str, float]]:
    """A variant: microseconds of this thread's processor in a step, `make(work)`, without its arithmetic."""
    spent_s = 0.0

    def timed() -> None:
        nonlocal spent_s
        spent_s += time.thread_time()
        work()
        spent_s -= time.thread_time()

    step = make(timed)

    def run(_: int) -> dict[str, float]:
        nonlocal spent_s
        step()
        spent_s = -time.thread_time()
        step()
        return {"alone": (spent_s + time.thread_time()) * 1e6}

    return run


def per_call(call: Callable[[], object], calls: int, settling: int = 0) -> Callable[[int], dict[str, float]]:
    """A variant that repeats `call` and returns microseconds of each: on the clock, and of this thread's processor.

    settling: calls before them that do not count.
    """

    def run(_: int) -> dict[str, float]:
        for _ in range(settling):
            call()
        start, start_cpu = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            call()
        return {
            "wall": (time.perf_counter() - start) / calls * 1e6,
            "main thread": (time.thread_time() - start_cpu) / calls * 1e6,
        }

    return run


@final
class Nothing(Transport):
    """Moves nothing: what is left of an operation is what it takes to ask for it."""

    def __init__(self, beside: Transport) -> None:
        self.name, self.rank, self.world_size = "nothing", beside.rank, beside.world_size
        self.global_ranks, self.device, self.timeout_s = beside.global_ranks, beside.device, beside.timeout_s

    def submit(self, op: CommOp) -> Work:
        return DONE

    def split(self, groups: Sequence[Sequence[int]]) -> None:
        return None

    def abort(self, error: CommError) -> None:
        pass

    def close(self) -> None:
        pass


@final
class Marks:
    """What `lockstep run` and `lockstep train` do in each step beside its operations."""

    def __init__(self, guard: Guard, profile: Profile) -> None:
        self._guard = guard
        self._profile = profile
        self._clock = guard.recorder.clock

    def of(self, step: Callable[[], object]) -> Callable[[], None]:
        """`step` with its phases marked, and its end told."""

        def marked() -> None:
            for phase in range(len(PHASES)):
                self._clock.switch(phase)
            step()
            self._profile.step_done(self._guard.recorder.step + 1, tokens=1)
            self._guard.step_done()

        return marked


def measure(rank: Rank) -> dict[str, Samples]:
    """One rank: steps and bare operations, with everything on and off, over the same shared memory."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    switch = Stock()
    transport = fastest(TorchTransport.over())
    guard = meet(GuardSettings(evidence=""), transport, ["here"] * rank.world_size, None)
    assert guard is not None
    switch.is_watched()
    plain, guarded = Communicator(transport), Communicator(GuardLayer(transport, guard))
    nothing = Nothing(transport)
    still, still_guarded = Communicator(nothing), Communicator(GuardLayer(nothing, guard, name="nothing"))
    work = work_of(STEP_MS / COLLECTIVES, fewest(plain))
    tensor = plain.empty(8).zero_()
    rounds, calls = rank.settings["rounds"], rank.settings["calls"]
    gc.collect()
    gc.freeze()  # collections need not walk what torch has brought along; those of the loop count
    with tempfile.TemporaryDirectory() as folder:
        profile = open_profile(Path(folder), guard, {}, rank=rank.rank, world_size=rank.world_size)
        marks = Marks(guard, profile)
        figures = interleaved(
            {"off": per_call(step_of(plain, work), *_TURN), "on": per_call(marks.of(step_of(guarded, work)), *_TURN)},
            rounds // sum(_TURN),
            warmup=5,
            together=plain.barrier,
        )
        # before torch's own calls are swapped: the guard would look for those that it was not shown
        figures["own thread"] = {"share": [idle_share(rank.settings["idle_s"]) for _ in range(5)]}
        bare = {
            "off": alone(lambda each: step_of(still, each), work),
            "on": alone(lambda each: marks.of(step_of(still_guarded, each)), work),
        }
        figures["step alone"] = interleaved(bare, rounds // 10, warmup=10, together=plain.barrier)["alone"]
        figures["stock"] = interleaved(switch.variants(work), rounds // 10, warmup=5, together=plain.barrier)["alone"]
        profile.close()
    bare["on"] = alone(lambda each: step_of(still_guarded, each), work)
    figures["operations alone"] = interleaved(bare, rounds // 10, warmup=10, together=plain.barrier)["alone"]
    both = {
        "off": per_call(lambda: plain.all_reduce(tensor), calls),
        "on": per_call(lambda: guarded.all_reduce(tensor), calls),
    }
    figures["call"] = interleaved(both, rounds // 10, warmup=2, together=plain.barrier)["main thread"]
    guard.close()
    return figures


@final
class Stock:
    """Torch's own calls as they were before the guard came, and as it has replaced them."""

    def __init__(self) -> None:
        self._places = ((ProcessGroup, "allreduce"), (dist.Work, "wait"))
        self._before = [vars(owner)[name] for owner, name in self._places]
        self._watched = self._before

    def is_watched(self) -> None:
        """The guard is there."""
        self._watched = [vars(owner)[name] for owner, name in self._places]

    def _put(self, calls: Sequence[object]) -> None:
        for (owner, name), call in zip(self._places, calls, strict=True):
            setattr(owner, name, call)

    def variants(self, work: Callable[[], None]) -> dict[str, Callable[[int], dict[str, float]]]:
        """Steps of synchronous operations over Gloo."""
        bucket = torch.zeros(BUCKET)

        def make(each: Callable[[], None]) -> Callable[[], None]:
            def step() -> None:
                for _ in range(COLLECTIVES):
                    each()
                    dist.all_reduce(bucket)

            return step

        def run(calls: Sequence[object]) -> Callable[[int], dict[str, float]]:
            timed = alone(make, work)

            def block(number: int) -> dict[str, float]:
                self._put(calls)
                for _ in range(_WARM):
                    dist.all_reduce(bucket)
                try:
                    return timed(number)
                finally:
                    self._put(self._watched)

            return block

        return {"off": run(self._before), "on": run(self._watched)}


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


def ratio(metric: str, on: Sequence[float], off: Sequence[float]) -> Result:
    """How much longer a step is."""
    return compare(
        f"{COLLECTIVES} all_reduces in a {STEP_MS:g} ms step, {metric}: all on / all off",
        on,
        off,
        unit="us",
        world_size=2,
        goal=GOAL,
        **paired(on, off),
    )


def added(what: str, on: Sequence[float], off: Sequence[float], goal: str, operations: int) -> Result:
    """What the main thread does more, in microseconds of its processor."""
    more = statistics.median(on) - statistics.median(off)
    return Result.of_value(
        f"{what}: added processor time of the main thread",
        more,
        unit="us",
        better="less",
        world_size=2,
        rounds=len(on),
        goal=goal,
        interval_95=interval_95(operator.sub, on, off),
        undisturbed=round(statistics.quantiles(on, n=4)[0] - statistics.quantiles(off, n=4)[0], 1),
        per_operation=round(more / operations, 2),
        without=round(statistics.median(off), 1),
    )


def mean_rank(by_rank: Sequence[dict[str, Samples]], metric: str) -> Samples:
    """Of every round the mean over the ranks."""
    return {
        name: [statistics.fmean(figures) for figures in zip(*(each[metric][name] for each in by_rank), strict=True)]
        for name in by_rank[0][metric]
    }


def main() -> None:
    """Measure on two ranks of this machine."""
    options = arguments("cost of the guard and the record").parse_args()
    settings = {
        "rounds": 50 if options.quick else 4000,
        "calls": 100 if options.quick else 200,
        "idle_s": 0.5 if options.quick else 2.0,
    }
    by_rank = run_ranks(measure, 2, settings)
    wall, share = (slowest_rank(by_rank)[metric] for metric in ("wall", "own thread"))
    metrics = ("main thread", "step alone", "operations alone", "stock", "call")
    cpu, bare, operations, stock, call = (mean_rank(by_rank, metric) for metric in metrics)
    found = [
        ratio("wall", wall["on"], wall["off"]),
        ratio("main thread", cpu["on"], cpu["off"]),
        added(f"step with {COLLECTIVES} operations, all on", bare["on"], bare["off"], GOAL_US, COLLECTIVES),
        added(f"step with {COLLECTIVES} operations, guard", operations["on"], operations["off"], GOAL_US, COLLECTIVES),
        added(f"step with {COLLECTIVES} of torch's all_reduce", stock["on"], stock["off"], GOAL_US, COLLECTIVES),
        added("all_reduce of 8 floats, one after the other", call["on"], call["off"], "", 1),
        compare("the guard's own thread", share["share"], None, unit="% of a core", world_size=2, goal="under 1 %"),
    ]
    report("observe", found, record=options.record)


if __name__ == "__main__":
    main()
