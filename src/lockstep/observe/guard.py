"""The guard of one rank, as its program and what watches torch see it: they tell it what is done, and it raises.

It has six parts: the `FlightRecorder` keeps what is done, the `Account` says how this rank is, the `Lookout` looks at
all ranks a few times a second, in a thread of its own, the `Voice` says what is found, the `Causes` what an error comes
from, and the `StepEnds` end the steps. What is certain is raised: at the end of the step, or at once where this rank
waits for what cannot come.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn, final

from lockstep.errors import CommError
from lockstep.observe.account import Account
from lockstep.observe.board import Board
from lockstep.observe.causes import Causes
from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.glance import Glance
from lockstep.observe.lookout import CALM_S, Lookout
from lockstep.observe.scene import Limits
from lockstep.observe.settings import GuardSettings
from lockstep.observe.stacks import is_in_torch
from lockstep.observe.status import RUNNING
from lockstep.observe.step_ends import StepEnds
from lockstep.observe.stream_ends import StreamEnds
from lockstep.observe.voice import Voice
from lockstep.observe.wording import Finding

_RANKS = 16  # that are looked at in a millisecond; of more, less often
_CALM = 1.6  # times as long from one look, or glance, to the next
_SOON_S = 0.05  # to the next look, where ranks differ and those at fault have yet to say why
_KEPT_UP_S = 1.2  # after which a rank without a look reads and writes down what it has done
_MANY = 8  # steps in that time: what each does is told more seldom
_DRAIN_S = 0.02
_UNREACHED_S = 10.0  # after which a thread that stands in C++ will not come back to hear of an error
_BLOCKED_S = 0.5  # an operation that waits longer than this may wait for what cannot come


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
        limits = Limits(hang_s=settings.hang_s, evidence=settings.evidence and f"{settings.evidence}/{folder}")
        self._period_s = settings.look_s * max(1.0, self.world_size / _RANKS)
        self.board = board
        self._account = Account(recorder)
        self._voice = Voice(self.rank, limits.evidence, board.records_of)
        self._lookout = Lookout(self.rank, self._account, board, self._voice, limits, self._period_s)
        self._glance = Glance(recorder, self._account, board)
        self.facts, self.motion = self._account.facts, self._account.motion
        self.records, self.group = self._account.records, self._lookout.group
        self.before_look = self._lookout.before_look  # called by the thread, each time
        self.before_look.append(recorder.take_up)
        self.stream_ends = StreamEnds(recorder)
        self.before_look.append(self.stream_ends.settle)
        self.motion.queues.append(self.stream_ends.are_due)
        self.at_end: list[Callable[[], None]] = []  # called when the rank's program is done, before it has ended
        self.before_destroy: list[Callable[[Any], None]] = []  # called with a group that the program ends; None: all
        self.before_close: list[Callable[[], None]] = []
        self.on_finding = self._voice.on_finding  # called with what this rank says
        self.aborts: list[Callable[[CommError], None]] = []  # what ends waits that cannot end
        self.parts: Counter[tuple[int, ...]] = Counter()  # by their ranks, the groups that were made of others
        self.step_before = 0  # of which checkpoint the program goes on
        self._worlds = 0
        self._aborted_s = math.inf  # when what is under way was ended by force, by time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-guard", daemon=True)
        self._pid = os.getpid()
        self.activity = self._account.activity
        self.causes = causes = Causes(recorder, self._account, self._lookout, self._voice, self._stop)
        self.raise_if_found, self.lost, self.saw = causes.raise_if_found, causes.lost, causes.saw
        self.cause_of, self.as_shown = causes.cause_of, self._voice.as_shown
        self.step_ends = StepEnds(recorder, self._account, self._lookout, causes)
        self.step_done, self.passing = self.step_ends.step_done, self.step_ends.passing

    # ------------------------------------------------------------------ what the rank tells it

    def name_of_world(self) -> str:
        """A name for the group of all ranks: each one that a process makes begins to count anew."""
        self._worlds += 1
        return "world" if self._worlds == 1 else f"world #{self._worlds}"

    def enter(self, group: str, seq: int, text: str, site: str, label: str = "", *, is_message: bool = False) -> int:
        """An operation begins; its number. See `Record`."""
        return self.recorder.enter(seq, pack_words(group, text, site, label), is_message)

    def begin_after(self, step: int) -> None:
        """The program goes on from a checkpoint of `step`, alike on all ranks."""
        self.step_before = self._account.step_before = step
        self.recorder.set_step(step)

    # ------------------------------------------------------------------ what it has found

    @property
    def finding(self) -> Finding | None:
        """The last that was found."""
        return self._lookout.finding

    @property
    def stuck_s(self) -> float:
        """For how long this rank has stood still, if a hang has been said that is its doing; else 0."""
        return self._lookout.stuck_s

    # ------------------------------------------------------------------ its thread, and the end

    def start(self) -> None:
        """Begin to watch."""
        if self.settings.mode != "off":
            self._thread.start()

    def _watch(self) -> None:
        self.recorder.count_this_thread()  # it enters what the rank's own thread has started in C++
        self._voice.looker = get_ident()
        while not self._stop.wait(self._pause_s()):
            self.act()

    def _pause_s(self) -> float:
        """Until the next look. In a long run in which all is well that is longer: two make less than a second still.

        With the other ranks of this machine: those who wait for each other are held up once, not each by each.
        """
        if self._lookout.shown_ns:
            return _SOON_S
        period_s = self._period_s * (_CALM if self._lookout.is_calm else 1)
        return period_s - time.monotonic() % period_s

    def act(self) -> None:
        """What the thread does each time: it looks, unless all is well, which a glance has shown."""
        is_enough = has_found = False
        glance = self._glance
        with self._voice.spared("a glance"):
            if self._lookout.is_calm and self.world_size <= _RANKS:
                is_time = self._is_time(_KEPT_UP_S)
                is_due = is_time and (glance.steps_unread < _MANY or self._is_time(CALM_S))
                is_enough, has_found = glance.is_enough(is_due=is_due, has_time=is_time), glance.has_found
                if is_enough and (is_time or glance.is_full):
                    self._lookout.keep_up()
                    glance.kept_up()
        if not is_enough:
            self.look(is_urgent=has_found)

    def _is_time(self, apart_s: float) -> bool:
        """Whether now is, for what is done so seldom in calm hours: for all ranks of a machine at one moment."""
        now, apart = (round(time_s / (self._period_s * _CALM)) for time_s in (time.monotonic(), apart_s))
        return now % max(1, apart) == 0

    def look(self, *, is_urgent: bool = False) -> None:
        """At all; see `Lookout.look`. No error ends the thread."""
        with self._voice.spared("a look"):
            self._lookout.look(is_urgent=is_urgent)
            oldest_ns, found = self._account.oldest_ns, self.finding
            is_blocked = oldest_ns > 0 and time.monotonic_ns() - oldest_ns > _BLOCKED_S * 1e9
            if found is None or not found.is_certain:
                return
            if is_blocked or self.settings.mode == "strict":
                self._aborted_s = min(self._aborted_s, time.monotonic())
                self._voice.call(self.aborts, found.comm_error())
            if self.causes.raised != found.key and self._is_out_of_reach():
                self._leave_for_it(found)

    def _is_out_of_reach(self) -> bool:
        """Whether the rank's own thread stands in C++, where no error comes to it, and was not freed by an abort."""
        if self.motion.stand.unmoved_s < _UNREACHED_S:
            return False
        is_late = time.monotonic() - self._aborted_s >= _UNREACHED_S
        return self.stream_ends.were_aborted or (is_late and is_in_torch(self.motion.thread_id))

    def _leave_for_it(self, found: Finding) -> NoReturn:
        """End the process, whose own thread is out of reach."""
        self.end(self.causes.given(found.comm_error(), found))
        where = "".join(self.motion.stand.stack[-1:])
        backend = "NCCL" if self.stream_ends.were_aborted else "Gloo"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # whoever reads it may be gone
            why = f"for {_UNREACHED_S:g} s it has stood at {where}, and {backend} does not let it go"
            sys.stderr.write(f"lockstep: rank {self.rank} ends by what is above: {why}\n")
            sys.stderr.flush()
            sys.stdout.flush()
        self._voice.call(self.before_close)
        os._exit(1)

    def look_now(self) -> Finding | None:
        """Look at once, in the rank's own thread; what has been found so far, also what another one is about to say."""
        self._lookout.look(is_last=True)
        return self.finding

    def give_up(self, error: BaseException) -> None:
        """This rank leaves its groups by `error`: what it has under way ends now, for nobody may ever join it there."""
        self._voice.call(self.aborts, CommError(f"rank {self.rank} gave up: {type(error).__name__}: {error}"))

    def drain(self) -> None:
        """Wait for what devices still have to do: the end of a group or process would, where nobody can tell of it."""
        while self._thread.is_alive() and self.motion.is_queued() and not self.stream_ends.were_aborted:
            if self.finding is not None and self.finding.is_certain:
                return
            time.sleep(_DRAIN_S)

    def finish(self) -> None:
        """The program is done: what it has not been told yet is raised.  Raises: as `raise_if_found`."""
        if self._pid != os.getpid():
            return
        self.drain()
        self._voice.call(self.at_end)
        if self._account.state == RUNNING:
            self.look_now()
        found, raised = self.finding, self.causes.raised
        is_seen = found is not None and found.kind in ("raised", "gone", "finished") and self._account.saw is not None
        if found is not None and found.key != raised and not is_seen:  # by torch's own error of that end, say
            self.raise_if_found()
        self._lookout.say_at_end()

    def end(self, error: BaseException | None = None) -> None:
        """This rank is at its end: by `error`, or because its program is done. The others are told at once."""
        if self._pid == os.getpid() and self._account.state == RUNNING:
            self._lookout.leave(error)

    def rest(self, patience_s: float | None = None) -> None:
        """Look no more. A thread that calls torch while the interpreter ends would end the process by an abort."""
        self._stop.set()
        if self._pid == os.getpid() and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(patience_s)

    def close(self) -> None:
        """End the thread and give back the memory. What others see of this rank stays."""
        if self._pid != os.getpid():
            return
        self._voice.call(self.before_close)
        self.rest()
        self._account.close()
        self.board.close()
        self.recorder.close()
