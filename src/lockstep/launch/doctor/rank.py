"""What each rank does for `lockstep doctor`: says who it is, knocks at the others, and tries an all-reduce.

Findings go to the channel, not through the group that is examined; `group.py` judges them. Every wait has a limit.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import lockstep
from lockstep.comm import preflight
from lockstep.comm.communicator import Communicator
from lockstep.comm.place import Place, find_place
from lockstep.errors import EnvironmentProblems, LockstepError
from lockstep.launch.channel import Channel
from lockstep.launch.doctor.group import Clock, Facts, Link, Pair, Reduced, check_meeting, stages
from lockstep.launch.doctor.probes import PACKAGES, installed

_PINGS = 16
_WHOLE = 4 * 2**20  # elements of the all-reduce over all: 16 MiB
_PART = 2**20  # of the exchange of a pair
_TRIES = 3
_OPERATION_S = 30.0


def main(words: Sequence[str]) -> None:
    """words: address, port and prefix of the channel, and how many seconds to wait for others."""
    address, port, prefix, wait_s = words[0], int(words[1]), words[2], float(words[3])
    faulthandler.dump_traceback_later(3 * wait_s + 4 * _OPERATION_S, exit=True)  # nothing below can hang for longer
    place = find_place(os.environ)
    channel = Channel.join(address, port, prefix, wait_s, is_ours=True)
    channel.put("world", place.world_size)
    everywhere = int(os.environ["GROUP_WORLD_SIZE"]) > 1
    with socket.create_server(("" if everywhere else "127.0.0.1", 0), backlog=4096) as listener:
        mine = _facts(place, channel.address, listener.getsockname()[1])
        channel.put(f"facts/{place.rank}", mine)
        if channel.missing([f"facts/{rank}" for rank in range(place.world_size)], wait_s):
            return
        facts = {fact["rank"]: fact for fact in channel.read_all("facts", place.world_size)}
        links = _knock(place.rank, facts)
        channel.put(f"links/{place.rank}", links)
        if channel.missing([f"links/{rank}" for rank in range(place.world_size)], wait_s):
            return
    _compare_clocks(channel, place.rank, _leaders(facts))
    everyone = [link for some in channel.read_all("links", place.world_size) for link in some]
    if not check_meeting(list(facts.values())) and all(link["result"] in ("open", "stranger") for link in everyone):
        _work(channel, place.rank, wait_s)


def _facts(place: Place, towards: str, port: int) -> Facts:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "lockstep": lockstep.__version__}
    versions |= {name: text for name, text in installed().items() if name in PACKAGES and name != "torch"}
    versions |= {"cuda": torch.version.cuda or "", "nccl": _nccl()}
    return Facts(
        rank=place.rank,
        host=socket.gethostname(),
        machine=preflight.machine_id(),
        pid=os.getpid(),
        versions=versions,
        devices=sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*")),
        gpus=torch.cuda.device_count(),
        addresses=_addresses(os.environ, towards),
        port=port,
        meets_at=place.address,
        leads_to=preflight.addresses_of(place.address),  # judged in check_meeting
    )


def _nccl() -> str:
    if not torch.cuda.is_available():
        return ""
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def _addresses(environ: Mapping[str, str], towards: str) -> list[str]:
    """Where others can reach this machine: at the interface the user named, the one towards the channel, else any."""
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    own = preflight.interfaces()
    likely = [address for name, address in own if name in named]
    likely += [preflight.local_address(address) for address in preflight.addresses_of(towards)]
    likely = [address for address in likely if address and not preflight.is_loopback(address)]
    return likely[:1] or [address for _, address in own if not preflight.is_loopback(address)]


def _leaders(facts: Mapping[int, Facts]) -> list[int]:
    """The first rank of each machine."""
    first = {facts[rank]["machine"]: rank for rank in sorted(facts, reverse=True)}
    return sorted(first.values())


def _knock(rank: int, facts: Mapping[int, Facts]) -> list[Link]:
    """From the first rank of a machine to the first of each other one, at the same time."""
    leaders = _leaders(facts)
    others = [other for other in leaders if other != rank] if rank in leaders else []
    if not others:
        return []

    def try_one(other: int) -> Link:
        found = preflight.knock(facts[other]["addresses"], facts[other]["port"])
        words = {"silent": "no answer in 3 s", "refused": "refused", "unreachable": found.detail}
        return Link(src=rank, dst=other, result=found.result, detail=words.get(found.result, ""))

    with ThreadPoolExecutor(min(32, len(others))) as pool:
        return list(pool.map(try_one, others))


def _compare_clocks(channel: Channel, rank: int, leaders: Sequence[int]) -> None:
    """Rank 0 asks the first rank of each other machine for its clock; the fastest of some answers counts."""
    others = [leader for leader in leaders if leader != 0]
    if rank == 0:
        channel.put("clocks", [_offset(channel, other) for other in others])
    elif rank in others:
        for ping in range(_PINGS):
            channel.read(f"ping/{rank}/{ping}")
            channel.put(f"pong/{rank}/{ping}", time.time())


def _offset(channel: Channel, other: int) -> Clock:
    best = Clock(rank=other, offset_s=0.0, error_s=float("inf"))
    for ping in range(_PINGS):
        start_s, start = time.time(), time.perf_counter()
        channel.put(f"ping/{other}/{ping}", 0)
        there_s = channel.read(f"pong/{other}/{ping}")
        half_s = (time.perf_counter() - start) / 2
        if half_s < best["error_s"]:
            best = Clock(rank=other, offset_s=there_s - (start_s + half_s), error_s=half_s)
    return best


# ---------------------------------------------------------------------- the group


def _work(channel: Channel, rank: int, wait_s: float) -> None:
    """Form the group as a program does, and measure it; what goes wrong is written down."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RuntimeWarning)
            start_s = min(wait_s, _OPERATION_S)
            with lockstep.init(timeout_s=_OPERATION_S, start_timeout_s=start_s, verbose=False) as comm:
                channel.put(f"reduced/{rank}", _all_reduce(comm, said))
                channel.put(f"pairs/{rank}", _pairs(comm))
                comm.barrier()
    except EnvironmentProblems as error:
        channel.put(f"error/{rank}", " ".join(error.problems))
    except (LockstepError, RuntimeError) as error:
        channel.put(f"error/{rank}", f"{type(error).__name__}: {error}")


def _best(comm: Communicator, action: Callable[[], object]) -> float:
    """The shortest time of some tries, in seconds; the first, in which connections are made, does not count."""
    times: list[float] = []
    for _ in range(_TRIES + 1):
        start = time.perf_counter()
        action()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _all_reduce(comm: Communicator, said: Sequence[warnings.WarningMessage]) -> Reduced:
    tensor = comm.empty(_WHOLE)
    expected = comm.world_size * (comm.world_size + 1) / 2

    def sum_up() -> None:
        tensor.fill_(comm.rank + 1.0)
        comm.all_reduce(tensor)

    seconds = _best(comm, sum_up)
    is_right = bool((tensor == expected).all())
    warning = next((str(one.message) for one in said if issubclass(one.category, RuntimeWarning)), "")
    name = f"{comm.transport.name} ({comm.device.type})"
    return Reduced(nbytes=tensor.nbytes, seconds=seconds, is_right=is_right, transport=name, warning=warning)


def _pairs(comm: Communicator) -> list[Pair]:
    """Those in which this rank is the first."""
    found: list[Pair] = []
    mine, theirs = comm.empty(_PART).zero_(), comm.empty(_PART)
    for stage in stages(comm.world_size):
        for first, second in stage:
            if comm.rank in (first, second):
                other = second if comm.rank == first else first
                ops = (comm.send_op(mine, other), comm.recv_op(theirs, other))
                seconds = _best(comm, lambda ops=ops: comm.batch_send_recv(ops))
                if comm.rank == first:
                    found.append(Pair(first=first, second=second, nbytes=mine.nbytes, seconds=seconds))
        comm.barrier()
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
