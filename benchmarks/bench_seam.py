"""What the seam costs per operation: `Communicator.all_reduce` against `torch.distributed.all_reduce` over one Gloo.

    python benchmarks/bench_seam.py [--record]

Three figures: the seam alone (over a transport that does nothing, so only the record and its way through the door are
timed), the price of one more layer, and the whole operation beside torch's on a tiny tensor, where nothing hides it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

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
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, CommOp, Work
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CommError

GOAL_US = 5.0
LAYERS = 4


class NoTransport(Transport):
    """Everything is done before it was asked: what remains is the seam itself."""

    name = "none"
    rank = 0
    world_size = 1
    global_ranks = (0,)
    device = torch.device("cpu")
    timeout_s = 1.0

    def submit(self, op: CommOp) -> Work:
        return DONE

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        return self

    def abort(self, error: CommError) -> None:
        pass

    def close(self) -> None:
        pass


class PassOn(TransportLayer):
    """The cheapest layer there can be: it looks at the operation and passes it on."""

    def submit(self, op: CommOp) -> Work:
        return self.inner.submit(op)

    def over(self, inner: Transport) -> TransportLayer:
        return PassOn(inner)


def layered(transport: Transport, layers: int) -> Communicator:
    """A communicator over `transport` under so many layers."""
    for _ in range(layers):
        transport = PassOn(transport)
    return Communicator(transport)


def per_call(call: Callable[[], object], calls: int) -> Callable[[int], dict[str, float]]:
    """A variant that repeats `call` and returns microseconds for each."""

    def run(_: int) -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return {"call": (time.perf_counter() - start) / calls * 1e6}

    return run


def measure(rank: Rank) -> dict[str, Samples]:
    """One rank: all variants on tensors of 8 floats."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    tensor = torch.zeros(8)
    transport = TorchTransport.over()
    seam, seam_layers = layered(NoTransport(), 0), layered(NoTransport(), LAYERS)
    ours, ours_layers = layered(transport, 0), layered(transport, LAYERS)
    calls, seam_calls = rank.settings["calls"], rank.settings["calls"] * 10
    variants = {
        "seam": per_call(lambda: seam.all_reduce(tensor), seam_calls),
        "seam under layers": per_call(lambda: seam_layers.all_reduce(tensor), seam_calls),
        "torch": per_call(lambda: dist.all_reduce(tensor), calls),
        "lockstep": per_call(lambda: ours.all_reduce(tensor), calls),
        "lockstep under layers": per_call(lambda: ours_layers.all_reduce(tensor), calls),
        "torch async": per_call(lambda: waited(dist.all_reduce(tensor, async_op=True)), calls),
        "lockstep async": per_call(lambda: ours.all_reduce(tensor, async_op=True).wait(), calls),
    }
    figures = interleaved(variants, rank.settings["rounds"], warmup=2, together=dist.barrier)
    dist.destroy_process_group()
    return figures


def waited(work: Any) -> None:
    """Wait for a torch work, which its signature calls optional."""
    work.wait()


def results(figures: Samples, world_size: int) -> list[Result]:
    """The claims that can be read from one world's figures."""
    seam = figures["seam"]
    layer = [(b - a) / LAYERS for a, b in zip(seam, figures["seam under layers"], strict=True)]

    def against(ours: str, theirs: str) -> Result:
        added = statistics.median(a - b for a, b in zip(figures[ours], figures[theirs], strict=True))
        name, goal = f"all_reduce of 8 floats: {ours} / {theirs}", f"at most {GOAL_US} us more"
        return compare(
            name, figures[ours], figures[theirs], unit="us", world_size=world_size, goal=goal, added_us=round(added, 3)
        )

    pairs = [("lockstep", "torch"), ("lockstep under layers", "torch"), ("lockstep async", "torch async")]
    found = [against(*pair) for pair in pairs]
    if world_size == 1:
        found.insert(0, compare("one more layer", layer, None, unit="us", world_size=1))
        found.insert(0, compare("the seam alone", seam, None, unit="us", world_size=1, goal=f"at most {GOAL_US} us"))
    return found


def main() -> None:
    """Measure on one rank (no network in the figure) and on two."""
    options = arguments("cost of the seam per operation").parse_args()
    found: list[Result] = []
    for world_size in (1, 2):
        settings = {"rounds": 5 if options.quick else 60, "calls": 20 if options.quick else 200}
        figures = slowest_rank(run_ranks(measure, world_size, settings))["call"]
        found += results(figures, world_size)
    report("seam", found, record=options.record)


if __name__ == "__main__":
    main()
