"""One process group of torch as the guard follows it: what its ranks have started, by Python and by C++."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from lockstep.observe.flight import FlightRecorder, Words, pack_words
from lockstep.observe.torch_flight_recorder import Entry
from lockstep.observe.torch_operations import Operation, text_of

FROM_CPP = "collective started by torch's C++"  # the same on all ranks; what it is stands in the label where known
_ON_STREAMS = ("nccl", "xccl")  # a wait returns before the operation has ended, except for tensors on the CPU
_NAME_CHARS = 20  # of the 24 that a record has: a name may come again, and is numbered then
_KEPT = 4096  # words; more than a program has lines that communicate


Pending = tuple[int, int]  # torch's number of a collective whose end its Flight Recorder tells, and that of the record


@final
class WatchedGroup:
    """Counts the collectives of one group.

    Torch counts them too, those of C++ as well (and messages, and a few twice). So whatever torch's counter has gained
    between two calls from Python was started by C++, and is entered then, in the order in which it happened: by the
    rank's own thread at the next call or at the end of a step; by the guard's thread once nothing moves any more.
    """

    def __init__(
        self, group: Any, name: str, ranks: Sequence[int], recorder: FlightRecorder, backends: str, started: int = 0
    ) -> None:
        """backends: as torch writes them, "cpu:gloo,cuda:nccl". started: torch's number before what counts."""
        self.name = name
        self.ranks = tuple(ranks)
        self.torch_name: str = group.group_name
        self.group = weakref.ref(group)
        self.has_streams = any(name in backends for name in _ON_STREAMS)
        self.inside = 0  # calls from Python that have not returned yet
        self.seen = started  # torch's number after the last of them
        self.pending: deque[Pending] = deque()
        self._recorder = recorder
        self._collectives = itertools.count()
        self._messages = itertools.count()
        self._words: dict[tuple[str, object], Words] = {}  # by the line, and the operation or what C++ said of it
        self._lock = threading.Lock()

    def enter(self, operation: tuple[Any, ...], site: str, is_message: bool) -> int:
        """The record of a call from Python begins; its number. operation: the fields of one."""
        words = self._words.get((site, operation))
        if words is None:
            words = self._keep((site, operation), text_of(Operation(*operation), self.ranks), site)
        seq = next(self._messages if is_message else self._collectives)
        return self._recorder.enter(seq, words, is_message)

    def catch_up(
        self, torch_number: int, site: str, known: Mapping[int, Entry] | None = None, *, if_idle: bool = False
    ) -> None:
        """Enter what C++ has started since the last call from Python, up to torch's number.

        known: what torch's Flight Recorder tells of them, where it was asked. if_idle: only if no call has begun
        meanwhile. What was entered since the number was read stays.
        """
        with self._lock:
            if torch_number <= self.seen or (if_idle and self.inside):
                return
            words, began_ns = self._of_cpp(site, "by this line"), 0
            enter, seq, pend = self._recorder.enter, self._collectives, self.pending.append
            for number in range(self.seen + 1, torch_number + 1):
                if known is not None:
                    entry = known.get(number)
                    words, began_ns = self._of_cpp(site, entry.text if entry else ""), entry.began_ns if entry else 0
                pend((number, enter(next(seq), words, False, began_ns)))
            self.seen = torch_number

    def _of_cpp(self, site: str, label: str) -> Words:
        return self._words.get((site, label)) or self._keep((site, label), FROM_CPP, site, label)

    def _keep(self, key: tuple[str, object], text: str, site: str, label: str = "") -> Words:
        if len(self._words) >= _KEPT:
            self._words.clear()
        words = self._words[key] = pack_words(self.name, text, site, label)
        return words

    def started(self, torch_number: int, operation: tuple[Any, ...], site: str) -> None:
        """C++ has just started this, which now is torch's number; the rank's own thread says so."""
        with self._lock:
            self.pending.append((torch_number, self.enter(operation, site, is_message=False)))
            self.seen = torch_number

    def settle(self, ended: float) -> None:
        """Leave what has ended: all with torch's number `ended` and lower."""
        with self._lock:
            while self.pending and self.pending[0][0] <= ended:
                self._recorder.leave(self.pending.popleft()[1])


def name_of(torch_name: str, is_default: bool, ranks: Sequence[int]) -> str:
    """A name that is the same on all ranks of the group, and short: "WORLD", "3 [0, 2]"."""
    if is_default:
        return "WORLD"  # as torch.distributed.group has it
    listed = ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"
    return f"{torch_name[:8]} [{listed}]"[:_NAME_CHARS]


def numbered(name: str, made: Counter[str]) -> str:
    """`name` for one more group of it, whose operations are counted anew. made: how many there are of each."""
    made[name] += 1
    return name + (f"'{made[name]}" if made[name] > 1 else "")


def outlive(reducer: Any, groups: Sequence[Any]) -> None:
    """Keep `groups` until `reducer`, which uses them, is gone.

    It lets go of its groups with the interpreter locked. If that ends one, it waits for the group's threads, of which
    one may need the lock to let go of a work: torch 2.13 stands still for good. Python itself ends groups unlocked, and
    calls back about an object of C++ once that is gone.
    """
    weakref.finalize(reducer, tuple, groups).atexit = False
