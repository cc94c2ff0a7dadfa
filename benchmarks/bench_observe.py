"""What the guard and the record cost a training step: both on, as they are by default, and both off in the same run.

    python benchmarks/bench_observe.py [--quick] [--rounds 10000] [--record]

A step is 10 ms of arithmetic, and in between 8 all-reduces over shared memory, as the buckets of a model have them:
half of them asynchronous, all from the user's own code. Before them comes a backward, after them an optimizer's step,
of one number each. Steps with lockstep have all that `lockstep train` has: marks, what the guard has put into torch,
the record. Steps without have none of it. The first hundred of a run are looked at closely, later ones one in sixteen,
see `pace`: both are measured. The guard's own thread rests in steps without.

Every round runs sixteen steps of each kind, in changing order, so that all see the machine in the same mood: the median
of the rounds' own ratios is the figure. Two before them do not count: they find caches that steps of the other kind
have used, where in a run each step finds those of its own kind. All kinds work on the same tensors. Two figures: the
wall time of the slower rank, and the processor time of the ranks' main threads, which no neighbour on the machine can
lengthen much. The arithmetic goes by the processor's time, not by its amount; whether it gets less done in that, among
caches that are shared with the guard, is a figure of its own.

All but the arithmetic is measured alone, too, where it stands: processor time from after one piece of it to before the
next, over a transport that moves nothing. What that takes more with than without is what the step takes more. The same
for torch's own all_reduce over Gloo, as in an unchanged script. What the guard's own thread takes of a core is a figure
of its own, in such steps, and in seconds in which the rank does nothing else.
"""

from __future__ import annotations

import gc
import operator
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, final

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
)
from lockstep.comm.choose import fastest
from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport
from lockstep.observe import lookout
from lockstep.observe.guard import GuardSettings
from lockstep.observe.init import meet
from lockstep.observe.pace import EVERY, FIRST
from lockstep.observe.profile.session import open_profile
from lockstep.observe.recording import GuardLayer
from lockstep.observe.torch_training import attach_training
from observe_steps import BUCKET, COLLECTIVES, Arithmetic, Loop, Nothing, Variant, averaging, buckets_of

_T = TypeVar("_T")

STEP_MS = 10.0
GOAL = "under 1 % of the step"
GOAL_US = "under 100 us, 1 % of 10 ms"
_FIRST = f"the first {FIRST} steps"
_TURN = EVERY, 2  # steps that count, after so many that do not: what comes once in EVERY is in each, on average
_BEHIND = 10_000  # steps: of those before nearly all are listed one by one, however short they are
_WARM = 3  # operations after torch's calls were exchanged, which Python looks up anew then
_FEWER = 3  # rounds of steps as at first, of which a run has a hundred


def alone(
    make: Callable[[Callable[[], None]], Callable[[], object]],
    work: Callable[[], None],
    steps: int = 1,
    settling: int = 1,
) -> Variant:
    """A variant: microseconds of this thread's processor in a step, `make(work)`, without its arithmetic.

    steps, settling: so many count, after so many that do not.
    """
    spent_s = 0.0

    def timed() -> None:
        nonlocal spent_s
        spent_s += time.thread_time()
        work()
        spent_s -= time.thread_time()

    step = make(timed)

    def run(_: int) -> dict[str, float]:
        nonlocal spent_s
        for _ in range(settling):
            step()
        spent_s = -time.thread_time()
        for _ in range(steps):
            step()
        return {"alone": (spent_s + time.thread_time()) / steps * 1e6}

    return run


def per_call(call: Callable[[], object], calls: int, settling: int = 0) -> Variant:
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


def beside(run: Variant, work: Arithmetic) -> Variant:
    """The same, with what a product of its arithmetic has taken, and the guard's own thread meanwhile."""

    def block(number: int) -> dict[str, float]:
        done, spent_s = work.done, work.spent_s
        figures, share = with_share(lambda: run(number))
        return {**figures, "product": 1e6 * (work.spent_s - spent_s) / (work.done - done), "share": share}

    return block


def measure(rank: Rank) -> dict[str, Samples]:
    """One rank: steps and bare operations, with everything on and off, over the same shared memory."""
    torch.set_num_threads(1)  # as torchrun has it; more would wait on the cores that the guard's thread needs
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    switch = Stock()
    transport = fastest(TorchTransport.over())
    guard = meet(GuardSettings(evidence=""), transport, ["here"] * rank.world_size, None)
    assert guard is not None
    switch.is_watched()
    attach_training(guard)
    lookout._YOUNG = 1  # the run is no longer so
    plain, guarded = Communicator(transport), Communicator(GuardLayer(transport, guard))
    nothing = Nothing(transport)
    still, still_guarded = Communicator(nothing), Communicator(GuardLayer(nothing, guard, name="nothing"))
    buckets, apart = buckets_of(plain), buckets_of(still)
    work = Arithmetic(STEP_MS / COLLECTIVES)
    tensor = plain.empty(8).zero_()
    rounds, calls = rank.settings["rounds"], rank.settings["calls"]
    gc.collect()
    gc.freeze()  # collections need not walk what torch has brought along; those of the loop count
    figures: dict[str, Samples] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = open_profile(folder, guard, {}, rank=rank.rank, world_size=rank.world_size, begins_after=_BEHIND)
        loop = Loop(guard, profile)
        off, on = loop.bare(averaging(plain, buckets, work)), loop.marked(averaging(guarded, buckets, work))
        steps = loop.variants(beside(per_call(off, *_TURN), work), beside(per_call(on, *_TURN), work))
        for kinds, count in (("off", "later"), rounds // EVERY), (("off", "first"), max(3, rounds // EVERY // _FEWER)):
            found = interleaved({kind: steps[kind] for kind in kinds}, count, warmup=2, together=plain.barrier)
            figures |= {f"{metric}, {kinds[1]}": samples for metric, samples in found.items()}
        # before torch's own calls are swapped: the guard would look for those that it was not shown
        figures["own thread"] = {
            "idle": [with_share(partial(time.sleep, rank.settings["idle_s"]))[1] for _ in range(5)]
        }
        parts = loop.variants(
            alone(lambda each: loop.bare(averaging(still, apart, each)), work, *_TURN),
            alone(lambda each: loop.marked(averaging(still_guarded, apart, each)), work, *_TURN),
        )
        figures["step alone"] = interleaved(parts, max(2, rounds // 100), warmup=2, together=plain.barrier)["alone"]
        loop.end()
        figures["stock"] = interleaved(switch.variants(work), rounds // 30, warmup=5, together=plain.barrier)["alone"]
        profile.close()
    bare = {
        "off": alone(lambda each: averaging(still, apart, each), work),
        "on": alone(lambda each: averaging(still_guarded, apart, each), work),
    }
    figures["operations alone"] = interleaved(bare, rounds // 30, warmup=10, together=plain.barrier)["alone"]
    both = {
        "off": per_call(lambda: plain.all_reduce(tensor), calls),
        "on": per_call(lambda: guarded.all_reduce(tensor), calls),
    }
    figures["call"] = interleaved(both, rounds // 30, warmup=2, together=plain.barrier)["main thread"]
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

    def variants(self, work: Callable[[], None]) -> dict[str, Variant]:
        """Steps of synchronous operations over Gloo."""
        bucket = torch.zeros(BUCKET)

        def make(each: Callable[[], None]) -> Callable[[], None]:
            def step() -> None:
                for _ in range(COLLECTIVES):
                    each()
                    dist.all_reduce(bucket)

            return step

        def run(calls: Sequence[object]) -> Variant:
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


def with_share(act: Callable[[], _T]) -> tuple[_T, float]:
    """What it returns, and per cent of a core that the guard's own thread has taken meanwhile."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "lockstep-guard")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)  # of it alone: Gloo's own wakes up a hundred times a second
    start, start_cpu = time.perf_counter(), time.clock_gettime(clock)
    returned = act()
    return returned, 100 * (time.clock_gettime(clock) - start_cpu) / (time.perf_counter() - start)


def ratio(metric: str, figures: Samples, kind: str) -> Result:
    """How much longer a step of that kind is."""
    on, off = figures[kind], figures["off"]
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


def own_thread(when: str, shares: Sequence[float]) -> Result:
    """What the guard's thread takes: the mean, for it looks less often than a round begins."""
    rounds, mean = len(shares), statistics.fmean(shares)
    of_core = {"unit": "% of a core", "better": "less", "world_size": 2, "goal": "under 1 %"}
    return Result.of_value(f"the guard's own thread{when}", mean, rounds=rounds, **of_core)


def mean_rank(by_rank: Sequence[dict[str, Samples]], metric: str) -> Samples:
    """Of every round the mean over the ranks."""
    return {
        name: [statistics.fmean(figures) for figures in zip(*(each[metric][name] for each in by_rank), strict=True)]
        for name in by_rank[0][metric]
    }


def main() -> None:
    """Measure on two ranks of this machine."""
    parser = arguments("cost of the guard and the record")
    parser.add_argument("--rounds", type=int, default=10_000, help="of steps; a tenth does on a machine that is quiet")
    options = parser.parse_args()
    settings = {
        "rounds": 150 if options.quick else options.rounds,
        "calls": 100 if options.quick else 200,
        "idle_s": 0.5 if options.quick else 2.0,
    }
    by_rank = run_ranks(measure, 2, settings)
    slowest = slowest_rank(by_rank)
    bare, operations, stock, call = (
        mean_rank(by_rank, metric) for metric in ("step alone", "operations alone", "stock", "call")
    )
    operations_of = f"step with {COLLECTIVES} operations"
    found = [
        ratio("wall", slowest["wall, later"], "later"),
        ratio("main thread", mean_rank(by_rank, "main thread, later"), "later"),
        ratio(f"{_FIRST}, wall", slowest["wall, first"], "first"),
        ratio(f"{_FIRST}, main thread", mean_rank(by_rank, "main thread, first"), "first"),
        ratio("one product of its arithmetic", mean_rank(by_rank, "product, later"), "later"),
        added(f"{operations_of}, all on", bare["later"], bare["off"], GOAL_US, COLLECTIVES),
        added(f"{operations_of}, all on, {_FIRST}", bare["first"], bare["off"], GOAL_US, COLLECTIVES),
        added(f"{operations_of}, these alone", operations["on"], operations["off"], GOAL_US, COLLECTIVES),
        added(f"step with {COLLECTIVES} of torch's all_reduce", stock["on"], stock["off"], GOAL_US, COLLECTIVES),
        added("all_reduce of 8 floats, one after the other", call["on"], call["off"], "", 1),
        own_thread("", mean_rank(by_rank, "own thread")["idle"]),
        own_thread(", while a rank takes such steps", mean_rank(by_rank, "share, later")["later"]),
    ]
    report("observe", found, record=options.record)


if __name__ == "__main__":
    main()
