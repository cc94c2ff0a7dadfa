"""Step time of lockstep's DistributedDataParallel against torch's: the same GPT-2, the same Gloo, the same processes.

    python benchmarks/bench_ddp.py [--ranks 2] [--shape compute|communication] [--floor] [--record]

Every variant owns a copy of the model and its AdamW. A round runs each of them once on the same batch, so what the
machine does meanwhile falls on all alike. Two figures per step: forward + backward (ends with averaged gradients), and
the whole step with the optimizer. `--floor` adds a second torch copy: how far from 1.00 two equal things come out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep
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
from lockstep.comm.torch_transport import TorchTransport

# Two ends of what a rank does in a step: many tokens through few weights, few tokens through many weights.
SHAPES: dict[str, dict[str, int]] = {
    "compute": {"n_layer": 4, "n_embd": 192, "n_head": 6, "vocab_size": 512, "B": 4, "T": 128},
    "communication": {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 4096, "B": 1, "T": 16},
}
ROUNDS = {"compute": 80, "communication": 60}
GOAL = "at most 1.00"


def model_of(shape: dict[str, int]) -> nn.Module:
    """The same weights on every rank and in every variant."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=shape["vocab_size"],
        n_positions=shape["T"],
        n_embd=shape["n_embd"],
        n_layer=shape["n_layer"],
        n_head=shape["n_head"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    config.loss_type = "ForCausalLMLoss"
    return GPT2LMHeadModel(config)


def batch_of(shape: dict[str, int], rank: int, number: int) -> Tensor:
    """This rank's tokens [B, T] of one round, equal for all variants."""
    generator = torch.Generator().manual_seed(number * 1000 + rank + 1_000_000)
    return torch.randint(shape["vocab_size"], (shape["B"], shape["T"]), generator=generator)


class Variant:
    """One copy of the model, wrapped in its own way, with its optimizer."""

    def __init__(self, name: str, shape: dict[str, int], rank: int) -> None:
        self.shape, self.rank = shape, rank
        self.average: Callable[[], None] = lambda: None
        self.context: Callable[[], Any] = contextlib.nullcontext
        self.inner = model_of(shape)
        self.model: Any = self._wrap(name)
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-4)

    def _wrap(self, name: str) -> Any:
        if name == "naive":
            comm = lockstep.Communicator(TorchTransport.over())
            self.average = lambda: lockstep.average_gradients(self.inner, comm)
            return self.inner
        wrapper: Any = lockstep.DistributedDataParallel if name.startswith("lockstep") else TorchDDP
        wrapped = wrapper(self.inner, gradient_as_bucket_view=name == "torch views")
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
    variants = {name: Variant(name, rank.settings["shape"], rank.rank) for name in rank.settings["variants"]}
    steps = {name: variant.step for name, variant in variants.items()}
    figures = interleaved(steps, rank.settings["rounds"], warmup=5, together=dist.barrier)
    gradient_bytes = sum(p.nbytes for p in variants["torch"].inner.parameters())
    report = {"figures": figures, "gradient_bytes": gradient_bytes, "distance": distances(variants)}
    dist.destroy_process_group()
    return report


def distances(variants: dict[str, Variant]) -> dict[str, float]:
    """Largest difference of any weight from torch's after all rounds; 0.0 says the same work was done, bit for bit."""
    reference = list(variants["torch"].inner.parameters())
    found = {}
    for name, variant in variants.items():
        if not name.endswith("no_sync"):  # those train alone
            pairs = zip(variant.inner.parameters(), reference, strict=True)
            found[name] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return found


def results(shape: str, by_rank: list[dict[str, Any]], world_size: int) -> list[Result]:
    """Every variant against torch's default, in both metrics; beside the goal also against torch with bucket views."""
    figures: dict[str, Samples] = slowest_rank([rank["figures"] for rank in by_rank])
    found = []
    for metric, samples in figures.items():
        milliseconds = {name: [second * 1e3 for second in seconds] for name, seconds in samples.items()}
        pairs = [(name, "torch") for name in milliseconds if name != "torch"]
        pairs += [("lockstep", "torch views")] if {"lockstep", "torch views"} <= milliseconds.keys() else []
        for ours, theirs in pairs:
            found.append(
                compare(
                    f"{shape}, {metric}: {ours} / {theirs}",
                    milliseconds[ours],
                    milliseconds[theirs],
                    unit="ms",
                    world_size=world_size,
                    goal=GOAL if ours == "lockstep" else "",
                    gradient_mib=round(by_rank[0]["gradient_bytes"] / 2**20, 1),
                    weights_differ_by=by_rank[0]["distance"].get(ours),
                )
            )
    return found


def main() -> None:
    """Measure the chosen shapes and print."""
    parser = arguments("DistributedDataParallel: step time against torch's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, help="default: enough for a quartile width of a few percent")
    parser.add_argument("--floor", action="store_true", help="torch against torch: the noise of this run")
    parser.add_argument("--only-torch", action="store_true", help="leave lockstep out (tries the harness itself)")
    options = parser.parse_args()
    variants = [] if options.only_torch else ["naive", "lockstep no_sync", "lockstep"]
    variants += ["torch", "torch again"] if options.floor else ["torch"]
    variants += ["torch views", "torch no_sync"]
    found: list[Result] = []
    for shape in options.shape or SHAPES:
        rounds = options.rounds or (4 if options.quick else ROUNDS[shape])
        settings = {"shape": SHAPES[shape], "variants": variants, "rounds": rounds}
        found += results(shape, run_ranks(measure, options.ranks, settings), options.ranks)
    report("ddp", found, record=options.record)


if __name__ == "__main__":
    main()
