"""What the record of a run costs: the same training step with and without it, under the same guard.

    python benchmarks/bench_profile.py [--quick] [--record]

The step is that of bench_observe: 10 ms of arithmetic and 8 all-reduces over shared memory. With the record, it also
marks its phases, every operation is timed, and the guard's thread writes each step to a file.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from bench_observe import GOAL, STEP_MS, per_call
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
from lockstep.observe.guard import GuardSettings
from lockstep.observe.init import meet
from lockstep.observe.profile.phases import PHASES
from lockstep.observe.profile.run_record import file_of, is_listed
from lockstep.observe.profile.session import open_profile
from lockstep.observe.recording import GuardLayer
from observe_steps import COLLECTIVES, Arithmetic, averaging, buckets_of


def measure(rank: Rank) -> dict[str, Samples]:
    """One rank: steps with and without a record, in changing order; and how large the record is."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    transport = fastest(TorchTransport.over())
    guard = meet(GuardSettings(evidence=""), transport, ["here"] * rank.world_size, None)
    assert guard is not None
    comm = Communicator(GuardLayer(transport, guard))
    step = averaging(comm, buckets_of(comm), Arithmetic(STEP_MS / COLLECTIVES))
    steps = rank.settings["steps"]
    done = [0]

    with tempfile.TemporaryDirectory() as folder:
        clock = guard.recorder.clock
        profile = open_profile(Path(folder), guard, {}, rank=rank.rank, world_size=rank.world_size)

        def recorded() -> None:
            for phase in range(len(PHASES)):
                clock.switch(phase)
            step()
            done[0] += 1
            profile.step_done(done[0], tokens=1)

        def run(count: int, is_on: bool) -> dict[str, float]:
            clock.close_reader = profile.close if is_on else None
            return per_call(recorded if is_on else step, steps)(count)

        variants = {"without": lambda count: run(count, False), "with": lambda count: run(count, True)}
        figures = interleaved(variants, rank.settings["rounds"], warmup=2, together=comm.barrier)
        clock.close_reader = profile.close
        profile.close()
        listed = sum(map(is_listed, range(1, done[0] + 1)))
        size = file_of(Path(folder), rank.rank).stat().st_size
    figures["record"] = {"bytes": [size / done[0]], "listed": [listed]}
    guard.close()
    return figures


def results(metric: str, figures: Samples) -> Result:
    """The claim of one metric."""
    added = statistics.median(a - b for a, b in zip(figures["with"], figures["without"], strict=True))
    return compare(
        f"{COLLECTIVES} all_reduces in a {STEP_MS:g} ms step, {metric}: with the record / without",
        figures["with"],
        figures["without"],
        unit="us",
        world_size=2,
        goal=GOAL,
        added_us_per_step=round(added, 2),
    )


def main() -> None:
    """Measure on two ranks of this machine."""
    options = arguments("cost of the record").parse_args()
    settings = {"rounds": 6 if options.quick else 60, "steps": 5 if options.quick else 20}
    figures = slowest_rank(run_ranks(measure, 2, settings))
    size = figures.pop("record")["bytes"]
    found = [results(metric, figures[metric]) for metric in figures]
    found.append(compare("the record of a step", size, None, unit="bytes", world_size=2, goal=""))
    report("profile", found, record=options.record)


if __name__ == "__main__":
    main()
