"""Checkpoints of 300 MB beside torch.save, torch.distributed.checkpoint (DCP) and the bare system calls, in one run.

    python benchmarks/bench_checkpoint.py [--ranks 1 --ranks 2] [--megabytes 300] [--record]

The state is a GPT-2's weights with AdamW's two means, replicated on all ranks. Each round does everything once:

stall: how long training stands still for a save in the background. Beside it a copy of the bytes that this rank writes
    into memory that was used before, tensor by tensor ("memcpy"), which no way of saving can do without.
durable: from the call until the checkpoint would survive a power cut. torch.save knows no such moment: its file is
    synced right after it. Beside them "write + fsync": each rank's share of the same bytes by os.write, with no hash.
load: into tensors that exist. Ours compares every byte with its SHA-256 before it hands out a tensor, the others
    compare nothing. Beside them "read": the same bytes by readinto. "cached" as the files were just written; "from
    disk" after posix_fadvise(DONTNEED) has dropped them from the page cache, so they come from the device.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from comm_variants import over_gloo
from gpt import Shape, model_of
from harness import Rank, Result, Samples, arguments, compare, interleaved, report, run_ranks, slowest_rank
from lockstep.checkpoint.checkpointer import Checkpointer

ROUNDS = 12
GOAL_STALL = "at most 1.25 of memcpy"
_BLOCK = 8 << 20

Figures = dict[str, float]
State = dict[str, dict[str, Tensor]]


# ------------------------------------------------------------------ what is saved


def state_of(megabytes: int) -> State:
    """Weights and two means of a GPT-2 whose number of layers makes it about that large."""
    layers = max(1, round((megabytes * 1e6 / 12 - 2.2e6) / 3.16e6))
    shape: Shape = {"n_layer": layers, "n_embd": 512, "n_head": 8, "vocab_size": 4096, "B": 1, "T": 32}
    weights = {name: param.detach().clone() for name, param in model_of(shape).named_parameters()}
    means = {name: torch.randn_like(weight) for name, weight in weights.items()}
    return {"model": weights, "exp_avg": means, "exp_avg_sq": {name: mean.square() for name, mean in means.items()}}


def tensors_of(state: State) -> list[Tensor]:
    """All tensors."""
    return [tensor for part in state.values() for tensor in part.values()]


def share_of(tensors: list[Tensor], rank: Rank) -> list[Tensor]:
    """Whole tensors that make up about a world_size-th of all bytes: what one rank of several writes."""
    total, share, before = sum(tensor.nbytes for tensor in tensors), [], 0
    for tensor in tensors:
        if rank.rank * total <= before * rank.world_size < (rank.rank + 1) * total:
            share.append(tensor)
        before += tensor.nbytes
    return share


# ------------------------------------------------------------------ what is measured


class Sides:
    """Everything that is measured on one rank: each method is one way to do it once, and returns seconds by metric."""

    def __init__(self, rank: Rank, state: State) -> None:
        self._rank, self._state, self._folder = rank, state, rank.folder
        self._share = share_of(tensors_of(state), rank)
        self._copies = [torch.empty_like(tensor).fill_(0) for tensor in self._share]
        self._keeper = Checkpointer(self._folder / "kept", over_gloo(), keep=None)
        self._checkpointer = Checkpointer(self._folder / "lockstep", over_gloo(), keep=1)
        self._into = {name: {fqn: torch.zeros_like(x) for fqn, x in part.items()} for name, part in state.items()}
        self._buffer = bytearray(_BLOCK)

    def stalls(self) -> dict[str, Callable[[int], Figures]]:
        """The ways to save while training goes on."""
        return {
            "memcpy": self._memcpy,
            "lockstep save_async": self._ours_async,
            "DCP async_save": self._dcp_async,
            "torch.save": self._torch_save,
        }

    def saves(self) -> dict[str, Callable[[int], Figures]]:
        """The ways to save and wait."""
        return {
            "write + fsync": self._write,
            "lockstep save": self._ours,
            "lockstep save and prune": self._ours_pruning,
            "DCP save": self._dcp,
            "torch.save + fsync": self._torch_save_durable,
        }

    def loads(self) -> dict[str, Callable[[int], Figures]]:
        """The ways to load what the ways to save have left."""
        return {
            f"{name}, {where}": _loading(load, self._folder if where == "from disk" else None)
            for where in ("cached", "from disk")
            for name, load in {
                "read": self._read,
                "lockstep load": self._ours_load,
                "DCP load": self._dcp_load,
                "torch.load": self._torch_load,
            }.items()
        }

    def check(self) -> None:
        """Raises where what was loaded last is not what was saved."""
        for wanted, found in zip(tensors_of(self._state), tensors_of(self._into), strict=True):
            assert torch.equal(wanted, found)

    def close(self) -> None:
        """End our checkpointers."""
        self._keeper.close()
        self._checkpointer.close()

    def _memcpy(self, number: int) -> Figures:
        start = time.perf_counter()
        for copy, tensor in zip(self._copies, self._share, strict=True):
            copy.copy_(tensor)
        return {"stall": time.perf_counter() - start}

    def _ours_async(self, number: int) -> Figures:
        start = time.perf_counter()
        pending = self._checkpointer.save_async(self._next_step(), self._state)
        stall = time.perf_counter() - start
        pending.wait()
        return {"stall": stall, "durable, in the background": time.perf_counter() - start}

    def _ours(self, number: int) -> Figures:
        start = time.perf_counter()
        path = self._keeper.save(1, self._state)
        seconds = time.perf_counter() - start
        dist.barrier()
        if self._rank.rank == 0:
            shutil.rmtree(path)
        return {"durable": seconds}

    def _ours_pruning(self, number: int) -> Figures:
        start = time.perf_counter()
        self._checkpointer.save(self._next_step(), self._state)
        return {"durable": time.perf_counter() - start}

    def _next_step(self) -> int:
        return (self._checkpointer.latest() or 0) + 1

    def _dcp_async(self, number: int) -> Figures:
        self._fresh("dcp")
        start = time.perf_counter()
        pending = dcp.async_save(self._state, checkpoint_id=self._folder / "dcp")
        stall = time.perf_counter() - start
        assert isinstance(pending, Future)
        pending.result()
        return {"stall": stall, "durable, in the background": time.perf_counter() - start}

    def _dcp(self, number: int) -> Figures:
        self._fresh("dcp")
        start = time.perf_counter()
        dcp.save(self._state, checkpoint_id=self._folder / "dcp")
        return {"durable": time.perf_counter() - start}

    def _torch_save(self, number: int) -> Figures:
        self._fresh("torch")
        start = time.perf_counter()
        if self._rank.rank == 0:
            torch.save(self._state, self._folder / "torch" / "state.pt")
        stall = time.perf_counter() - start
        _sync(self._folder / "torch")
        return {"stall": stall}

    def _torch_save_durable(self, number: int) -> Figures:
        self._fresh("torch")
        start = time.perf_counter()
        if self._rank.rank == 0:
            torch.save(self._state, self._folder / "torch" / "state.pt")
            _sync(self._folder / "torch")
        dist.barrier()
        return {"durable": time.perf_counter() - start}

    def _write(self, number: int) -> Figures:
        self._fresh("plain")
        start = time.perf_counter()
        descriptor = os.open(self._folder / "plain" / f"rank-{self._rank.rank}", os.O_WRONLY | os.O_CREAT)
        for tensor in self._share:
            view = tensor.view(-1).view(torch.uint8).numpy().data
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)
        dist.barrier()
        return {"durable": time.perf_counter() - start}

    def _read(self) -> None:
        for path in sorted((self._folder / "plain").iterdir()):
            with path.open("rb", buffering=0) as file:
                while file.readinto(self._buffer):
                    pass

    def _ours_load(self) -> None:
        self._checkpointer.load(self._into)

    def _dcp_load(self) -> None:
        dcp.load(self._into, checkpoint_id=self._folder / "dcp")

    def _torch_load(self) -> None:
        loaded = torch.load(self._folder / "torch" / "state.pt", weights_only=True)
        for into, tensor in zip(tensors_of(self._into), tensors_of(loaded), strict=True):
            into.copy_(tensor)

    def _fresh(self, name: str) -> None:
        if self._rank.rank == 0:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            (self._folder / name).mkdir()
        dist.barrier()


def _loading(load: Callable[[], None], dropped: Path | None) -> Callable[[int], Figures]:
    def run(number: int) -> Figures:
        if dropped is not None:
            _drop(dropped)
        dist.barrier()
        start = time.perf_counter()
        load()
        return {"load": time.perf_counter() - start}

    return run


def _sync(folder: Path) -> None:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _drop(folder: Path) -> None:
    """Let the page cache forget the files in `folder`, all of which are on the device."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------ ranks


def measure(rank: Rank) -> dict[str, Samples]:
    """One rank: saves in the background, saves, loads."""
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    sides = Sides(rank, state_of(rank.settings["megabytes"]))
    figures: dict[str, Samples] = {}
    for group in (sides.stalls(), sides.saves(), sides.loads()):
        figures |= interleaved(group, rank.settings["rounds"], warmup=2, together=dist.barrier)
    sides.check()
    sides.close()
    dist.barrier()
    return figures


def results(figures: Mapping[str, Samples], world_size: int, megabytes: float) -> Iterator[Result]:
    """Ours beside the bare system calls, and beside each peer."""
    for metric, samples in figures.items():
        milliseconds = {name: [second * 1e3 for second in seconds] for name, seconds in samples.items()}
        for name in (name for name in samples if name.startswith("lockstep")):
            where = name.partition(", ")[2]
            for peer in (peer for peer in samples if not peer.startswith("lockstep") and peer.endswith(where)):
                yield compare(
                    f"{metric}: {name} / {peer.partition(', ')[0]}",
                    milliseconds[name],
                    milliseconds[peer],
                    unit="ms",
                    world_size=world_size,
                    goal=GOAL_STALL if (metric, peer) == ("stall", "memcpy") else "",
                    megabytes_per_s=round(megabytes / sorted(samples[name])[len(samples[name]) // 2]),
                )


def main() -> None:
    """Measure and print."""
    parser = arguments("saving and loading 300 MB")
    parser.add_argument("--ranks", type=int, action="append", help="default: 1, 2")
    parser.add_argument("--megabytes", type=int, default=300)
    options = parser.parse_args()
    settings: dict[str, Any] = {"rounds": 2 if options.quick else ROUNDS, "megabytes": options.megabytes}
    megabytes = sum(tensor.nbytes for tensor in tensors_of(state_of(options.megabytes))) / 1e6
    found: list[Result] = []
    for world_size in options.ranks or (1, 2):
        figures = slowest_rank(run_ranks(measure, world_size, settings))
        found += results(figures, world_size, megabytes)
    report("checkpoint", found, record=options.record)


if __name__ == "__main__":
    main()
