"""Where the ranks' guards see each other: the flight records of one machine, and a store between machines."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, final

from lockstep.comm.handshake import Store
from lockstep.comm.shm.peers import Peers
from lockstep.comm.store_calls import StoreCalls
from lockstep.errors import ConfigError
from lockstep.observe.cores import Cores
from lockstep.observe.flight import FlightRecorder, Record
from lockstep.observe.sights import FlightRecord, flight_path, sight_of, status_of
from lockstep.observe.status import RUNNING, Sight, Status, ToldFacts

_ENDED = "ended-{}"  # of what a launcher says of a rank whose process has ended
_ANSWER_S = 1.5  # how long a rank of another machine may take to show its records
_STORE_S = 1.0  # and the store to answer
_WORD_S = 1.5  # and a launcher to say how a process has ended, before it counts as gone without a word
_FINDING = "guard/finding"
_KEPT = "guard/last/{}"  # records of a rank that has ended
_PERIOD_S = 0.3  # at least, between two statuses through the store: two looks, or one in calm hours
_GONE = "gone "  # before the status of a rank whose process has ended, and how; the status is in the next line
_STOPPED = "stopped"  # before that of one that is
_SEEN = "seen "  # before that of one whose guard is silent: whether it works, and for how long
_SEEN_S = 3.0  # after which that is old
_NOTHING = ToldFacts("{}", -1)

_T = TypeVar("_T")


class _Heard(NamedTuple):
    """What a rank of another machine said last."""

    text: bytes
    sight: Sight  # at that moment
    at_s: float  # when it was first seen


@final
class Board:
    """What one rank's guard tells the others, and sees of them. One thread uses it.

    The ranks in `here` are on this machine: their records are read from memory, also when they are dead. The others'
    statuses come through `store`, where there is one; without it they are not seen.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        recorder: FlightRecorder,
        here: Sequence[int],
        store: Store | None = None,
        *,
        has_launcher: bool = False,
    ) -> None:
        """has_launcher: it says with `tell_ends` how processes end."""
        self._folder = Path(folder)
        self._has_launcher = has_launcher
        self._recorder = recorder
        self.here = frozenset(here)  # ranks of this machine
        self._here = tuple([rank for rank in here if rank != recorder.rank])
        self._away = tuple([rank for rank in range(recorder.world_size) if rank not in here])
        self.use(store)
        self._records: dict[int, FlightRecord] = {recorder.rank: FlightRecord(recorder.path)}
        self._first = min(here)  # whose record holds what was found on this machine
        recorder.set_machine(self._first)
        self._peers: dict[int, Peers] = {}
        self._ended_s: dict[int, float] = {}  # when the process of a rank of this machine was first seen to be gone
        self._heard: dict[int, _Heard] = {}  # of ranks of other machines
        self._mine: Status | None = None  # what this rank said last
        self._told_s, self._has_left, self._answered = 0.0, False, ""
        self._calls = StoreCalls(RuntimeError)
        self._spent_s = 0.0  # until it answered: meanwhile no rank can be heard, and none is silent
        self._gone: set[int] = set()  # ranks of this machine whose end the others know of
        self._cores = Cores()
        self._times_told = 0  # or one that says the same again would seem silent

    def use(self, store: Store | None) -> None:
        """See the ranks of other machines through `store`, which nobody else uses, from now on."""
        self._store = store if self._away else None

    def open_all(self) -> None:
        """Open the records of this machine's ranks now; after that their files need no names any more."""
        for rank in self._here:
            self._record_of(rank)

    @property
    def told(self) -> ToldFacts:
        """What this rank has said of its training: all that others can see of it."""
        return facts if isinstance(facts := self._mine and self._mine.facts, ToldFacts) else _NOTHING

    def tell(self, status: Status) -> None:
        """Show the others how this rank is."""
        text, before = status.to_json(), self.told
        self._mine = status
        self._recorder.tell(text, is_news=self.told.news != before.news, has_facts=self.told is not before)
        now_s = time.monotonic()
        if self._store is not None and (now_s - self._told_s >= _PERIOD_S or status.state != RUNNING):
            self._told_s = now_s
            if status.state != RUNNING and not self._has_left:
                self._has_left = True
                self._put(_KEPT.format(self._recorder.rank), _in_json(self._records[self._recorder.rank]))
            self._times_told += 1
            self._put(f"guard/status/{self._recorder.rank}", f"{self._times_told}\n{text.decode()}")
            self._answer()

    def sights(self, *, is_urgent: bool = False) -> dict[int, Sight]:
        """All ranks that have said something, as they are now; this one too.

        is_urgent: what the ranks of this machine have done since they said so counts too.
        """
        seen: dict[int, Sight] = {}
        now_s = time.monotonic()
        for rank in (self._recorder.rank, *self._here):
            record = self._record_of(rank)
            how, mine = record and self._how_it_ended(rank, record), None if rank in self._here else self._mine
            sight = record and sight_of(record, mine, how=how, is_urgent=is_urgent)
            if sight is not None:
                seen[rank] = self._cores.seen(sight, now_s)
                if sight.is_gone and self._store is not None and rank not in self._gone and not self._has_launcher:
                    self._gone.add(rank)
                    self._put(_KEPT.format(rank), _in_json(self._records[rank]))
                    self._put(f"guard/status/{rank}", _last_status(sight))
        keys = [f"guard/status/{rank}" for rank in self._away]
        told = self._try(lambda store: [store.get(key) if store.check([key]) else None for key in keys])
        now_s = time.monotonic() - self._spent_s
        for rank, said in zip(self._away, told or [None] * len(keys), strict=True):
            heard = self._heard.get(rank)
            if said is not None and (heard is None or heard.text != said):
                sight = _sight_in(said.decode())
                if sight is not None:
                    heard = self._heard[rank] = _Heard(said, sight, now_s)
            if heard is not None:
                passed_s = now_s - heard.at_s
                seen[rank] = heard.sight._replace(age_s=heard.sight.age_s + passed_s)
                if passed_s > _SEEN_S:
                    seen[rank] = seen[rank]._replace(is_seen=False, is_working=False)
        return seen

    def records_here(self) -> list[FlightRecord] | None:
        """Of this rank, and of the others, the first one first; None where not all are those of this machine."""
        found = [self._record_of(rank) for rank in (self._recorder.rank, *sorted(self._here))]
        return None if self._away or None in found else [record for record in found if record is not None]

    def records_of(self, rank: int) -> list[Record]:
        """What `rank` did last, oldest first; [] where that cannot be had. May block for a second or two."""
        record, heard = self._record_of(rank), self._heard.get(rank)
        if record is not None:
            return record.records()
        if heard is None or self._store is None:
            return []
        if heard.sight.is_gone or heard.sight.status.state != RUNNING:
            return _from_json(self._ask(_KEPT.format(rank)))
        silent_s = heard.sight.age_s + time.monotonic() - self._spent_s - heard.at_s
        if silent_s > _ANSWER_S:  # nor will it answer now
            return []
        key = f"guard/records/{rank}/{self._recorder.rank}-{time.monotonic_ns()}"
        deadline = time.monotonic() + _ANSWER_S
        while not self._calls.is_lost and time.monotonic() < deadline:
            self._put(f"guard/wanted/{rank}", key)  # each time: another one's wish may have taken its place
            said = self._ask(key)
            if said is not None:
                return _from_json(said)
            self._answer()  # it may be waiting for mine
            time.sleep(0.05)
        return []

    def _answer(self) -> None:
        """Show this rank's records to a rank of another machine that wants them."""
        wanted = self._ask(f"guard/wanted/{self._recorder.rank}")
        if wanted is not None and wanted.decode() != self._answered:
            self._answered = wanted.decode()
            self._put(self._answered, _in_json(self._records[self._recorder.rank]))

    def announce(self, finding: str) -> str:
        """Put `finding` up for all to see, unless there is one; the one that is up."""
        first = self._try(lambda store: store.compare_set(_FINDING, "", finding))
        up, record = finding if first is None else first.decode(), self._record_of(self._first)
        return up if record is None else record.put_up(up.encode()).decode()

    def announced(self) -> str:
        """The finding that is up; "" where there is none."""
        record = self._record_of(self._first)
        up = "" if record is None else record.notice().decode()
        if not up and (up := self._try(put_up_in) or "") and record is not None:
            record.put_up(up.encode())  # for the launcher of this machine, when whoever holds the store may have ended
        return up

    def _record_of(self, rank: int) -> FlightRecord | None:
        if rank not in self._records and rank in self._here:
            with contextlib.suppress(OSError, ConfigError):  # it has not begun
                record = FlightRecord(flight_path(self._folder, rank))
                self._records[rank] = record
                self._peers[rank] = Peers([record.header().pid])
        return self._records.get(rank)

    def _how_it_ended(self, rank: int, record: FlightRecord) -> str | None:
        """Of the process of a rank of this machine; "" where nobody says, None while it runs."""
        if rank not in self._peers:
            return None
        place = f"{self._folder}/{_ENDED.format(rank)}"
        if self._has_launcher and os.path.exists(place):  # once written, it stays
            return Path(place).read_text()
        if record.header().pid == os.getpid() or not self._peers[rank].has_ended(0):
            return None
        ended_s = self._ended_s.setdefault(rank, time.monotonic())
        return None if self._has_launcher and time.monotonic() - ended_s < _WORD_S else ""

    def _ask(self, key: str) -> bytes | None:
        return self._try(lambda store: store.get(key) if store.check([key]) else None)

    def _put(self, key: str, text: str) -> None:
        self._try(lambda store: store.set(key, text))

    def _try(self, call: Callable[[Store], _T]) -> _T | None:
        """None where there is no store, or whoever holds it has ended or does not answer: then what was heard stays."""
        store, begun_s = self._store, time.monotonic()
        if store is None:
            return None
        said = self._calls.ask(lambda: call(store), None, _STORE_S)
        if not self._calls.is_mute:
            self._spent_s += time.monotonic() - begun_s
        return said

    def close(self) -> None:
        """Give back the memory."""
        self._calls.close()
        for record in self._records.values():
            record.close()
        self._records.clear()
        self._peers.clear()


def tell_ends(folder: Path, ends: Mapping[int, str]) -> None:
    """A launcher says how processes ended, by rank, to the guards of this machine."""
    partials = [folder / f"{_ENDED.format(rank)}.partial" for rank in ends]
    for partial, how in zip(partials, ends.values(), strict=True):
        partial.write_text(how, errors="backslashreplace")
    for partial in partials:  # one right after the other: a guard that sees one end sees those of the same moment
        partial.replace(partial.with_suffix(""))


def send_ends(folder: Path, ends: Mapping[int, str | None], store: Store) -> None:
    """As `tell_ends`, to the guards of the other machines; None: it is stopped, until it speaks again."""
    for rank, how in ends.items():
        with contextlib.suppress(OSError, ConfigError, RuntimeError):  # it never had a guard, or nobody holds the store
            record = FlightRecord(flight_path(folder, rank))
            sight, records = sight_of(record, how=how, is_urgent=True), _in_json(record)  # it may have gone on since
            record.close()
            if sight is not None:
                store.set(_KEPT.format(rank), records)
                store.set(f"guard/status/{rank}", _last_status(sight))


def send_silent(sights: Iterable[Sight], store: Store) -> None:
    """A launcher says to the guards of other machines that processes are there whose own guards do not speak."""
    for sight in sights:
        said = f"{_SEEN}{sight.is_working:d} {sight.age_s:.2f}\n{sight.status.to_json().decode()}"
        store.set(f"guard/status/{sight.status.rank}", said)


def put_up_in(store: Store) -> str:
    """What a guard of any machine has found; "" where none has."""
    return store.get(_FINDING).decode() if store.check([_FINDING]) else ""


def _in_json(record: FlightRecord) -> str:
    return json.dumps(record.records())


def _from_json(said: bytes | None) -> list[Record]:
    return [Record(*fields) for fields in json.loads(said or "[]")]


def _sight_in(said: str) -> Sight | None:
    """Of what a rank or its launcher has said."""
    how, _, last = said.rpartition("\n")
    status = status_of(last.encode())
    if status is None:
        return None
    if how.startswith(_SEEN):
        works, age = how.removeprefix(_SEEN).split()
        return Sight(status, float(age), is_gone=False, is_working=works == "1", is_seen=True)
    is_gone = how.startswith(_GONE)
    return Sight(status, 0.0, is_gone, how.removeprefix(_GONE) if is_gone else "", how == _STOPPED)


def _last_status(sight: Sight) -> str:
    return f"{_GONE + sight.how if sight.is_gone else _STOPPED}\n{sight.status.to_json().decode()}"
