"""One process group of torch as the guard follows it: what its ranks have started, by Python and by C++."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.first_uses import FirstUses
from lockstep.observe.flight import FlightRecorder, MessageNumbers, Words
from lockstep.observe.guard import Guard
from lockstep.observe.line_words import Line, LineWords
from lockstep.observe.native import read_in_c
from lockstep.observe.scene import FROM_CPP
from lockstep.observe.torch_flight_recorder import Entry
from lockstep.observe.torch_operations import Operation, text_of

_ON_STREAMS = ("nccl", "xccl")  # a wait returns before the operation has ended, except for tensors on the CPU
_NAME_CHARS = 20  # of the 24 that a record has: a name may come again, and is numbered then

Pending = tuple[int, int]  # torch's number of a collective whose end its Flight Recorder tells, and that of the record


@final
@read_in_c
class WatchedGroup:
    """Counts the collectives of one group.

    Torch counts them too, those of C++ as well (and messages, and a few twice). So whatever torch's counter has gained
    between two calls from Python was started by C++, and is entered then, in the order in which it happened: by the
    rank's own thread at the next call or at the end of a step; by the guard's thread once nothing moves any more.
    """

    __slots__ = ("__dict__", "__weakref__", "collectives", "has_streams", "inside", "of_lines", "of_sites", "seen")

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
        self.seen = self.unused = started  # torch's number after the last of them; and before the first
        self.pending: deque[Pending] = deque()
        self.batch: list[int] = []  # messages that are started together, so far
        self._recorder = recorder
        self.collectives = itertools.count()  # the number that the next one has
        self.messages = MessageNumbers()
        self._next: tuple[tuple[Any, ...], str] | None = None  # what is being started, and its line: see `starts`
        self._late: int | None = None  # its number, where another thread has entered it
        self._words = LineWords(name)  # by the operation, or what C++ said of it
        self.of_lines = self._words.of_lines  # a line with the fields of the Operation
        self.of_sites = self._words.of_sites
        self._lock = threading.RLock()  # who has it takes nothing up: `FlightRecorder.take_up` needs it

    def learn(self, line: Line, frame: FrameType, depth: int) -> Words:
        """What is recorded of a call from Python; where its line is the user's own, `of_lines` has that from now on.

        frame: of that line, so many frames away.
        """
        site, operation = call_site(depth + 1), line[2]
        words = self._said(operation, site)
        self._words.learn(line, frame, site, words)
        return words

    def _said(self, operation: tuple[Any, ...], site: str) -> Words:
        return self._words.of((site, operation), lambda: text_of(Operation(*operation), self.ranks))

    def catch_up(
        self,
        torch_number: int,
        site: str,
        known: Mapping[int, Entry] | None = None,
        *,
        if_idle: bool = False,
        step: int | None = None,
        now_ns: int = 0,
    ) -> None:
        """Enter what C++ has started since the last call from Python, up to torch's number.

        known: what torch's Flight Recorder tells of them, where it was asked. if_idle: only if no call has begun
        meanwhile. step, now_ns: in which they were started and when, where that was left for later (see
        `FlightRecorder.take_up`). What was entered since the number was read stays.
        """
        if step is None:
            step = self._recorder.its_step()  # first: what is taken up then may be of this step, which has just ended
            self._recorder.take_up()
        with self._lock:
            if torch_number <= self.seen or (if_idle and self.inside):
                return
            numbers = range(self.seen + 1, torch_number + 1)
            if self._next is not None:  # the thread has not come back from it for long
                words = self._said(*self._next)
                entered = self._recorder.enter_all(self.collectives, words, len(numbers), step, now_ns)
                self._late = entered[-1]
            elif known is None:
                words = self._from_cpp(site, "by this line")
                entered = self._recorder.enter_all(self.collectives, words, len(numbers), step, now_ns)
            else:
                entries = [known.get(number) for number in numbers]
                entered = [self._enter_known(site, entry, step) for entry in entries]
            self.pending.extend(zip(numbers, entered, strict=True))
            self.seen = torch_number

    def _from_cpp(self, site: str, label: str) -> Words:
        return self._words.of((site, label), lambda: FROM_CPP, label)

    def _enter_known(self, site: str, entry: Entry | None, step: int) -> int:
        words = self._from_cpp(site, entry.text if entry else "")
        return self._recorder.enter_all(self.collectives, words, 1, step, entry.began_ns if entry else 0)[0]

    def starts(self, operation: tuple[Any, ...], site: str) -> None:
        """C++ is about to start this, as the rank's own thread says: until `started`, whoever enters it does so.

        Where it is only traced, sizes may be symbols, of which nothing can be said.
        """
        self._next = operation, site

    def started(self, torch_number: int) -> int | None:
        """It has, if torch's number says so; its own number. None: it was only traced."""
        step = self._recorder.its_step()
        self._recorder.take_up()
        with self._lock:
            started, self._next, number, self._late = self._next, None, self._late, None
            if torch_number > self.seen and started is not None:
                (number,) = self._recorder.enter_all(self.collectives, self._said(*started), 1, step)
                self.pending.append((torch_number, number))
                self.seen = torch_number
            return number

    def stood(self, number: int, since_ns: int) -> None:
        """The rank's own thread has stood still until what `started` gave that number had ended."""
        with self._lock:
            self._recorder.stood(number, since_ns)
            for one in [one for one in tuple(self.pending) if one[1] == number]:  # any thread may append to it
                self.pending.remove(one)

    def settle(self, ended: float) -> None:
        """Leave what has ended: all with torch's number `ended` and lower."""
        with self._lock:
            pending, left = self.pending, []
            while pending and pending[0][0] <= ended:
                left.append(pending.popleft()[1])
            self._recorder.leave_all(left)


@final
class TorchGroups:
    """Those of this process that are of the job's ranks. Any thread may ask: two may see a group first."""

    def __init__(self, guard: Guard) -> None:
        self.followed: dict[int, WatchedGroup] = {}  # by id of torch's
        self.listed: Mapping[Any, Any] = {}  # by torch
        self.first_uses = FirstUses()
        self.plain: Any = None  # ProcessGroup: of other classes are groups that have a layer of their own
        self._guard = guard
        self._names: Counter[str] = Counter()  # how often a group of this name was made
        self._adopting = threading.RLock()  # a finalizer of the program's may run within, and use a group
        self._adopted: dict[int, WatchedGroup] = {}  # as `followed`, with those that are about to be
        self._world: Any = None  # of torch.distributed, once that is there

    def begin(self) -> None:
        """torch.distributed is there, and may have groups."""
        from torch.distributed import distributed_c10d

        self._world, self.plain = distributed_c10d._world, distributed_c10d.ProcessGroup
        self.listed = self._world.pg_map
        for group in tuple(self.listed):
            self.adopt(group, is_new=False)

    def known(self, group: Any) -> WatchedGroup | None:
        """`group` as it is followed, from now on if not before; None where it has its own layer, or is not ours."""
        return self.followed.get(id(group)) or (self.adopt(group) if type(group) is self.plain else None)

    def adopt(self, group: Any, *, is_new: bool = True) -> WatchedGroup | None:
        """Follow `group` from now on; None for one that is not of the job's ranks, as far as torch can tell."""
        ranks = self._world.pg_group_ranks.get(group)
        if group not in self.listed or not ranks or not is_the_job(self._guard) or not is_counted(group):
            return None
        with self._adopting:
            watched = self._adopted.get(id(group)) or self._watched(group, ranks, is_new)
        # without that lock: the guard's thread, which has the one that this needs, may be about to adopt a group too
        self._guard.group(watched.name, watched.ranks)
        self.followed[id(group)] = watched  # not before: nothing is recorded of a group that nobody has been told of
        return watched

    def _watched(self, group: Any, ranks: Mapping[int, int], is_new: bool) -> WatchedGroup:
        world = self._world
        name = numbered(name_of(group.group_name, group is world.default_pg, tuple(ranks)), self._names)
        started = 0 if is_new else group._get_sequence_number_for_group()
        backends = str(world.pg_backend_config.get(group, ""))
        watched = WatchedGroup(group, name, tuple(ranks), self._guard.recorder, backends, started)
        self._adopted[id(group)] = watched
        weakref.finalize(group, self._forget, id(group)).atexit = False
        return watched

    def _forget(self, key: int) -> None:
        """A group is gone. The collector says so in any thread, whatever that has locked: nothing is locked here."""
        self.followed.pop(key, None)
        self._guard.recorder.left.append(partial(self._adopted.pop(key).settle, math.inf))

    def all(self) -> list[tuple[Any, WatchedGroup]]:
        """All groups there are, and those that only C++ has used so far."""
        for group in tuple(self.listed):
            self.known(group)
        pairs = [(watched.group(), watched) for watched in tuple(self.followed.values())]
        return [(group, watched) for group, watched in pairs if group is not None]


def is_the_job(guard: Guard) -> bool:
    """Whether torch's ranks are the guard's: a program may make a world of its own in each process."""
    import torch.distributed as dist

    world = dist.GroupMember.WORLD  # asked for once: another thread may end it meanwhile
    return world is not None and (world.rank(), world.size()) == (guard.rank, guard.world_size)


def is_counted(group: Any) -> bool:
    """Whether torch numbers what it starts in `group`, as not every backend of somebody else's does."""
    if group.name() == "undefined":  # as of "cpu:gloo" where any backend is registered, as ours: else torch takes Gloo
        group._set_default_backend(group.BackendType.GLOO)
    try:
        return group._get_sequence_number_for_group() >= 0
    except RuntimeError:
        return False


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
