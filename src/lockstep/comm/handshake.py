"""Ranks tell each other who they are before they form a group: a wrong world becomes one sentence on every rank.

Works over any key-value store with torch's store methods. Every rank reads one verdict, which the last rank to arrive
(all is well, or not) or the first to see a contradiction writes; so all ranks raise the same text at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypedDict

from lockstep.comm.preflight import NOTICE_S
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveTimeout, EnvironmentProblems

_SHOWN = 8  # ranks named in one sentence
_LINGER_S = 3.0  # the rank that holds the store lets the others read a bad verdict before it goes
_PAUSE_S = 0.25  # between looks into the store, which all ranks ask


class Store(Protocol):
    """What is used of a torch store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...  # blocks until there is a value
    def add(self, key: str, amount: int, /) -> int: ...  # counts up from 0; the new count
    def check(self, keys: list[str], /) -> bool: ...  # whether all have a value; never blocks
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # writes over `expected`, "": none


class Record(TypedDict):
    """What a rank says about itself."""

    rank: int
    world_size: int
    local_rank: int | None  # None where no launcher gave one
    pid: int
    host: str
    machine: str  # equal for ranks that share a kernel and its network
    address: str  # from which it talks to the meeting point; "" where the ranks meet in a file
    cores: str  # hexadecimal mask
    gpus: int
    visible_gpus: str  # CUDA_VISIBLE_DEVICES
    lockstep: str
    torch: str


def who(record: Record) -> str:
    """`rank 1 on host (pid 7)`"""
    return f"rank {record['rank']} on {record['host']} (pid {record['pid']})"


def shake_hands(
    store: Store, record: Record, timeout_s: float, where: str, holds_store: bool, say: Callable[[str], None]
) -> list[Record]:
    """Every rank's record, in rank order, once all are there and agree. say: who is waited for, where that takes long.

    Collective: every rank; blocks until all have arrived, at most `timeout_s`.
    Raises: EnvironmentProblems (world sizes, a rank twice, versions, GPUs) and CollectiveTimeout (who never arrived),
    the same on every rank.
    """
    contradiction = _arrive(store, record, where)
    if contradiction:
        _decide(store, {"problem": contradiction})
    elif store.add("arrived", 1) == record["world_size"]:
        records: list[Record] = [json.loads(store.get(f"rank/{rank}")) for rank in range(record["world_size"])]
        problem = disagreement(records)
        _decide(store, {"problem": problem} if problem else {"records": records})
    verdict = _verdict(store, record, timeout_s, where, say)
    if "records" in verdict and not contradiction:
        return verdict["records"]
    store.add("read", 1)
    if holds_store:
        wait_until(lambda: store.add("read", 0) >= store.add("came", 0), _LINGER_S, _PAUSE_S)
    if "missing" in verdict:
        raise CollectiveTimeout(verdict["problem"], verdict["missing"])
    raise EnvironmentProblems([contradiction or verdict["problem"]])


def disagreement(records: Sequence[Record]) -> str:
    """What keeps ranks that all arrived from being one job; "" where nothing does."""
    versions: dict[str, Record] = {}
    devices: dict[tuple[str, str, int], Record] = {}
    for record in records:
        versions.setdefault(f"lockstep {record['lockstep']} and torch {record['torch']}", record)
        # without GPUs two launchers may well stand on one machine, each counting its ranks from 0
        if record["local_rank"] is not None and record["gpus"]:
            device = (record["machine"], record["visible_gpus"], record["local_rank"])
            other = devices.setdefault(device, record)
            if other is not record:
                return f"{who(other)} and {who(record)} would share one GPU: both were given local rank {device[2]}"
    if len(versions) > 1:
        named = "; ".join(f"{who(record)} has {version}" for version, record in versions.items())
        return f"ranks run different versions: {named}. Install the same everywhere"
    return gpu_shortage(records)


def gpu_shortage(records: Sequence[Record]) -> str:
    """The sentence for a machine with fewer GPUs than ranks; "" where each rank has one of its own."""
    machines: dict[str, list[Record]] = {}
    for record in records:
        if record["gpus"]:
            machines.setdefault(record["machine"], []).append(record)
    for ranks in machines.values():
        # a launcher may show each rank one GPU, its own
        each_its_own = len({record["visible_gpus"] for record in ranks}) == len(ranks)
        fewest = min(record["gpus"] for record in ranks)
        if fewest < len(ranks) and not each_its_own:
            shown = ranks[0]["visible_gpus"]
            limit = f" (CUDA_VISIBLE_DEVICES={shown})" if shown else ""
            return f"{ranks[0]['host']} has {fewest} GPU(s){limit} for {len(ranks)} ranks: start fewer, or device='cpu'"
    return ""


def _arrive(store: Store, record: Record, where: str) -> str:
    """Claim the rank; what contradicts an earlier claim, or ""."""
    mine = json.dumps(record)
    rank = record["rank"]
    store.add("came", 1)
    first: Record = json.loads(store.compare_set("first", "", mine))
    if store.add(f"claim/{rank}", 1) > 1:
        other: Record = json.loads(store.get(f"rank/{rank}"))
        return (
            f"rank {rank} was claimed twice at {where}: by pid {other['pid']} on {other['host']} and by pid "
            f"{record['pid']} on {record['host']}. Give every process its own RANK, and every job its own port or file"
        )
    store.set(f"rank/{rank}", mine)
    if first["world_size"] != record["world_size"]:
        sizes = " and ".join(f"{who(r)} was started with {r['world_size']}" for r in (first, record))
        return f"ranks disagree on the world size at {where}: {sizes}. Give all the same WORLD_SIZE"
    return ""


def _verdict(store: Store, record: Record, timeout_s: float, where: str, say: Callable[[str], None]) -> dict[str, Any]:
    # A store's own wait would print C++ warnings.
    if not wait_until(lambda: store.check(["verdict"]), min(NOTICE_S, timeout_s), _PAUSE_S):
        missing, late, seen = _absent(store, record["world_size"])
        if timeout_s > NOTICE_S and missing and seen.startswith(who(record)):  # one rank says it
            say(f"waiting for {late} at {where}, up to {timeout_s:g} s; seen: {seen}")
    if not wait_until(lambda: store.check(["verdict"]), max(timeout_s - NOTICE_S, 0.0), _PAUSE_S):
        missing, late, seen = _absent(store, record["world_size"])
        problem = (
            f"{late} never arrived at {where} in {timeout_s:g} s; seen: {seen}. Look at the "
            f"output of {late}: it was not started, ended early, or was given another address or port"
        )
        _decide(store, {"problem": problem, "missing": missing})
    return json.loads(store.get("verdict"))


def _absent(store: Store, size: int) -> tuple[list[int], str, str]:
    """The ranks that are not there; in words; who is there."""
    there = [rank for rank in range(size) if store.check([f"rank/{rank}"])]
    missing = [rank for rank in range(size) if rank not in there]
    seen: list[Record] = [json.loads(store.get(f"rank/{rank}")) for rank in there[:_SHOWN]]
    late = f"rank{'s' * (len(missing) != 1)} {listed(missing)}"
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    return missing, late, ", ".join(map(who, seen)) + more


def listed(ranks: Sequence[int]) -> str:
    """Ranks for a sentence, the first of them where there are many."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"{shown} and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else shown


def _decide(store: Store, verdict: dict[str, Any]) -> None:
    """Write the verdict, unless there is one."""
    store.compare_set("verdict", "", json.dumps(verdict))
