"""What the flight record of a rank shows of it, also to whoever is no rank, and after its death."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.comm.kernel import process_state
from lockstep.observe.flight import FlightRecord, Mark, Record
from lockstep.observe.status import Folding, Sight, Status, Waiting

FLIGHTS = "flight-*"  # names of the records' files
SILENT_S = 1.0  # what a rank said longer ago is completed from its record
_OPEN = 8  # operations under way that are shown


def flight_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where the flight record of `rank` lies."""
    return Path(folder) / FLIGHTS.replace("*", str(rank))


def sight_of(
    record: FlightRecord, said: Status | None = None, *, how: str | None, is_urgent: bool = False
) -> Sight | None:
    """The rank of `record` as it is now; None where it has said nothing yet.

    said: its status, where that is known; else it is read. how: its process ended; None: it has not.
    is_urgent: see `Board.sights`.
    """
    age_s = max(0.0, (time.monotonic_ns() - record.header().alive_ns) / 1e9)
    status = said or status_of(record.status())
    if is_urgent or how is not None or age_s > SILENT_S:
        status = from_record(record, status)
        last = status.last
        if how is not None and last is not None and max(last.entered_ns, last.left_ns) > record.header().alive_ns:
            status = replace(status, stack=())  # it went on after that was seen
    is_stopped = how is None and age_s > SILENT_S and process_state(record.header().pid) == "T"
    return None if status is None else Sight(status, age_s, how is not None, how or "", is_stopped)


def from_record(record: FlightRecord, said: Status | None) -> Status:
    """The status of a rank that does not speak any more: what it `said` last, with what its record shows."""
    header, records = record.header(), record.records()
    if said is None:
        said = Status(header.rank, header.world_size, header.pid, socket.gethostname(), header.rank)
    members: dict[str, tuple[int, ...]] = {name: progress.ranks for name, progress in said.groups.items()}
    folds: dict[str, Folding] = {}
    for one in records:
        if not one.is_message:
            fold = folds.setdefault(one.group, Folding(members.get(one.group, ())))
            fold.add(Mark(one.seq, one.step, one.digest))
    waiting = waits_of([one for one in records if not one.left_ns])
    groups = {**said.groups, **{name: fold.progress() for name, fold in folds.items()}}
    last = records[-1] if records else None
    before = -1 if said.last is None else said.last.number
    if said.step != header.step or (last is not None and last.number > before):  # its main thread has gone on since
        phases = said.phases if said.step == header.step else ()  # else they are of a step that has ended
        said = replace(said, step=header.step, stood_step=said.step, phases=phases)
    return replace(said, groups=groups, messages={}, waiting=waiting, last=last)


def waits_of(under_way: Sequence[Record]) -> tuple[Waiting, ...]:
    """Those of a rank's operations that are under way, oldest first, which others are shown: one of them blocks it."""
    now_ns = time.monotonic_ns()
    shown = under_way if len(under_way) <= _OPEN else [*under_way[: _OPEN - 1], under_way[-1]]
    return tuple(Waiting(one, (now_ns - one.entered_ns) / 1e9) for one in shown)


def status_of(text: bytes) -> Status | None:
    """What a rank has said; None where that is not a whole status."""
    if not text:
        return None
    try:
        return Status.from_json(text)
    except (ValueError, KeyError, TypeError):  # cut short, or of another version of lockstep
        return None
