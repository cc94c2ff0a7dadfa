"""What a transport and a bucket occupy on each rank, as the kernel counts it. Each case in processes of its own."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm_variants import over_gloo, over_shared_memory
from harness import Rank, Result, run_ranks, threads_per_rank
from lockstep.comm.communicator import Communicator

MIB = 2**20
BUCKET_MIB = 64
CASES = ("gloo", "staged", "zero-copy")
_ROLLUP = Path("/proc/self/smaps_rollup")
Pages = dict[str, float]  # MiB of "Pss" (a page that W processes share counts 1 / W on each), "Pss_Shmem", "Rss"


def pages() -> Pages:
    """What this process occupies now."""
    fields = dict(line.split(":") for line in _ROLLUP.read_text().splitlines()[1:])
    return {name: int(fields[name].split()[0]) / 1024 for name in ("Pss", "Pss_Shmem", "Rss")}


def occupy(rank: Rank) -> dict[str, Pages]:
    """One rank of one case: the pages after each stage, which all ranks reach before any of them counts."""
    torch.set_num_threads(threads_per_rank(rank.world_size))
    dist.init_process_group("gloo", init_method=rank.rendezvous, rank=rank.rank, world_size=rank.world_size)
    gloo = over_gloo()
    gloo.all_reduce(torch.ones(1024))
    stages = {"before": _pages_together()}
    comm = gloo if rank.settings["case"] == "gloo" else over_shared_memory(gloo)
    comm.all_reduce(torch.ones(1024))
    stages["transport"] = _pages_together()
    bucket = _bucket(comm if rank.settings["case"] == "zero-copy" else gloo)
    comm.all_reduce(bucket)
    stages["bucket"] = _pages_together()
    del bucket
    stages["released"] = _pages_together()
    if comm is not gloo:
        comm.close()
    dist.destroy_process_group()
    return stages


def _bucket(comm: Communicator) -> Tensor:
    return comm.empty(BUCKET_MIB * MIB // 4).fill_(1.0)


def _pages_together() -> Pages:
    dist.barrier()
    counted = pages()
    dist.barrier()
    return counted


def measure_memory(world_size: int) -> list[Result]:
    """The transport alone, and one bucket in each case; nothing where the system does not tell."""
    if not _ROLLUP.exists():
        return []
    by_case = {case: run_ranks(occupy, world_size, {"case": case}) for case in CASES}
    found = [_result("memory: the transport", by_case["zero-copy"], "before", "transport")]
    for case, by_rank in by_case.items():
        name = f"memory: a {BUCKET_MIB} MiB bucket and its all_reduce, {case}"
        found.append(_result(name, by_rank, "transport", "bucket", left=_added(by_rank, "transport", "released")))
    return found


def _added(by_rank: list[dict[str, Pages]], before: str, after: str) -> Pages:
    """MiB that a stage added, per rank."""
    return {
        name: statistics.mean(stages[after][name] - stages[before][name] for stages in by_rank)
        for name in by_rank[0][before]
    }


def _result(name: str, by_rank: list[dict[str, Pages]], before: str, after: str, left: Pages | None = None) -> Result:
    added = _added(by_rank, before, after)
    extra: dict[str, Any] = {"shared": round(added["Pss_Shmem"], 2), "resident": round(added["Rss"], 2)}
    if left is not None:
        extra["after_release"] = round(left["Pss"], 2)
    unit, world_size = "MiB per rank", len(by_rank)
    return Result.of_value(
        name, added["Pss"], unit=unit, better="less", world_size=world_size, rounds=1, goal="", **extra
    )
