"""What the ranks let each other know about themselves while they run.

A `Status` is small, JSON, and read by every other rank's guard a few times a second. Nothing here looks at a clock, a
process or a file: `guard` fills statuses, `board` carries them, `diagnosis` compares them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, final

from lockstep.observe.flight import Mark, Record, mark_of

RUNNING, RAISED, FINISHED = "running", "raised", "finished"
State = Literal["running", "raised", "finished"]
_FACTS = ',\t"facts":'  # between what changes with every status and what does not: JSON with a space of its own
_encoded = json.JSONEncoder(separators=(",", ":")).encode  # made once
NEWEST, EVERY, _SPAN = 32, 32, 1024  # of which operations the digest is kept


class Waiting(NamedTuple):
    """An operation that has not ended yet."""

    record: Record
    age_s: float


class LastWords(NamedTuple):
    """How a rank left, in its own words."""

    kind: str  # class of the exception; "" where it simply came to its end
    message: str
    where: str  # "train.py:31", the innermost line of the user's own code
    is_consequence: bool = False  # it only saw another rank fail
    of: int | None = None  # that rank, where it knows which


def in_words(kind: str, message: str) -> str:
    """What was raised: "KeyError: 'x'", and the class alone where it has said no more, as after `assert x`."""
    is_named = message == kind or message.startswith((f"{kind} (", f"{kind}\n"))  # with what stands beside it
    return message or kind if is_named or not message else f"{kind}: {message}"


class Stalled(NamedTuple):
    """What a rank has said of others that may pass: their end, or that they go on, is a line that belongs to it."""

    kind: str  # of the finding
    ranks: tuple[int, ...]
    begun: tuple[int, ...]  # the number of the newest operation of each
    place: str  # where it was said; equal for one output

    def is_over(self, how: str) -> str:
        """That line."""
        return f"lockstep: {self.kind.upper()}, above, is over: {how}"


@dataclass(frozen=True)
class Progress:
    """How far one rank has come in one group."""

    ranks: tuple[int, ...]  # of the job
    count: int  # collectives started
    marks: tuple[Mark, ...]  # the newest, and some older ones; by seq


@dataclass(frozen=True)
class Status:
    """One rank, as it last said."""

    rank: int
    world_size: int
    pid: int
    host: str
    machine: int = 0  # the first rank that shares its memory: names of hosts may be equal
    step: int = 0
    step_before: int = 0  # of which checkpoint the program goes on
    step_s: float = 0.0  # 99th percentile of how long a step takes; 0 where that is not known yet
    state: State = RUNNING
    groups: dict[str, Progress] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)  # begun so far, by `channel`; empty where that is not known
    queued: dict[str, int] = field(default_factory=dict)  # by group that a GPU works for: the first it has not come to
    waiting: tuple[Waiting, ...] = ()  # what is under way, oldest first; messages as numbered in their channel
    last: Record | None = None  # the last that was started
    phases: tuple[tuple[int, int], ...] = ()  # of the main thread in this step, and when each began: see `StepClock`
    stack: tuple[str, ...] = ()  # of the main thread, outermost first: "train.py:31 train_step"; torch's own folded
    stood_step: int | None = None  # in which it stood there, where the rank has gone on since
    unmoved_s: float = 0.0  # for how long the main thread has been at that very place without using the processor
    is_in_call: bool = False  # there, and that is in a call that has yet to return what it exchanges
    looping_s: float = 0.0  # for how long it has waited in one loop, and used the processor
    activity: str = ""  # "compile", "checkpoint", "evaluate", "debugger", ...: may take long without anything wrong
    joins: bool = False  # within torch's Join: it may have steps that the others have not
    words: LastWords | None = None  # once it is not running any more
    handling: str = ""  # the error whose `finally` or `except` its main thread stands in
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of its training: see `Facts`; never changed
    stalled: Stalled | None = None  # what it said last, and may pass
    said: tuple[str, ...] = ()  # keys of findings that it has said, or left to another rank, the last few
    is_blind: bool = False  # its guard cannot look at the others

    def to_json(self, room: int = 56_000) -> bytes:
        """As `from_json` reads it; in want of `room` without older marks, then without facts and groups of long ago."""
        kept, facts = 2 * _SPAN, [*self.facts.items()]
        facts_text = self.facts.text if isinstance(self.facts, ToldFacts) else _encoded(self.facts)
        said = dict(vars(self))
        del said["facts"]
        groups = sorted(self.groups.items(), key=lambda one: max((mark.step for mark in one[1].marks), default=0))
        while True:
            told = {name: (one.ranks, one.count, one.marks[-kept:]) for name, one in groups}
            text = f"{_encoded({**said, 'groups': told})[:-1]}{_FACTS}{facts_text}}}"
            if len(text) <= room or not (groups or facts):
                return text.encode()
            if kept > 1:
                kept = min(8, kept // 8)
            elif len(facts) > len(groups):
                facts = facts[(len(facts) + 1) // 2 :]
                facts_text = _encoded(dict(facts))
            else:
                groups = groups[(len(groups) + 1) // 2 :]

    @classmethod
    def from_json(cls, text: bytes) -> Status:
        """Raises: ValueError, KeyError or TypeError where `text` is no status."""
        said, between, facts = text.partition(_FACTS.encode())
        raw = _object(said + b"}" if between else said)
        raw["facts"] = _facts_of(facts[:-1].decode()) if between else raw["facts"]
        raw["groups"] = {
            name: Progress(tuple(ranks), count, tuple([mark_of(mark) for mark in marks]))
            for name, (ranks, count, marks) in dict(raw["groups"]).items()
        }
        raw["waiting"] = tuple([Waiting(Record(*record), age_s) for record, age_s in raw["waiting"]])
        raw["last"] = None if raw["last"] is None else Record(*raw["last"])
        raw["phases"] = tuple([(phase, began_ns) for phase, began_ns in raw["phases"]])
        raw["stack"], raw["said"] = tuple(raw["stack"]), tuple(raw["said"])
        raw["words"] = None if raw["words"] is None else LastWords(*raw["words"])
        if raw["stalled"] is not None:
            kind, ranks, begun, place = raw["stalled"]
            raw["stalled"] = Stalled(kind, tuple(ranks), tuple(begun), place)
        return cls(**raw)


def _object(text: bytes | str) -> dict[str, Any]:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise TypeError(f"a status is made of objects, not of {type(raw).__name__}")
    return raw


@final
class ToldFacts(dict[str, dict[str, Any]]):
    """Facts as others read them, with their text: told again and again, and never changed."""

    __slots__ = ("news", "text")

    def __init__(self, text: str, news: int = 0) -> None:
        """news: so many of all that the rank has told could not wait; the rank itself knows."""
        super().__init__(_object(text))
        self.text, self.news = text, news


_facts_of = lru_cache(maxsize=64)(ToldFacts)  # they change seldom


class Sight(NamedTuple):
    """One rank as another one sees it now."""

    status: Status
    age_s: float  # since it last said so, or that it lives, where all goes on as it did
    is_gone: bool  # its process has ended; only known of this machine, and through a launcher
    how: str = ""  # it ended, as its launcher says: "was killed by SIGKILL"; "" where none does
    is_stopped: bool = False  # by SIGSTOP, as the kernel says; of another machine through its launcher
    is_working: bool = False  # its guard is silent, but its process uses a core; of another machine as above
    is_seen: bool = False  # its guard is silent, but the launcher of its machine sees it


@final
class Folding:
    """Keeps some of one group's digests: the newest, and every 32nd of the last thousand."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.count = 0
        self._marks: list[tuple[int, int, int]] = []  # of `Mark`: those that are shown are made to one

    def add(self, *marks: tuple[int, int, int]) -> None:
        """What a `Mark` has of collectives, in the order of their numbers; some may be left out."""
        newest, *_ = marks[-1]
        self.count = newest + 1
        self._marks += marks
        if len(self._marks) > 2 * NEWEST + _SPAN // EVERY:
            old, new = self._marks[:-NEWEST], self._marks[-NEWEST:]
            self._marks = [mark for mark in old if mark[0] % EVERY == 0 and mark[0] > newest - _SPAN] + new

    def progress(self) -> Progress:
        """What the others are shown."""
        return Progress(self.ranks, self.count, tuple([mark_of(mark) for mark in self._marks]))
