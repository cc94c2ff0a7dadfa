"""Where the ranks of a job meet: a store, opened or joined once, told from what else listens there, left in order."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from lockstep.comm import preflight
from lockstep.comm.handshake import Record, shake_hands
from lockstep.comm.place import HINT, Place
from lockstep.comm.shm.peers import is_running
from lockstep.comm.waiting import wait_until
from lockstep.errors import EnvironmentProblems, PeerLost

if TYPE_CHECKING:
    from lockstep.comm.init import Settings

_GREETING_S = 10.0  # a store answers in milliseconds, one on a machine that is out of memory in seconds
_FAREWELL_S = 10.0  # how long the process that holds the store stays for ranks that are still at work
_HOST_KEY = "lockstep/host"


@dataclass
class Meeting:
    """An open meeting point. It stays for the life of the process, so that a later `init` cannot meet a closing one."""

    store: dist.Store
    place: Place
    address: str = ""  # the IP address, where the ranks meet at one
    generations: Iterator[int] = field(default_factory=itertools.count)
    records: list[Record] = field(default_factory=list)

    def gather(self, settings: Settings, place: Place, mine: Record) -> dist.Store:
        """The store of one group, once all of its ranks have come; `records` says who they are.

        Collective: every rank of the job.
        Raises: as `shake_hands`; PeerLost where the process that holds the meeting point ended.
        """
        prefix = f"lockstep/{place.run_id or '-'}/{place.restart_count}/{next(self.generations)}"
        store, where = dist.PrefixStore(prefix, self.store), place.meeting_point
        try:
            self.records = shake_hands(store, mine, settings.start_timeout_s, where, place.hosts_store, settings.say)
        except dist.DistError as error:
            holder = "torchrun's agent" if place.agent_store else "rank 0"
            text = f"{holder}, which holds {where}, ended while the ranks were gathering: look at its output"
            raise PeerLost(text, rank=None if place.agent_store else 0) from error
        return store


_meetings: dict[str, Meeting] = {}


def say(text: str) -> None:
    """For people."""
    sys.stderr.write(f"lockstep: {text}\n")
    sys.stderr.flush()


def meet(settings: Settings, place: Place, spoilt: set[str], problems: list[str]) -> Meeting:
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


def _open_meeting(settings: Settings, place: Place, addresses: list[str], listening: preflight.Listening) -> Meeting:
    limit = timedelta(seconds=settings.limit_s)
    if place.world_size == 1:
        return Meeting(dist.HashStore(), place)
    if place.file:
        return Meeting(dist.FileStore(place.file, place.world_size), place)
    if listening.listener is None:
        return _join_meeting(settings, place, addresses, listening.taken)
    address, port = listening.listener.getsockname()[:2]
    local = "127.0.0.1" if address == "0.0.0.0" else address
    fd = listening.listener.detach()
    store = dist.TCPStore(local, port, None, True, limit, False, master_listen_fd=fd)
    identity = {"run": place.run_id, "pid": os.getpid(), "host": socket.gethostname()}
    store.set(_HOST_KEY, json.dumps(identity))
    return Meeting(store, place, local)


def _join_meeting(settings: Settings, place: Place, addresses: list[str], taken: bool) -> Meeting:
    """Connect to the store that rank 0, or torchrun's agent, holds; know it from anything else that listens there."""
    where = f"port {place.port} of {place.address}"
    start = time.monotonic()
    found = preflight.await_listener(place, addresses, settings.start_timeout_s, settings.say)
    waited_s = time.monotonic() - start
    in_use = f"rank 0 must open {where}, but it is in use"
    stranger = in_use if taken else f"{where} answers, but is not this job"
    other = f"Choose another port: MASTER_PORT={place.port % 65535 + 1} for every rank, or torchrun's --master-port"
    if found.result != "open":
        text = f"{in_use} by another program. {other}" if taken else preflight.unmet(place, found, waited_s)
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
        raise EnvironmentProblems([f"{stranger}{by}: {why.splitlines()[0]}. {other}"], HINT) from error
    if place.agent_store:
        return Meeting(store, place, found.address)
    if not wait_until(lambda: store.check([_HOST_KEY]), patience_s):
        raise EnvironmentProblems([f"{stranger}: a torch store without a lockstep rank 0. {other}"], HINT)
    host = json.loads(store.get(_HOST_KEY))
    if host["run"] != place.run_id:
        by = f"run {host['run'] or 'without a name'!r}, pid {host['pid']} on {host['host']}; this is {place.run_id!r}"
        raise EnvironmentProblems([f"{stranger}: it belongs to {by}. {other}"], HINT)
    return Meeting(store, place, found.address)


def _everywhere(place: Place, addresses: list[str]) -> bool:
    """True where ranks on other machines know this one by another address than this machine does.

    Debian gives a machine's own name the address 127.0.1.1, and Kubernetes' training operator tells rank 0 "localhost".
    """
    if place.source("local_world_size") != "default" and place.local_world_size == place.world_size:
        return False
    if not all(preflight.is_loopback(address) for address in addresses):
        return False
    return place.address not in ("localhost", *addresses) or "KUBERNETES_SERVICE_HOST" in os.environ


def leave_meetings() -> None:
    """At the end of the process: let the one that holds a store go last."""
    for meeting in _meetings.values():
        if meeting.address and meeting.records and not meeting.place.agent_store:
            _farewell(meeting)
    _meetings.clear()


def _farewell(meeting: Meeting) -> None:
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
                ended = record["machine"] == here and not is_running(record["pid"])
                if ended or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
    except dist.DistError as error:  # the other side went first; nothing depends on it any more
        say(f"rank {place.rank} could not say good-bye: {str(error).splitlines()[0]}")
