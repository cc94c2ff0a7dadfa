"""From the environment to a communicator, and back: the one place where ranks become a group."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import lockstep
from lockstep.comm import kernel, preflight
from lockstep.comm.choose import fastest
from lockstep.comm.communicator import Communicator
from lockstep.comm.devices import choose_device, set_threads, use_gpu
from lockstep.comm.handshake import Record
from lockstep.comm.meeting_point import Meeting, leave_meetings, meet, say
from lockstep.comm.place import Place, place_on_machines, read_place
from lockstep.comm.process_group import layers, transport_of
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import Transport
from lockstep.errors import CommError, ConfigError, EnvironmentProblems

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TIMEOUT_S = 600.0

# What is put over the transport of all ranks, made from it, the machine of each rank, and a store that all reach, which
# is only there where ranks are on several machines. Collective.
Layer = Callable[[Transport, Sequence[str], "dist.Store | None"], Transport]


class Options(TypedDict, total=False):
    """What users may ask of `lockstep.init`, which says what it means."""

    rank: int | None
    world_size: int | None
    address: str | None
    port: int | None
    file: str | os.PathLike[str] | None
    device: torch.device | str | None
    backend: str | None
    threads: int | None
    timeout_s: float | None
    start_timeout_s: float
    verbose: bool


def init(layer: Layer, caller: str, **options: Unpack[Options]) -> Communicator:
    """`lockstep.init`, with `layer` over the transport. caller: "train.py:12", where the user's code calls it."""
    settings = Settings(**options)
    _refuse_second(caller)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # stacks when C++ kills the process, as gloo does where shapes differ
    if dist.is_initialized():
        comm = _adopt(settings, layer)
    else:
        comm = _found(settings, layer)
        _open[comm] = weakref.ref(distributed_c10d._get_default_group()), caller
        comm.forget = lambda closed: _open.pop(closed, None)  # listed there it would keep its shared memory
    if comm.rank == 0:
        settings.say(_headline(comm))
    return comm


@dataclass(frozen=True)
class Settings:
    """What the user has asked for. None: as the environment says, or what is usual."""

    rank: int | None = None
    world_size: int | None = None
    address: str | None = None
    port: int | None = None
    file: str | os.PathLike[str] | None = None
    device: torch.device | str | None = None
    backend: str | None = None
    threads: int | None = None
    timeout_s: float | None = None
    start_timeout_s: float = 120.0
    verbose: bool = True

    @property
    def limit_s(self) -> float:
        """Of every operation."""
        return _TIMEOUT_S if self.timeout_s is None else self.timeout_s

    def problems(self) -> list[str]:
        """What is wrong with the numbers."""
        found = []
        for name, value in (("timeout_s", self.timeout_s), ("start_timeout_s", self.start_timeout_s)):
            if value is not None and not 0 < value < 1e9:
                found.append(f"{name}={value!r}: it is a number of seconds above 0")
        if self.threads is not None and self.threads < 1:
            found.append(f"threads={self.threads!r}: a rank needs at least 1")
        return found

    def say(self, text: str) -> None:
        """For people."""
        if self.verbose:
            say(text)


# What `init` made and nobody closed: torch's group, whose sockets end with the last reference, and where it was made.
_open: dict[Communicator, tuple[weakref.ref[dist.ProcessGroup], str]] = {}
_adopted = itertools.count()  # groups of others that `init` has taken over
_interfaces: set[str] = set()  # values of GLOO_SOCKET_IFNAME that an earlier init put there


# ---------------------------------------------------------------------- a new group


def _found(settings: Settings, layer: Layer) -> Communicator:
    """Look, meet, shake hands, make the group, and try it."""
    asked = {name: getattr(settings, name) for name in ("rank", "world_size", "address", "port")}
    file = None if settings.file is None else os.fspath(settings.file)
    place, wrong = read_place(os.environ, **asked, file=file)
    problems = [problem.text for problem in wrong]
    device = choose_device(settings.device, settings.backend, place, problems)
    problems += settings.problems()
    meeting = meet(settings, place, {problem.field for problem in wrong}, problems)
    mine = _record(place, device, meeting.address)
    store = meeting.gather(settings, place, mine)
    machines = [record["machine"] for record in meeting.records]
    place = place_on_machines(place, machines)
    device = use_gpu(device, place.local_rank)
    set_threads(settings.threads, mine, meeting.records)
    others = [record["address"] for record in meeting.records if record["machine"] != mine["machine"]]
    _set_gloo_interface(preflight.gloo_interface([meeting.address, *others], one_machine=not others))
    return _communicator(layer, _make_group(settings, place, device, store), machines, store, place)


def _make_group(settings: Settings, place: Place, device: torch.device, store: dist.Store) -> Transport:
    backend = settings.backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=settings.start_timeout_s),  # how long a rank that dies now is waited for
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise CommError(f"rank {place.rank}: torch could not make the {backend} group: {error}") from error
    group = distributed_c10d._get_default_group()
    distributed_c10d._set_pg_timeout(timedelta(seconds=settings.limit_s), group)
    plain = TorchTransport(group, device, settings.limit_s, owned=True)
    try:
        Communicator(plain).barrier(label="init")  # after it no rank needs the store, so any rank may leave at once
        return plain if settings.backend else fastest(plain)
    except BaseException:
        plain.close()
        raise


def _communicator(
    layer: Layer, transport: Transport, machines: Sequence[str], store: dist.Store, place: Place
) -> Communicator:
    try:
        comm = Communicator(layer(transport, machines, store if len(set(machines)) > 1 else None))
    except BaseException:
        transport.close()
        raise
    comm.place = place
    return comm


def _set_gloo_interface(interface: str) -> None:
    """Gloo reads this variable for every group, also for later sub-groups, so it stays; what the user set counts."""
    present = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if present and present not in _interfaces:
        return
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        _interfaces.add(interface)
    elif present:
        del os.environ["GLOO_SOCKET_IFNAME"]


def _record(place: Place, device: torch.device, meeting_address: str) -> Record:
    return Record(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank if place.source("local_rank") != "default" else None,
        pid=os.getpid(),
        host=socket.gethostname(),
        machine=preflight.machine_id(),
        address=preflight.local_address(meeting_address) if meeting_address else "",
        cores=f"{kernel.core_mask():x}",
        gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        lockstep=lockstep.__version__,
        torch=str(torch.__version__),
    )


# ---------------------------------------------------------------------- a group that exists


def _adopt(settings: Settings, layer: Layer) -> Communicator:
    """The user's own default group, with this process's place in it."""
    here, size, timeout_s = dist.get_rank(), dist.get_world_size(), settings.timeout_s
    given = [name for name in ("address", "port", "file", "backend", "device") if getattr(settings, name) is not None]
    problems = [f"{name}=...: the group exists already, made by init_process_group" for name in given]
    for name, asked, is_ in (("rank", settings.rank, here), ("world_size", settings.world_size, size)):
        if asked is not None and asked != is_:
            problems.append(f"{name}={asked}, but torch.distributed has been initialised with {name}={is_}")
    if timeout_s is not None and transport_of(dist.group.WORLD) is not None:
        problems.append(f"timeout_s={timeout_s}: the group has its own, give timeout= to init_process_group")
    problems += settings.problems()
    if problems:
        raise EnvironmentProblems(problems, "Leave these arguments out, or let lockstep.init() make the group.")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    store, own, plain = distributed_c10d._get_default_store(), transport_of(dist.group.WORLD), TorchTransport.over()
    if timeout_s is not None:
        plain = TorchTransport(plain.process_group, plain.device, timeout_s)
    found, _ = read_place(os.environ, rank=here, world_size=size, file="-")
    source = "torch.distributed.init_process_group"
    sources = {**dict(found.sources), "rank": source, "world_size": source}
    del sources["file"]
    place = replace(found, file="", launcher="process group", sources=tuple(sorted(sources.items())), agent_store=False)
    if store is not None and not layers:  # MPI has none; no guard says who is late
        patient = replace(settings, start_timeout_s=plain.timeout_s)
        Meeting(store, place, generations=_adopted).gather(patient, place, _record(place, torch.device("cpu"), ""))
    own = own or fastest(plain, group=plain.process_group.group_name)
    machines: list[str] = Communicator(own).all_gather_object(preflight.machine_id(), label="init")
    return _communicator(layer, own, machines, store, place_on_machines(place, machines))


def _refuse_second(caller: str) -> None:
    for group, earlier in _open.values():
        if dist.is_initialized() and dist.group.WORLD is group():
            raise ConfigError(
                f"lockstep.init() at {caller}: it was called before, at {earlier}, and that communicator is open. "
                "Pass it on, or close it first"
            )
    _open.clear()


# ---------------------------------------------------------------------- coming and going


def _headline(comm: Communicator) -> str:
    place = comm.place
    assert place is not None
    here = place.local_world_size
    machines = f"{here} of them on this machine, " if here < place.world_size else ""
    met = f", met at {place.meeting_point}" if place.address or place.file else ""
    threads = torch.get_num_threads()
    return (
        f"{place.describe()}: {machines}{comm.transport.name}, {comm.device.type}, {threads} thread(s) per rank, "
        f"timeout {comm.timeout_s:g} s{met}"
    )


@atexit.register
def _leave() -> None:
    """Close what the user did not, then let the process that holds the store go last."""
    for comm in tuple(_open):
        comm.close()
    leave_meetings()
