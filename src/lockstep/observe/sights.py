"""What the flight record of a rank shows of it, also to whoever is no rank, and after its death: see `flight`."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

from lockstep.comm.kernel import process_state
from lockstep.errors import ConfigError
from lockstep.observe import flight
from lockstep.observe.flight import RECORDS, Mark, Record
from lockstep.observe.native import in_c
from lockstep.observe.status import EVERY, NEWEST, Folding, Sight, Status, Waiting

FLIGHTS = "flight-*"  # names of the records' files
SILENT_S = 1.0  # what a rank said longer ago is completed from its record
_OPEN = 8  # operations under way that are shown
_WRITERS = 64  # threads that may be about to store a record

_record_of = partial(tuple.__new__, Record)  # as Record._make, without a call of Python
_BRIEF = struct.Struct("<qqq8xqqB1x206s")  # of `flight.RECORD`: number, seq, step, left, digest, is_message, words


InLine = tuple[str, list[tuple[int, int, int]], list[int]]  # group; as in `Mark`, NEWEST and one of EVERY; under way


@in_c
def in_line(memory: mmap.mmap, since: int, until: int, every: int, newest: int) -> InLine | None:
    """Records in a row, if all are collectives of one group, as theirs are: in C, in a fifth of the time. Else None."""
    return None


class Header(NamedTuple):
    """How far a rank has come; in the order in which the record has these words."""

    rank: int
    world_size: int
    pid: int
    machine: int  # the first rank that shares its memory; itself until that is known
    step: int
    alive_ns: int  # when its guard last said so, by time.monotonic_ns
    started: int  # operations so far


@final
class _Said(dict[bytes, tuple[str, str, str, str]]):
    """Group, text, site and label of what is stored: operations repeat."""

    def __missing__(self, words: bytes) -> tuple[str, str, str, str]:
        if len(self) >= RECORDS:
            self.clear()
        group, text, site, label, *_ = (*words.rstrip(b"\0").decode(errors="replace").split("\0"), "", "", "", "")
        return self.setdefault(words, (group, text, site, label))


def _word(index: int) -> property:
    """Of the header, as it is now."""
    return property(lambda self: self._words[index])


@final
class FlightRecord:
    """Reads a rank's record, while it is written or afterwards. Its file needs no name once it is open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises: ConfigError where the file is no flight record, OSError where it cannot be opened."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(self._fd).st_size
            if size != flight.FILE_BYTES:
                how = f"it has {size} bytes, not {flight.FILE_BYTES}"
                raise ConfigError(f"{os.fspath(path)!r} is no flight record: {how}")
            self._memory = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = memoryview(self._memory)[: flight.HEADER_BYTES].cast("q")
        self.said = _Said()
        if self._words[flight.IS] != flight.MAGIC:
            self.close()
            raise ConfigError(f"{os.fspath(path)!r} is no flight record: it does not begin as one")

    started = _word(flight.COUNT)  # operations
    news = _word(flight.NEWS)  # how often the rank has told something that the others are to look at soon
    facts = _word(flight.FACTS)  # how often it has told other facts than before
    told_ns = _word(flight.TOLD_NS)  # when it last said how it is, by time.monotonic_ns

    def header(self) -> Header:
        """Who this is and how far it has come."""
        return Header(*self._words[flight.RANK : flight.COUNT + 1])

    def status(self) -> bytes:
        """What the guard of the rank last said; empty where it has said nothing, or died in the middle."""
        for _ in range(100):
            before = self._words[flight.VERSION]
            status = bytes(self._memory[flight.STATUS_AT : flight.STATUS_AT + self._words[flight.LENGTH]])
            if before % 2 == 0 and self._words[flight.VERSION] == before:
                return status
        return b""

    def records(self, since: int = 0, until: int | None = None) -> list[Record]:
        """Those with number `since` and later, below `until`, that are still there, oldest first."""
        return [self._record_of(fields) for fields in self._stored(flight.RECORD, since, until)]

    def in_brief(self, since: int = 0, until: int | None = None) -> list[tuple[int, int, int, int, int, int, bytes]]:
        """As `records`, for who reads them all: number, seq, step, left_ns, digest, is_message, the key of `said`."""
        return self._stored(_BRIEF, since, until)

    def in_line(self, since: int) -> tuple[int, InLine] | None:
        """Those with number `since` and later: up to which, and what is in `in_line`, or None."""
        until = self.started
        found = in_line(self._memory, since, until, EVERY, NEWEST)
        return None if found is None else (until, found)

    def _stored(self, layout: struct.Struct, since: int, until: int | None = None) -> list[Any]:
        """Their fields, of which the first is the number."""
        count = self._words[flight.COUNT]
        found: list[Any] = []
        first, end = max(since, count - RECORDS, 0), min(count, until or count)
        while first < end:
            last = min(end, first - first % RECORDS + RECORDS)  # up to where the ring begins anew
            at = flight.RING_AT + first % RECORDS * flight.RECORD_BYTES
            stored = self._memory[at : at + (last - first) * flight.RECORD_BYTES]
            oldest = self._words[flight.COUNT] - RECORDS + _WRITERS  # before it, some may have been overwritten since
            found += [
                fields
                for number, fields in enumerate(layout.iter_unpack(stored), first)
                if fields[0] == number and (number >= oldest or self._is_there(number))
            ]
            first = last
        return found

    def notice(self) -> bytes:
        """What was put up in this record; empty where nothing was."""
        return bytes(self._memory[flight.NOTICE_AT : flight.NOTICE_AT + self._words[flight.NOTICE]])

    def put_up(self, notice: bytes) -> bytes:
        """Make `notice` the one of this record, unless it has one; the one it has."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            if not self._words[flight.NOTICE]:
                notice = notice[: flight.NOTICE_BYTES]
                self._memory[flight.NOTICE_AT : flight.NOTICE_AT + len(notice)] = notice
                self._words[flight.NOTICE] = len(notice)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return self.notice()

    def _is_there(self, number: int) -> bool:
        """Whether it has not been overwritten, also not in part: a writer begins with the number."""
        at = flight.RING_AT + number % RECORDS * flight.RECORD_BYTES
        return flight.WORD.unpack_from(self._memory, at)[0] == number

    def _record_of(self, fields: tuple[Any, ...]) -> Record:
        number, seq, step, entered_ns, left_ns, digest, is_message, _, words = fields
        return _record_of((number, seq, step, entered_ns, left_ns, digest, bool(is_message), *self.said[words]))

    def close(self) -> None:
        """Give back the memory."""
        self._words.release()
        self._memory.close()
        os.close(self._fd)


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
        if how is not None and last is not None and max(last.entered_ns, last.left_ns) > record.told_ns:
            status = replace(status, stack=())  # it went on after that was seen
    is_stopped = how is None and age_s > SILENT_S and process_state(record.header().pid) == "T"
    return None if status is None else Sight(status, age_s, how is not None, how or "", is_stopped)


def from_record(record: FlightRecord, said: Status | None) -> Status:
    """The status of a rank that does not speak any more: what it `said` last, with what its record shows."""
    header, records = record.header(), record.records()
    said = said or Status(header.rank, header.world_size, header.pid, socket.gethostname(), header.machine)
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
    return tuple([Waiting(one, (now_ns - one.entered_ns) / 1e9) for one in shown])


def status_of(text: bytes) -> Status | None:
    """What a rank has said; None where that is not a whole status."""
    try:
        return Status.from_json(text)
    except (ValueError, KeyError, TypeError):  # nothing yet, cut short, or of another version of lockstep
        return None
