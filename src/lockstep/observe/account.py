"""What one rank says of itself: how far it is, what it has under way, where it stands, and how it has left."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import sub
from typing import Any, final

from lockstep.observe.facts import Facts
from lockstep.observe.flight import FlightRecorder, Record
from lockstep.observe.last_words import handled, last_words, users_line
from lockstep.observe.motion import Motion, is_traced
from lockstep.observe.scene import STILL_S, channel, read_message
from lockstep.observe.sights import FlightRecord, waits_of
from lockstep.observe.stacks import handled_by, is_in_call
from lockstep.observe.status import FINISHED, RAISED, RUNNING, Folding, LastWords, State, Status

_OPEN_MAX = 64  # operations under way that are followed
_CHANNELS_MAX = 256
_STEPS = 128  # of which the time is kept
_TRACED_S = 1.0  # between two looks for a debugger, which may stop this whole process at any later moment
JOIN = "join"  # activity of a rank within torch's Join: it may have more steps than others, but not stand still
LEAVING = "leaving"  # activity of a rank whose own error nobody has caught: it handles none
_PHASES = 24  # of the step that are shown


@final
class Account:
    """Of the rank whose thread makes it. One thread at a time."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.facts = Facts()  # of this rank's training
        self.ended_ns: list[int] = []  # when the last steps have: some _STEPS of them
        self.activities: list[str] = []  # of all threads: what may take long without anything wrong
        self.step_before = 0  # of which checkpoint the program goes on
        self.state: State = RUNNING
        self.words: LastWords | None = None
        self.saw: LastWords | None = None  # of an error that this rank raised because of another
        self.is_blind = False  # its guard cannot look at the others
        self._thread = threading.get_ident()
        self.motion = Motion(self._thread)
        self._recorder, self._record, self._host = recorder, FlightRecord(recorder.path), socket.gethostname()
        self.records = self._record.records
        self._folds: dict[str, Folding] = {}
        self._channels: dict[str, int] | None = {}  # messages so far; None where not all of them are known
        self._under_way: dict[int, Record] = {}  # at the last look, by number
        self._read = 0  # records before this number have been read
        self._traced_s, self._is_traced = -_TRACED_S, False

    def group(self, name: str, ranks: Sequence[int]) -> bool:
        """There is a group of this name and these ranks. Whether that is news."""
        is_new = name not in self._folds
        if is_new:
            self._folds[name] = Folding(ranks)
        return is_new

    def has_ended(self, now_ns: int) -> None:
        """The rank has ended a step."""
        self.ended_ns.append(now_ns)
        if len(self.ended_ns) > 2 * _STEPS:
            del self.ended_ns[: -_STEPS - 1]

    def catch_up(self) -> None:
        """Read what was recorded since the last time, and what has ended."""
        self._recorder.take_up()
        under_way, read, record = self._under_way, self._read, self._record
        for number in [*under_way]:
            found = record.in_brief(number, number + 1)
            if not found:  # it was overwritten, so nobody can tell whether it has ended: not that it is under way
                del under_way[number]
            for *_, left_ns, _, _, _ in found:
                if left_ns and under_way.pop(number).site in self.motion.stand.stack:
                    self.motion.has_begun = True  # what the thread stood in has come through
        begun = self._begun()
        if self._read > read:  # also in a group that others are not in
            self.motion.has_begun = True
        for number in begun[-_OPEN_MAX:]:
            under_way |= {one.number: one for one in record.records(number, number + 1) if not one.left_ns}
        for number in sorted(under_way)[:-_OPEN_MAX]:
            del under_way[number]

    def _begun(self) -> list[int]:
        """Read those that have begun, count messages, keep the marks of collectives; who is still under way."""
        if (in_line := self._record.in_line(self._read)) is not None:
            self._read, (group, kept, under_way) = in_line
            if group in self._folds:
                self._folds[group].add(*kept)
            return under_way
        said = self._record.said
        marks: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        under_way = []
        for number, seq, step, left_ns, digest, is_message, words in self._record.in_brief(self._read):
            if number > self._read:  # some were overwritten before
                self._channels = None
            self._read = number + 1
            if is_message:
                self._count(*said[words][:2], seq)
            else:
                marks[said[words][0]].append((seq, step, digest))
            if not left_ns:
                under_way.append(number)
        for group in marks.keys() & self._folds.keys():
            self._folds[group].add(*marks[group])
        return under_way

    def _count(self, group: str, text: str, seq: int) -> None:
        message = read_message(text)
        if message is None or message.peer is None:
            self._channels = None
        elif self._channels is not None:
            self._channels[channel(group, message.is_send, message.peer, message.tag)] = seq + 1
            if len(self._channels) > _CHANNELS_MAX:  # they are too many to be told
                self._channels = None

    @property
    def newest(self) -> tuple[Record, ...]:
        """The newest operation of each group that has been used of late."""
        return tuple({record.group: record for record in self._record.records(self._read - _OPEN_MAX)}.values())

    @property
    def oldest_ns(self) -> int:
        """When the oldest of what is under way began; 0 where nothing is. Any thread may ask."""
        return min((record.entered_ns for record in tuple(self._under_way.values())), default=0)

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """What happens within may take long without anything wrong: "checkpoint", "evaluate"; or it is `JOIN`."""
        self.activities.append(name)
        try:
            yield
        finally:
            self.activities.remove(name)

    def end(self, error: BaseException | None) -> None:
        """The rank leaves: by `error`, or because its program is done."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            words = self.saw or LastWords("", "", "" if error is None else users_line(error))
            self.state, self.words = FINISHED, words  # both: the guard's thread may tell of it at any moment
        else:
            is_mute = isinstance(error, SystemExit) and self.saw is not None  # sys.exit(1), where an error was caught
            self.state, self.words = RAISED, self.saw if is_mute else last_words(error)

    def brief(self, step: int | None = None, **more: Any) -> Status:
        """What needs no looking. step: read before the facts are, which else seem to be of a step that has ended."""
        recorder = self._recorder
        who = {"rank": recorder.rank, "world_size": recorder.world_size, "pid": os.getpid(), "host": self._host}
        how = {"state": self.state, "words": self.words, "is_blind": self.is_blind, "step_before": self.step_before}
        return Status(**who, **how, machine=recorder.machine, step=recorder.step if step is None else step, **more)

    def status(self, now_s: float, **said: Any) -> Status:
        """All of it, at `now_s` by time.monotonic(). said: see `Voice.shown`."""
        step, stand = self._recorder.step, self.motion.look(now_s)
        ended_ns = self.ended_ns[-_STEPS - 1 :]
        steps_ns = sorted(map(sub, ended_ns[1:], ended_ns))
        newest = self._record.records(self._read - 1)
        phases = tuple(self._recorder.clock.so_far(_PHASES))
        phase_s = now_s - phases[-1][1] / 1e9 if phases else math.inf  # it has moved since that began
        if now_s - self._traced_s >= _TRACED_S:
            self._traced_s, self._is_traced = now_s, is_traced()
        may_stand = self.state == RUNNING and LEAVING not in self.activities
        is_asked = may_stand and (bool(self._under_way) or stand.unmoved_s >= STILL_S)
        return self.brief(
            step,
            step_s=steps_ns[int(0.99 * len(steps_ns))] / 1e9 if steps_ns else 0.0,
            groups={name: fold.progress() for name, fold in self._folds.items()},
            messages=dict(self._channels or {}),
            queued=self.motion.queued(),
            waiting=waits_of(list(self._under_way.values())),
            last=newest[-1] if newest else None,
            phases=phases,
            stack=stand.stack,
            unmoved_s=min(stand.unmoved_s, phase_s),
            is_in_call=0 < stand.unmoved_s < STILL_S and bool(self._under_way) and is_in_call(self._thread),
            looping_s=stand.looping_s,
            handling=handled(handled_by(self._thread)) if is_asked else "",
            activity=next((one for one in reversed(self.activities) if one != JOIN), "")
            or stand.activity
            or ("debugger" if self._is_traced else ""),
            joins=JOIN in self.activities,
            facts=self.facts.said(),
            **said,
        )

    def close(self) -> None:
        """Give back the memory."""
        self._record.close()
