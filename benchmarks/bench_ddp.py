"""Step time of DistributedDataParallel, lockstep's and torch's, over shared memory and Gloo: one GPT-2, one run.

    python benchmarks/bench_ddp.py [--ranks 2] [--shape compute] [--shape gpt-30m] [--wide] [--floor] [--record]

Every variant owns a copy of the model and its AdamW. A round runs each of them once on the same batch, so what the
machine does meanwhile falls on all alike. Two figures per step: forward + backward (ends with averaged gradients), and
the whole step with the optimizer. "torch" is torch's class on Gloo, "alone" the bare model: no communication at all,
and with a barrier what it costs to wait for the slower rank, which no transport can save.
What a variant adds to that step is its price, and `gone` is the share of torch's price that it does without:
(torch - ours) / (torch - alone). `--wide` adds what tells the class from the transport (naive averaging, no_sync, torch
with bucket views), `--floor` a second torch copy: how far from 1.00 two equal things come out.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from gpt import GPT_30M, Groups, batch_of, model_of
from harness import (
    Rank,
    Result,
    Samples,
    arguments,
    compare,
    interleaved,
    interval_95,
    report,
    run_ranks,
    slowest_rank,
    threads_per_rank,
)
from lockstep.comm.process_group import transport_of

# Two ends of what a rank does in a step: many tokens through few weights, few tokens through many weights.
SHAPES: dict[str, dict[str, int]] = {
    "compute": {"n_layer": 4, "n_embd": 192, "n_head": 6, "vocab_size": 512, "B": 4, "T": 128},
    "compute-heavy": {"n_layer": 4, "n_embd": 256, "n_head": 8, "vocab_size": 512, "B": 4, "T": 256},
    "communication": {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 4096, "B": 1, "T": 16},
    "gpt-30m": GPT_30M,
}
ROUNDS = {"compute": 80, "compute-heavy": 40, "communication": 60, "gpt-30m": 60}
SHARED, GLOO = "lockstep on shared memory", "lockstep on gloo"
MEETING = "alone and a barrier"  # nothing is exchanged, but every backward ends with the slowest rank's
BY_THEMSELVES = ("alone", MEETING)
REFERENCES = (*BY_THEMSELVES, "torch")  # always measured
VARIANTS = (GLOO, "torch on lockstep", SHARED)
WIDE = ("naive", "lockstep no_sync", "torch views", "torch no_sync")
GOAL_ADDED = 1.02  # of the step alone, where there is much to compute
GOAL_GONE = 75.0  # percent of what torch on Gloo adds, where there is much to communicate


class Variant:
    """One copy of the model, wrapped in its own way, with its optimizer."""

    def __init__(self, name: str, shape: dict[str, int], rank: int, groups: Groups) -> None:
        self.shape, self.rank = shape, rank
        self.over: str | None = None  # the transport's name
        self.average: Callable[[], object] = lambda: None
        self.context: Callable[[], Any] = contextlib.nullcontext
        self.inner = model_of(shape)
        self.model: Any = self._wrap(name, groups)
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-4)

    def _wrap(self, name: str, groups: Groups) -> Any:
        if name == MEETING:
            self.average = groups.shared.barrier
        if name in BY_THEMSELVES:
            return self.inner
        if name == "naive":
            self.average = lambda: lockstep.average_gradients(self.inner, groups.gloo)
            return self.inner
        if name.startswith("lockstep"):
            comm = groups.shared if name == SHARED else groups.gloo
            self.over = comm.transport.name
            wrapped: Any = lockstep.DistributedDataParallel(self.inner, process_group=comm)
        else:
            group = groups.backend if name == "torch on lockstep" else None
            transport = transport_of(group)
            self.over = "gloo" if transport is None else transport.name
            wrapped = TorchDDP(self.inner, process_group=group, gradient_as_bucket_view=name == "torch views")
        if name.endswith("no_sync"):
            self.context = wrapped.no_sync
        return wrapped

    def step(self, number: int) -> dict[str, float]:
        """One training step; seconds until the gradients are averaged, and until the weights are updated."""
        tokens = batch_of(self.shape, self.rank, number)
        start = time.perf_counter()
        with self.context():
            self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.average()
        averaged = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"forward+backward": averaged - start, "whole step": time.perf_counter() - start}


def measure(rank: Rank) -> dict[str, Any]:
    """One rank: all variants of one shape."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    groups = Groups()
    variants = {name: Variant(name, rank.settings["shape"], rank.rank, groups) for name in rank.settings["variants"]}
    steps = {name: variant.step for name, variant in variants.items()}
    figures = interleaved(steps, rank.settings["rounds"], warmup=5, together=dist.barrier)
    gradient_bytes = sum(p.nbytes for p in variants["torch"].inner.parameters())
    report = {"figures": figures, "gradient_bytes": gradient_bytes, "distance": distances(variants)}
    report["over"] = {name: variant.over for name, variant in variants.items()}
    dist.destroy_process_group()
    return report


def distances(variants: dict[str, Variant]) -> dict[str, float]:
    """Largest difference of any weight from torch's after all rounds; 0.0 says the same work was done, bit for bit."""
    reference = list(variants["torch"].inner.parameters())
    found = {}
    for name, variant in variants.items():
        if name not in BY_THEMSELVES and not name.endswith("no_sync"):  # those train by themselves
            pairs = zip(variant.inner.parameters(), reference, strict=True)
            found[name] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return found


def results(shape: str, by_rank: list[dict[str, Any]], world_size: int) -> list[Result]:
    """Every variant against torch's default in both metrics; what each whole step adds to the step alone."""
    figures: dict[str, Samples] = slowest_rank([rank["figures"] for rank in by_rank])
    figures = {
        metric: {name: [second * 1e3 for second in seconds] for name, seconds in samples.items()}
        for metric, samples in figures.items()
    }
    found = [result for metric in figures for result in against_torch(shape, metric, figures[metric], by_rank)]
    whole = figures["whole step"]
    for name in (name for name in whole if name != "alone" and not name.endswith("no_sync")):
        found.append(against_alone(shape, name, whole, world_size))
        if name in VARIANTS:
            found.append(gone(shape, name, whole, world_size))
    return found


def against_torch(shape: str, metric: str, samples: Samples, by_rank: list[dict[str, Any]]) -> list[Result]:
    """Step times beside torch's, also beside torch's with bucket views. On the same Gloo, ours has the goal."""
    pairs = [(name, "torch") for name in samples if name not in ("torch", *BY_THEMSELVES)]
    pairs += [(GLOO, "torch views")] if "torch views" in samples and GLOO in samples else []
    return [
        compare(
            f"{shape}, {metric}: {ours} / {theirs}",
            samples[ours],
            samples[theirs],
            unit="ms",
            world_size=len(by_rank),
            goal="at most 1.00" if ours == GLOO else "",
            gradient_mib=round(by_rank[0]["gradient_bytes"] / 2**20, 1),
            weights_differ_by=by_rank[0]["distance"].get(ours),
            over=by_rank[0]["over"][ours],
        )
        for ours, theirs in pairs
    ]


def against_alone(shape: str, name: str, samples: Samples, world_size: int) -> Result:
    """A whole step beside the step without communication, and what it adds, from differences within rounds."""
    pairs = zip(samples[name], samples["alone"], strict=True)
    added = statistics.median(with_others - alone for with_others, alone in pairs)
    result = f"{shape}, whole step: {name} / alone"
    goal = f"at most {GOAL_ADDED}" if shape.startswith("compute") and name == SHARED else ""
    return compare(
        result, samples[name], samples["alone"], unit="ms", world_size=world_size, goal=goal, added_ms=round(added, 2)
    )


def gone(shape: str, name: str, samples: Samples, world_size: int) -> Result:
    """How much of what torch on Gloo adds to the step alone `name` does without; 100 % would be all."""

    def percent(torch_ms: float, ours_ms: float, alone_ms: float) -> float:
        return 100 * (torch_ms - ours_ms) / (torch_ms - alone_ms)

    three = (samples["torch"], samples[name], samples["alone"])
    return Result.of_value(
        f"{shape}, whole step: of what torch adds is gone with {name}",
        percent(*(statistics.median(figures) for figures in three)),
        unit="%",
        better="more",
        world_size=world_size,
        rounds=len(samples[name]),
        goal=f"at least {GOAL_GONE:.0f}" if shape != "compute" and name == SHARED else "",
        interval_95=interval_95(percent, *three),
    )


def main() -> None:
    """Measure the chosen shapes and print."""
    parser = arguments("DistributedDataParallel: step time over shared memory and Gloo, ours and torch's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, help="default: enough for a quartile width of a few percent")
    parser.add_argument("--variant", choices=[*VARIANTS, *WIDE], action="append", help=f"default: {VARIANTS}")
    parser.add_argument("--wide", action="store_true", help=f"the default and {WIDE}")
    parser.add_argument("--floor", action="store_true", help="torch against torch: the noise of this run")
    parser.add_argument("--only-torch", action="store_true", help="leave lockstep out (tries the harness itself)")
    options = parser.parse_args()
    chosen = ["torch views", "torch no_sync"] if options.only_torch else options.variant or [*VARIANTS]
    chosen += [name for name in WIDE if options.wide and name not in chosen]
    variants = [*REFERENCES, *chosen, *(["torch again"] if options.floor else [])]
    found: list[Result] = []
    for shape in options.shape or SHAPES:
        rounds = options.rounds or (4 if options.quick else ROUNDS[shape])
        settings = {"shape": SHAPES[shape], "variants": variants, "rounds": rounds}
        found += results(shape, run_ranks(measure, options.ranks, settings), options.ranks)
    report("ddp", found, record=options.record)


if __name__ == "__main__":
    main()
