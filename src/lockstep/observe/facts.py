"""What a rank tells the others of its training, in its status: no message of our own is sent for it.

A fact has a topic ("kind team/size/number"), a key within it, mostly a step, and a small value. Ranks of one team that
tell the same key can be compared at that key, whenever each of them came by. What explains a value may be large: it is
shown once another rank has told another value, and every rank that sees the difference shows its own.
"""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, final

from lockstep.observe.replica_diff import agree
from lockstep.observe.scene import Scene
from lockstep.observe.status import Sight, Status, ToldFacts

DETAILS = "details"
NEVER_FINITE = "parameters were not finite before the backward"  # a rank says of its gradients
FINITE, UNTIL = "finite", "until"  # up to which step a rank knows that what its device has computed is
_NEWEST, _OLDER, _EVERY = 8, 16, 16  # keys of one topic that are kept: all of the newest, some of the older ones
_TOPICS = 256  # with a number, of models and loops that a program makes one after the other
_ROOM = 24_000  # characters of details in a status

Rows = Sequence[Any]
Details = Callable[[], Rows] | None
Told = tuple[int, str, Mapping[str, Any]]  # a rank, the topic, values by key


def pack(rows: Rows, room: int = _ROOM) -> str:
    """`rows` in as many characters as fit; of more rows, the first ones."""
    while True:
        text = base64.b85encode(zlib.compress(json.dumps(rows, separators=(",", ":")).encode())).decode()
        if len(text) <= room or not rows:
            return text
        rows = rows[: len(rows) // 2]


def details_of(status: Status, topic: str, key: str) -> list[Any] | None:
    """What explains a fact of that rank; None where it does not show it."""
    packed = status.facts.get(DETAILS, {}).get(f"{topic}|{key}")
    return None if packed is None else json.loads(zlib.decompress(base64.b85decode(packed)))


def shown(scene: Scene, topic: Topic, key: str, ranks: Iterable[int]) -> dict[int, list[Any]] | None:
    """The details that `ranks` have of `key`; None while one of them that runs may still show its own."""
    found = {rank: details_of(scene.status(rank), topic.name, key) for rank in ranks}
    if any(rows is None and scene.is_running(rank) for rank, rows in found.items()):
        return None
    return {rank: rows for rank, rows in found.items() if rows is not None}


def differ(topic: str, mine: Any, theirs: Any) -> bool:
    """Whether two values of one key contradict each other."""
    if topic.startswith("replica"):
        return not agree([mine[0], theirs[0]])
    return mine != theirs


class Topic(NamedTuple):
    """What ranks have told under one topic."""

    name: str
    size: int  # ranks of the team; 0 where that is not known
    told: dict[str, dict[int, Any]]  # by key and rank

    @property
    def steps(self) -> list[str]:
        """Its keys, where these are steps, the first one first."""
        return sorted(self.told, key=int)

    @property
    def place(self) -> str:
        """Which ranks these are, and which of what they have."""
        return self.name.partition(" ")[2]

    @property
    def team(self) -> str:
        """Which ranks these are, in a word."""
        return self.place.partition("/")[0]


def told_by_kind(sights: Mapping[int, Sight]) -> dict[str, list[Told]]:
    """What ranks have told of each kind."""
    told: dict[str, list[Told]] = defaultdict(list)
    for rank, sight in sorted(sights.items()):
        for name, values in sight.status.facts.items():
            told[name.partition(" ")[0]].append((rank, name, values))
    return told


def topics_of(told: Iterable[Told]) -> Iterator[Topic]:
    """What has been told, by topic."""
    topics: dict[str, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for rank, name, values in told:
        for key, value in values.items():
            topics[name][key][rank] = value
    for name, keys in sorted(topics.items()):
        size = name.split("/")[1] if "/" in name else ""
        yield Topic(name, int(size or 0), keys)


@final
class Facts:
    """One rank's. `tell` is for the rank's own thread, the rest for its guard's."""

    def __init__(self) -> None:
        self.sights: Mapping[int, Sight] = {}  # of the last comparison
        self._lock = threading.RLock()  # a finalizer of the program's may run within, and tell something
        self._told: dict[str, dict[str, Any]] = {}
        self._details: dict[tuple[str, str], Callable[[], Rows]] = {}
        self._shown: dict[tuple[str, str], str] = {}  # what is disputed
        self._said: ToldFacts | None = None  # as it was said last, while nothing else is told
        self.news = 0  # told so far that cannot wait
        self._compared: list[dict[str, dict[str, Any]]] = []  # what ranks had told at the last comparison

    @property
    def is_disputed(self) -> bool:
        """Whether another rank has told something else than this one."""
        return bool(self._shown)

    def tell(self, topic: str, key: str | int, value: Any, details: Details = None, *, can_wait: bool = False) -> None:
        """A fact, in the place of an older one of that key.

        can_wait: in a run in which all is well the others may see it a second later; as what is the same again.
        """
        key = str(key)
        with self._lock:
            told = self._told[topic] = self._told.pop(topic, {})  # the last one is that told last
            is_again = bool(told) and next(reversed(told.values())) == value
            self._said, self.news = None, self.news + (not (can_wait or is_again))
            told.pop(key, None)
            told[key] = value
            if details is not None:
                self._details[topic, key] = details
            if len(told) > _NEWEST + _OLDER:
                self._forget(topic, told)
            if len(self._told) > _TOPICS:
                self._forget_oldest()

    def show(self, topic: str, key: str | int) -> None:
        """Show the details of a fact, also without being asked, for who may end before that."""
        details = self._details.get((topic, str(key)))
        if details is not None:
            room = _ROOM - sum(map(len, self._shown.values()))
            packed = pack(details(), max(room, 100))
            with self._lock:
                self._said, self.news = None, self.news + 1
                self._shown[topic, str(key)] = packed

    def hide(self, topic: str) -> None:
        """The opposite of `show`."""
        with self._lock:
            self._said = None
            for pair in [pair for pair in self._shown if pair[0] == topic]:
                del self._shown[pair]

    def _forget(self, topic: str, told: dict[str, Any]) -> None:
        older = list(told)[:-_NEWEST]
        kept = [key for key in older if key.isdecimal() and int(key) % _EVERY == 0][-_OLDER:]
        for key in older:
            if key not in kept and (topic, key) not in self._shown:
                del told[key]
                self._details.pop((topic, key), None)

    def _forget_oldest(self) -> None:
        disputed = {topic for topic, _ in self._shown}
        topic = next((name for name in self._told if "/" in name and name not in disputed), "")
        for key in self._told.pop(topic, {}):
            self._details.pop((topic, key), None)

    def compare(self, sights: Mapping[int, Sight], me: int) -> None:
        """See what the others tell: what differs is explained from now on."""
        self.sights = sights
        told = [self.said(), *(sight.status.facts for rank, sight in sights.items() if rank != me)]
        if len(told) == len(self._compared) and all(map(is_, told, self._compared)):
            return
        self._compared = told
        with self._lock:
            explained = {topic for topic, _ in self._shown}
            mine = [(topic, key, self._told[topic][key]) for topic, key in self._details if topic not in explained]
        for topic, key, value in mine:
            if topic not in explained:
                theirs = [facts[topic][key] for facts in told[1:] if key in facts.get(topic, {})]
                if any(differ(topic, value, other) for other in theirs):
                    explained.add(topic)
                    self.show(topic, key)

    def said(self) -> ToldFacts:
        """As a status has it: as other ranks read it, and the same object until something else is told."""
        with self._lock:
            said = self._said
            if said is None:
                shown = {f"{topic}|{key}": packed for (topic, key), packed in self._shown.items()}
                facts = {**self._told, DETAILS: shown} if shown else self._told
                said = self._said = ToldFacts(json.dumps(facts, separators=(",", ":")), self.news)
        return said
