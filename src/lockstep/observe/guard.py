"""The guard of one rank: keeps its flight record, watches the others, and speaks up when the ranks are out of step.

Its thread looks a few times a second. What it sees is compared by `diagnosis`, which is pure; what it finds is put up
on the board for all ranks, said once, and raised: at the end of the step, or at once where this rank waits for what
cannot come.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TextIO, TypeVar, final

from lockstep.errors import CommError, PeerFailed, PeerLost, TransportClosed
from lockstep.observe.board import Board, Store
from lockstep.observe.call_site import call_site
from lockstep.observe.diagnosis import Finding, Limits, diagnose
from lockstep.observe.endings import CAUGHT, find_caught, goes_on, left_first, sequel, stalled_by
from lockstep.observe.evidence import keep_evidence
from lockstep.observe.facts import Facts
from lockstep.observe.flight import FlightRecorder, Record, pack_words
from lockstep.observe.last_words import last_words, peer_failed, sees_another, users_line
from lockstep.observe.own_record import OwnRecord
from lockstep.observe.scene import Scene
from lockstep.observe.settings import GuardSettings
from lockstep.observe.stacks import Motion, is_traced
from lockstep.observe.status import FINISHED, RAISED, RUNNING, LastWords, Sight, State, Status, Waiting
from lockstep.observe.training_findings import training_notes

_WORDS_S = 2.0  # how long a rank that lost another one waits for what is known of that
_NEWS_S = 0.5  # how long what has happened may take to be seen from here
_STALE_S = 1.5  # a guard that has said nothing for so long does not look any more
_SETTLED_S = 1.0  # after a rank stood still itself, as all may have: until then the others have said how they are
_RANKS = 16  # that are looked at in a millisecond; of more, less often
_STEPS = 128  # of which the time is kept
_PHASES = 24  # of the step that are shown
_BLOCKED_S = 0.5  # an operation that waits longer than this may wait for what cannot come

_TORCHS_SOURCE = re.compile(r"^\[\S+\] ")  # at the beginning of what Gloo says
_E = TypeVar("_E", bound=BaseException)


@final
class Guard:
    """One rank's. `start` begins to watch, `close` ends it; the record stays readable until then.

    Threads: `enter` and `leave` may be called from any; `step_done`, `lost` and `end` from the rank's own.
    """

    def __init__(self, recorder: FlightRecorder, board: Board, settings: GuardSettings) -> None:
        self.recorder = recorder
        self.settings = settings
        self.rank, self.world_size = recorder.rank, recorder.world_size
        folder = time.strftime("%Y%m%d-%H%M%S") + f"-rank-{self.rank}-{os.getpid()}"
        self._limits = Limits(hang_s=settings.hang_s, evidence=settings.evidence and f"{settings.evidence}/{folder}")
        self.finding: Finding | None = None
        self.before_look: list[Callable[[], None]] = []  # called by the thread, each time
        self.at_end: list[Callable[[], None]] = []  # called when the rank's program is done, before it has ended
        self.before_close: list[Callable[[], None]] = []
        self.on_finding: list[Callable[[Finding], None]] = []  # called with what this rank says
        self.aborts: list[Callable[[CommError], None]] = []  # what ends waits that cannot end
        self.facts = Facts()  # of this rank's training
        self.failed_at = ""  # line of the user's, once an error has come from there
        self._said: set[str] = set()  # keys of what is said once
        self._stalled = None  # what it said last of ranks that stand still
        self._period_s = settings.look_s * max(1.0, self.world_size / _RANKS)
        self._looked_s = self._blind_until_s = 0.0
        self._board = board
        self._record = OwnRecord(recorder.path)
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._step_began_s = 0.0
        self.step_before = 0  # of which checkpoint the program goes on
        self._activity = ""
        self._worlds = 0
        self._state: State = RUNNING
        self._words: LastWords | None = None
        self.has_failed = False  # an operation or a step of this rank has, and its program knows why
        self._raised = ""  # key of the finding that the program has been given
        self._saw: LastWords | None = None  # of an error that this rank raised because of another
        self._main = threading.get_ident()
        self._motion = Motion(self._main)
        self._lock = threading.RLock()  # one look at a time; what it calls may find a new group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-guard", daemon=True)
        self._pid = os.getpid()

    # ------------------------------------------------------------------ what the rank tells it

    def meet(self, store: Store) -> None:
        """See the ranks of other machines through `store`, which is for this guard alone."""
        self._board.use(store)

    def group(self, name: str, ranks: Sequence[int]) -> None:
        """There is a group of this name, of these ranks of the job, in its order."""
        with self._lock:
            if self._record.group(name, ranks):
                self._board.tell(self._status())  # a rank that is killed now has said who is in the group

    def name_of_world(self) -> str:
        """A name for the group of all ranks: each one that a process makes begins to count anew."""
        self._worlds += 1
        return "world" if self._worlds == 1 else f"world #{self._worlds}"

    def enter(self, group: str, seq: int, text: str, site: str, label: str = "", *, is_message: bool = False) -> int:
        """An operation begins; its number. See `Record`."""
        return self.recorder.enter(seq, pack_words(group, text, site, label), is_message)

    def leave(self, number: int) -> None:
        """Operation `number` has ended."""
        self.recorder.leave(number)

    @property
    def step(self) -> int:
        """How many steps this rank has done, with those of earlier starts that the program goes on from."""
        return self.recorder.step

    def begin_after(self, step: int) -> None:
        """The program goes on from a checkpoint of `step`, alike on all ranks."""
        self.step_before = step
        self.recorder.set_step(step)

    def step_done(self) -> None:
        """This rank has ended a step; what was found meanwhile is raised here."""
        now_s = time.monotonic()
        if self._step_began_s:
            self._steps_s.append(now_s - self._step_began_s)
        self._step_began_s = now_s
        if self._activity != "join":  # some ranks have steps there that others have not
            recorder = self.recorder
            recorder.set_step(recorder.step + 1)
            if not recorder.clock.is_marked:
                recorder.clock.step_done(recorder.step, recorder.started)
        if self.finding is not None:
            self.raise_if_found()

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """What happens within may take long without anything wrong: "checkpoint", "evaluate", "join"."""
        before, self._activity = self._activity, name
        try:
            yield
        finally:
            self._activity = before

    def raise_if_found(self) -> None:
        """Raise what was found, where it is certain.  Raises: CommError or ReplicaError."""
        if self.finding is not None and self.finding.is_certain:
            raise self._given(self.finding.error(), self.finding)

    def as_shown(self, error: BaseException) -> BaseException:
        """What to print for `error` at this rank's end: its first line, where the same output has all of it already."""
        found, here = self.finding, _place_of(sys.__stderr__)  # torch prints by way of a `sys.stderr` of its own
        if found is None or not here or found.said_to.rpartition(" ")[0] != here or str(error) != found.words:
            return error
        head = str(error).partition("\n")[0]
        shown = type(error).__new__(type(error))
        shown.args = (f"{head}\n  (all of it: see lockstep's report in this output)",)
        shown.__cause__, shown.__suppress_context__ = error.__cause__, error.__suppress_context__
        shown.__context__ = error.__context__
        return shown.with_traceback(error.__traceback__)

    def lost(self, error: CommError) -> CommError:
        """The error to raise in place of `error`, which ended an operation: with what is known of its cause."""
        cause = error if isinstance(error, TransportClosed) else self._why(error)
        self.saw(cause)
        self.has_failed = True
        return cause

    def saw(self, error: BaseException) -> None:
        """This rank raises `error`. Where that is another one's doing, its own end will be too, if it is caught."""
        if sees_another(error) and not isinstance(error, TransportClosed):
            self._saw = last_words(error)
            self._given(error)

    def _given(self, error: _E, found: Finding | None = None) -> _E:
        """`error`, which the program gets to see: if it does not end by it, that is said."""
        if found is not None:
            self.has_failed, self._raised = True, found.key
        text = _TORCHS_SOURCE.sub("", last_words(error).message)
        self.facts.tell(CAUGHT, CAUGHT, [self.step, call_site(), f"{type(error).__name__}: {text}"])
        return error

    def _say_what_was_caught(self) -> None:
        """The program has handled an error of the ranks: said by the first of those that have."""
        with self._lock:
            sights = {**self._board.sights(), self.rank: Sight(self._status(), 0.0, is_gone=False)}
        note = find_caught(Scene(self.rank, sights, self._board.records_of, self._limits))
        if note is not None and note.culprits[0] == self.rank and note.key not in self._said:
            self._said.add(note.key)
            self._say(note)

    def _why(self, error: CommError) -> CommError:
        found = self._certain() or self._examine()
        if found is not None and found.is_certain:
            return self._given(found.comm_error(), found)
        if not isinstance(error, PeerLost) or isinstance(error, PeerFailed):
            return error
        begun_s, passed_s = time.monotonic(), 0.0
        lost = error.rank
        while (said := left_first(self.rank, self._sights(), is_final=passed_s >= _NEWS_S, lost=lost)) is None:
            if passed_s >= _WORDS_S:
                return error
            time.sleep(0.02)
            passed_s = time.monotonic() - begun_s
        return peer_failed(*said, self.rank, error)

    def cause_of(self, error: BaseException) -> BaseException:
        """What stock torch's `error` comes from, to be raised from it; itself where it is not another rank's doing."""
        if isinstance(error, CommError) or not sees_another(error):
            return error
        seen = PeerLost(f"{type(error).__name__}: {error}")
        self.failed_at = users_line(error)
        found = self._after_failure()
        cause = self.lost(seen) if found is None else self._given(found.comm_error(), found)
        if cause is seen:
            return error
        cause.__cause__ = error
        return cause.with_traceback(error.__traceback__)

    def _after_failure(self) -> Finding | None:
        """Why the newest operation of this rank failed, said and put up; None where that cannot be seen."""
        if self._certain() is not None:
            return self.finding
        deadline = time.monotonic() + _NEWS_S
        while ((found := self._cause()) is None or _may_be_another(found)) and time.monotonic() < deadline:
            time.sleep(0.02)  # the others may be about to say it
        if found is not None:
            with self._lock:
                self._put_up(found, self._board.sights())
        return found and self.finding

    def _certain(self) -> Finding | None:
        """What has been found for certain, also if another rank has only just put it up."""
        if self.finding is None or not self.finding.is_certain:
            with self._lock:
                up = self._board.announced()
            self.finding = Finding.from_json(up) if up else self.finding
        return self.finding if self.finding is not None and self.finding.is_certain else None

    def _cause(self) -> Finding | None:
        """As if what failed were still under way: then one sees who it waits for. It is the newest of its group."""
        with self._lock:
            self._catch_up()
            status = self._status()
            waiting = tuple(Waiting(record, 0.0) for record in self._record.newest)
            if not waiting:
                return None
            failed = replace(status, waiting=waiting, stack=())  # it has been unwound
            sights = {**self._board.sights(is_urgent=True), self.rank: Sight(failed, 0.0, is_gone=False)}
            limits = replace(self._limits, grace_s=0.0)
            found = diagnose(self.rank, sights, self._board.records_of, limits)
        return found if found is not None and found.is_certain else None

    def _examine(self) -> Finding | None:
        """What can be found at this very moment."""
        with self._lock:
            self._record.catch_up()
            self._board.tell(self._status())
            return diagnose(self.rank, self._board.sights(is_urgent=True), self._board.records_of, self._limits)

    def finish(self) -> None:
        """The program is done: what it has not been told yet is raised.  Raises: as `raise_if_found`."""
        if self._pid != os.getpid():
            return
        for hook in self.at_end:
            hook()
        if self._state == RUNNING:
            self.look_now()
        found = self.finding
        is_seen = found is not None and found.kind in ("raised", "gone", "finished") and self._saw is not None
        if found is not None and found.key != self._raised and not is_seen:  # by torch's own error of that end, say
            self.raise_if_found()
        self._say_what_was_caught()

    def end(self, error: BaseException | None = None) -> None:
        """This rank is at its end: by `error`, or because its program is done. The others are told at once."""
        if self._pid != os.getpid() or self._state != RUNNING:
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._state = FINISHED
            self._words = self._saw or LastWords("", "", "" if error is None else users_line(error))
        else:
            is_mute = isinstance(error, SystemExit) and self._saw is not None  # sys.exit(1), where an error was caught
            self._state, self._words = RAISED, self._saw if is_mute else last_words(error)
        if self._lock.acquire(timeout=_WORDS_S):
            try:
                self._catch_up()
                self._board.tell(self._status())
                if self._state == FINISHED:
                    self._say_what_was_caught()
            finally:
                self._lock.release()

    def give_up(self, error: BaseException) -> None:
        """This rank leaves its groups by `error`: what it has under way ends now, for nobody may ever join it there."""
        self._abort(CommError(f"rank {self.rank} gave up: {type(error).__name__}: {error}"))

    def records(self, since: int, until: int) -> list[Record]:
        """Of this rank's flight record: numbers `since` to `until`, without that one, which are still there."""
        return self._record.records(since, until)

    # ------------------------------------------------------------------ watching

    def start(self) -> None:
        """Begin to watch."""
        if self.settings.mode != "off":
            self._thread.start()

    def close(self) -> None:
        """End the thread and give back the memory. What others see of this rank stays."""
        if self._pid != os.getpid():
            return
        for hook in self.before_close:
            hook()
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._record.close()
        self._board.close()
        self.recorder.close()

    def _watch(self) -> None:
        self.recorder.count_this_thread()  # it enters what the rank's own thread has started in C++
        while not self._stop.wait(self._period_s):
            with self._lock:
                self.look()

    def look(self, *, is_last: bool = False) -> None:
        """What the thread does each time: say how this rank is, see how the others are, act on what is found.

        is_last: there may be no other look, so this rank does not leave it to the one that looks for all.
        """
        now_s = time.monotonic()
        if 0.0 < self._looked_s < now_s - self._period_s - _STALE_S:  # a suspended job, a paused machine
            self._blind_until_s = now_s + _SETTLED_S
            self._motion.begin_anew()
        self._looked_s = now_s
        self._catch_up()
        self._board.tell(self._status())
        if self._certain() is None:
            self._find(is_last)
        if self.finding is not None and self.finding.is_certain and self._must_break():
            self._abort(self.finding.comm_error())

    def _abort(self, error: CommError) -> None:
        for abort in tuple(self.aborts):
            abort(error)

    def look_now(self) -> Finding | None:
        """Look at once, in the rank's own thread; what has been found so far, also what another one is about to say."""
        with self._lock:
            self.look(is_last=True)
        return self.finding

    def _find(self, is_last: bool) -> None:
        sights = self._board.sights()
        self.facts.compare(sights, self.rank)
        if self._stalled is not None and (over := goes_on(self._stalled, sights)):
            self._stalled = None
            sys.stderr.write(over + "\n")
        is_lookout = self._is_lookout(sights)
        self._note(sights, is_lookout)
        if not is_last and (not is_lookout or self._looked_s < self._blind_until_s):
            return
        found = diagnose(self.rank, sights, self._board.records_of, self._limits)
        if found is None or found.key in self._said:
            return
        if found.is_certain:
            self._put_up(found, sights)
        elif is_lookout:  # only said: it may pass
            self.finding = found
            self._said.add(found.key)
            self._say_with_evidence(found, sights)
            if found.kind in ("stopped", "hang"):
                self._stalled = stalled_by(found, sights, _place_of(sys.stderr))

    def _put_up(self, found: Finding, sights: Mapping[int, Sight]) -> None:
        """For all ranks to see; said, unless another one was up before."""
        found = replace(found, said_to=f"{_place_of(sys.stderr)} {self.rank}")
        before, self.finding = self.finding, Finding.from_json(self._board.announce(found.to_json()))
        if self.finding == found != before:  # else another rank said it, or another thread of this one
            self._say_with_evidence(found, sights)

    def _say_with_evidence(self, found: Finding, sights: Mapping[int, Sight]) -> None:
        self._say(found, sequel(found, self._stalled, sights, _place_of(sys.stderr)))
        if self._limits.evidence:
            keep_evidence(self._limits.evidence, found, sights, self._board.records_of)

    def _note(self, sights: Mapping[int, Sight], is_lookout: bool) -> None:
        """Say once what all should know of, and can live with."""
        for note in training_notes(Scene(self.rank, sights, self._board.records_of, self._limits)):
            if note.key not in self._said:
                self._said.add(note.key)
                if is_lookout:
                    self._say(note)

    def _say(self, found: Finding, text: str = "") -> None:
        sys.stderr.write((text or found.text).rstrip("\n") + "\n")
        sys.stderr.flush()
        for hook in tuple(self.on_finding):
            hook(found)

    def _is_lookout(self, sights: Mapping[int, Sight]) -> bool:
        """Whether this is the first rank whose guard looks: one is enough."""
        looking = [r for r, sight in sights.items() if sight.age_s < _STALE_S and sight.status.state == RUNNING]
        return self.rank == min(looking, default=self.rank)

    def _must_break(self) -> bool:
        """Whether this rank waits for what cannot come."""
        oldest = self._record.oldest_ns
        return self.settings.mode == "strict" or (oldest > 0 and time.monotonic_ns() - oldest > _BLOCKED_S * 1e9)

    def _sights(self) -> Mapping[int, Sight]:
        with self._lock:
            return self._board.sights(is_urgent=True)

    def _catch_up(self) -> None:
        """Know of all that this rank has done, also of what is only seen by looking."""
        for hook in tuple(self.before_look):
            hook()
        self._record.catch_up()

    def _status(self) -> Status:
        stand = self._motion.look(time.monotonic())
        steps = sorted(self._steps_s)
        return Status(
            rank=self.rank,
            world_size=self.world_size,
            pid=self._pid,
            host=socket.gethostname(),
            step=self.recorder.step,
            step_s=steps[int(0.99 * len(steps))] if steps else 0.0,
            state=self._state,
            phases=tuple(self.recorder.clock.so_far(_PHASES)),
            stack=stand.stack,
            unmoved_s=stand.unmoved_s,
            looping_s=stand.looping_s,
            activity=self._activity or stand.activity or ("debugger" if is_traced() else ""),
            words=self._words,
            facts=self.facts.said(),
            stalled=self._stalled,
            **self._record.shown(),
        )


def _may_be_another(found: Finding) -> bool:
    """Whether the fault may be that of a rank which has yet to say what it does: Gloo aborts who is sent too much."""
    return found.kind == "finished" or (found.kind == "gone" and signal.SIGABRT.name in found.text)


def _place_of(stream: TextIO | None) -> str:
    """Equal for ranks whose messages go to one terminal, file or pipe."""
    try:
        place = os.fstat(stream.fileno() if stream is not None else -1)
    except (OSError, ValueError):  # it is no file
        return ""
    return f"{socket.gethostname()} {place.st_dev} {place.st_ino}"
