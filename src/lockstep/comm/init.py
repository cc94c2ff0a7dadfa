"""From the environment to a communicator, and back: the one place where ranks become a group."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import lockstep
from lockstep.comm import preflight
from lockstep.comm.choose import fastest
from lockstep.comm.communicator import Communicator
from lockstep.comm.devices import choose_device, set_threads, use_gpu
from lockstep.comm.handshake import Record, shake_hands
from lockstep.comm.place import HINT, Place, place_on_machines, read_place
from lockstep.comm.process_group import transport_of
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import Transport
from lockstep.errors import CommError, ConfigError, EnvironmentProblems, PeerLost

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TIMEOUT_S = 600.0
_GREETING_S = 10.0  # a store answers in milliseconds, one on a machine that is out of memory in seconds
_FAREWELL_S = 10.0  # how long the process that holds the store stays for ranks that are still at work
_HOST_KEY = "lockstep/host"

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
    settings = _Settings(**options)
    _refuse_second(caller)
    _enable_faulthandler()
    if dist.is_initialized():
        comm = _adopt(settings, layer)
    else:
        comm = _found(settings, layer)
        group = dist.group.WORLD
        assert group is not None
        _sessions[:] = [_Session(comm, weakref.ref(group), caller)]
        comm.forget = _forget
    if settings.verbose and comm.rank == 0:
        _say(_headline(comm))
    return comm


@dataclass(frozen=True)
class _Settings:
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
            _say(text)


@dataclass
class _Session:
    """A group that `init` made."""

    comm: Communicator
    group: weakref.ref[dist.ProcessGroup]  # Gloo's sockets and threads end with the last reference
    caller: str


@dataclass
class _Meeting:
    """An open meeting point. It stays for the life of the process, so that a later `init` cannot meet a closing one."""

    store: dist.Store
    place: Place
    address: str = ""  # the IP address, where the ranks meet at one
    generations: Iterator[int] = field(default_factory=itertools.count)
    records: list[Record] = field(default_factory=list)


_sessions: list[_Session] = []
_meetings: dict[str, _Meeting] = {}
_interfaces: set[str] = set()  # values of GLOO_SOCKET_IFNAME that an earlier init put there


# ---------------------------------------------------------------------- a new group


def _found(settings: _Settings, layer: Layer) -> Communicator:
    """Look, meet, shake hands, make the group, and try it."""
    asked = {name: getattr(settings, name) for name in ("rank", "world_size", "address", "port")}
    file = None if settings.file is None else os.fspath(settings.file)
    place, wrong = read_place(os.environ, **asked, file=file)
    problems = [problem.text for problem in wrong]
    device = choose_device(settings.device, settings.backend, place, problems)
    problems += settings.problems()
    meeting = _meet(settings, place, {problem.field for problem in wrong}, problems)
    prefix = f"lockstep/{place.run_id or '-'}/{place.restart_count}/{next(meeting.generations)}"
    store = dist.PrefixStore(prefix, meeting.store)
    mine = _record(place, device, meeting.address)
    try:
        meeting.records = shake_hands(
            store, mine, settings.start_timeout_s, place.meeting_point, place.hosts_store, settings.say
        )
    except dist.DistError as error:
        holder = "torchrun's agent" if place.agent_store else "rank 0"
        text = f"{holder}, which holds {place.meeting_point}, ended while the ranks were gathering: look at its output"
        raise PeerLost(text, rank=None if place.agent_store else 0) from error
    place = place_on_machines(place, [record["machine"] for record in meeting.records])
    device = use_gpu(device, place.local_rank)
    set_threads(settings.threads, mine, meeting.records)
    others = [record["address"] for record in meeting.records if record["machine"] != mine["machine"]]
    _set_gloo_interface(preflight.gloo_interface([meeting.address, *others], one_machine=not others))
    transport = _make_group(settings, place, device, store)
    try:
        comm = Communicator(_under(layer, transport, [record["machine"] for record in meeting.records], store))
    except BaseException:
        transport.close()
        raise
    comm.place = place
    return comm


def _make_group(settings: _Settings, place: Place, device: torch.device, store: dist.Store) -> Transport:
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
    group = dist.group.WORLD
    assert group is not None
    distributed_c10d._set_pg_timeout(timedelta(seconds=settings.limit_s), group)
    plain = TorchTransport(group, device, settings.limit_s, owned=True)
    try:
        Communicator(plain).barrier(label="init")  # after it no rank needs the store, so any rank may leave at once
        return plain if settings.backend else fastest(plain)
    except BaseException:
        plain.close()
        raise


def _under(layer: Layer, transport: Transport, machines: Sequence[str], store: dist.Store) -> Transport:
    return layer(transport, machines, store if len(set(machines)) > 1 else None)


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
        cores=f"{preflight.core_mask():x}",
        gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        lockstep=lockstep.__version__,
        torch=str(torch.__version__),
    )


# ---------------------------------------------------------------------- where the ranks meet


def _meet(settings: _Settings, place: Place, spoilt: set[str], problems: list[str]) -> _Meeting:
    """The store of this job. Raises EnvironmentProblems with `problems` and what is wrong with the meeting point."""
    meeting = _meetings.get(place.meeting_point)
    if meeting is not None and not problems:
        return meeting
    addresses: list[str] = []
    listening = preflight.Listening(None)
    if place.file:
        folder = Path(place.file).resolve().parent
        if not os.access(folder, os.W_OK):
            problems.append(f"file={place.file!r}: the folder {str(folder)!r} does not exist or cannot be written")
    elif place.address and "address" not in spoilt:
        try:
            addresses = preflight.resolve(place.address, 0 if "port" in spoilt else place.port)
        except (OSError, UnicodeError, preflight.Deadline) as error:
            problems.append(preflight.unresolved(place, error))
        else:
            if place.hosts_store and not spoilt & {"rank", "port"}:
                listening = preflight.listen(place, addresses, _everywhere(place, addresses))
                problems += [listening.problem] * bool(listening.problem)
            elif problems and "port" not in spoilt:
                found = preflight.knock(addresses, place.port)
                if found.result not in ("open", "refused"):
                    problems.append(preflight.unmet(place, found, 3.0))
    if problems:
        if listening.listener is not None:
            listening.listener.close()
        raise EnvironmentProblems(problems, HINT)
    _meetings[place.meeting_point] = meeting = _open_meeting(settings, place, addresses, listening)
    return meeting


def _open_meeting(settings: _Settings, place: Place, addresses: list[str], listening: preflight.Listening) -> _Meeting:
    limit = timedelta(seconds=settings.limit_s)
    if place.world_size == 1:
        return _Meeting(dist.HashStore(), place)
    if place.file:
        return _Meeting(dist.FileStore(place.file, place.world_size), place)
    if listening.listener is None:
        return _join_meeting(settings, place, addresses, listening.taken)
    address, port = listening.listener.getsockname()[:2]
    local = "127.0.0.1" if address == "0.0.0.0" else address
    fd = listening.listener.detach()
    store = dist.TCPStore(local, port, None, True, limit, False, master_listen_fd=fd)
    identity = {"run": place.run_id, "pid": os.getpid(), "host": socket.gethostname()}
    store.set(_HOST_KEY, json.dumps(identity))
    return _Meeting(store, place, local)


def _join_meeting(settings: _Settings, place: Place, addresses: list[str], taken: bool) -> _Meeting:
    """Connect to the store that rank 0, or torchrun's agent, holds; know it from anything else that listens there."""
    where = f"port {place.port} of {place.address}"
    start = time.monotonic()
    found = preflight.await_listener(place, addresses, settings.start_timeout_s, settings.say)
    waited_s = time.monotonic() - start
    in_use = f"rank 0 must open {where}, but it is in use"
    stranger = in_use if taken else f"{where} answers, but is not this job"
    if found.result != "open":
        text = f"{in_use} by another program" if taken else preflight.unmet(place, found, waited_s)
        raise EnvironmentProblems([text], HINT)
    limit = timedelta(seconds=settings.limit_s)
    patience_s = min(_GREETING_S, settings.start_timeout_s)
    slow = f"rank {place.rank}: {where} answers, but no torch store replies: another program? Up to {patience_s:g} s"
    try:
        store = preflight.within(
            patience_s,
            lambda: dist.TCPStore(found.address, place.port, None, False, limit, False),
            lambda: settings.say(slow),
        )
    except (preflight.Deadline, dist.DistError) as error:
        why = f"no torch store replied in {patience_s:g} s" if isinstance(error, preflight.Deadline) else str(error)
        by = " by another program" * taken
        raise EnvironmentProblems([f"{stranger}{by}: {why.splitlines()[0]}. Choose another port"], HINT) from error
    if place.agent_store:
        return _Meeting(store, place, found.address)
    deadline = time.monotonic() + patience_s
    while not store.check([_HOST_KEY]):
        if time.monotonic() > deadline:
            text = f"{stranger}: a torch store without a lockstep rank 0. Choose another port"
            raise EnvironmentProblems([text], HINT)
        time.sleep(0.02)
    host = json.loads(store.get(_HOST_KEY))
    if host["run"] != place.run_id:
        by = f"run {host['run'] or 'without a name'!r}, pid {host['pid']} on {host['host']}; this is {place.run_id!r}"
        raise EnvironmentProblems([f"{stranger}: it belongs to {by}. Choose another port"], HINT)
    return _Meeting(store, place, found.address)


def _everywhere(place: Place, addresses: list[str]) -> bool:
    """True where ranks on other machines know this one by another address than this machine does.

    Debian gives a machine's own name the address 127.0.1.1, and Kubernetes' training operator tells rank 0 "localhost".
    """
    if place.source("local_world_size") != "default" and place.local_world_size == place.world_size:
        return False
    if not all(preflight.is_loopback(address) for address in addresses):
        return False
    return place.address not in ("localhost", *addresses) or "KUBERNETES_SERVICE_HOST" in os.environ


# ---------------------------------------------------------------------- a group that exists


def _adopt(settings: _Settings, layer: Layer) -> Communicator:
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
    own = transport_of(dist.group.WORLD)
    if own is None:
        plain = TorchTransport.over()
        if timeout_s is not None:
            plain = TorchTransport(plain.process_group, plain.device, timeout_s)
        own = fastest(plain)
    machines: list[str] = Communicator(own).all_gather_object(preflight.machine_id(), label="init")
    comm = Communicator(_under(layer, own, machines, distributed_c10d._get_default_store()))
    found, _ = read_place(os.environ, rank=here, world_size=size, file="-")
    source = "torch.distributed.init_process_group"
    sources = {**dict(found.sources), "rank": source, "world_size": source}
    del sources["file"]
    place = replace(found, file="", launcher="process group", sources=tuple(sorted(sources.items())), agent_store=False)
    comm.place = place_on_machines(place, machines)
    return comm


def _refuse_second(caller: str) -> None:
    for session in _sessions:
        if dist.is_initialized() and dist.group.WORLD is session.group():
            raise ConfigError(
                f"lockstep.init() at {caller}: it was called before, at {session.caller}, and that communicator is "
                "open. Pass it on, or close it first"
            )
    _sessions.clear()


def _forget(comm: Communicator) -> None:
    """`comm` was closed: listed here it would keep its shared memory until the process ends."""
    _sessions[:] = [session for session in _sessions if session.comm is not comm]


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


def _say(text: str) -> None:
    sys.stderr.write(f"lockstep: {text}\n")
    sys.stderr.flush()


def _enable_faulthandler() -> None:
    """Python stacks when C++ kills the process, as gloo does where shapes differ."""
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


@atexit.register
def _leave() -> None:
    """Close what the user did not, then let the process that holds the store go last."""
    for session in tuple(_sessions):
        session.comm.close()
    for meeting in _meetings.values():
        if meeting.address and meeting.records and not meeting.place.agent_store:
            _farewell(meeting)
    _meetings.clear()


def _farewell(meeting: _Meeting) -> None:
    """Tell the holder of the store that this rank is through; the holder waits for the living, unless it failed."""
    place = meeting.place
    try:
        if not place.hosts_store:
            if preflight.knock([meeting.address], place.port, 1.0).result == "open":
                meeting.store.set(f"lockstep/bye/{place.rank}", "")
            return
        deadline = time.monotonic() + (0.0 if getattr(sys, "last_value", None) is not None else _FAREWELL_S)
        here = preflight.machine_id()
        for record in meeting.records:
            while record["rank"] != place.rank and not meeting.store.check([f"lockstep/bye/{record['rank']}"]):
                ended = record["machine"] == here and not preflight.is_running(record["pid"])
                if ended or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
    except dist.DistError as error:  # the other side went first; nothing depends on it any more
        _say(f"rank {place.rank} could not say good-bye: {str(error).splitlines()[0]}")
