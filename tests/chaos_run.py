"""One `lockstep train` under a plan of strikes: watched from outside, struck, started again where it has to be."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, final

from chaos_plan import Blow, Phase, Role, Strike, choose
from lockstep.comm.pulse import NONE, Beat
from lockstep.comm.waiting import wait_until
from lockstep.launch.processes import reap_strangers
from lockstep.launch.worker import INTERRUPTED, REQUEUE
from observer import Observer
from process_tree import Process, age_s, descendants, strike, words_of

_TICK_S = 0.003
_REMEMBERED = 9  # recoveries of which the pace is the median
_STRETCH = 1.25
_LAST_WORDS_S = 3.0
_END_S = 60.0
_OUTPUT_SHOWN = 20000


class ChaosFailed(Exception):
    """The run did not go on as it has to; says what was seen."""


class Pace:
    """How far the moments of strikes reach from the last start or strike on: about half of them hit a run that trains.

    A machine that has become slower gets more time, or no step would ever be done.
    """

    def __init__(self, cold_s: float) -> None:
        """cold_s: from a start, with nothing imported, to the first step."""
        self._known = {True: [cold_s], False: [cold_s / 10]}  # the second is a guess, until there is better
        self._in_vain = 0

    def reach_s(self, is_cold: bool) -> float:
        """Seconds that a moment of 1 stands for."""
        known = self._known[is_cold][-_REMEMBERED:]
        return (1.5 if is_cold else 2.5) * statistics.median(known) * _STRETCH**self._in_vain

    def struck(self) -> None:
        """One more, and no step since the last."""
        self._in_vain += 1

    def recovered(self, is_cold: bool, seconds: float) -> None:
        """All ranks have done a step again."""
        self._in_vain = 0
        self._known[is_cold].append(seconds)


class Command(NamedTuple):
    """What is run."""

    words: Sequence[str]  # after `python -m lockstep`
    folder: Path  # where; `out` in it is the run's
    processes: int

    @property
    def checkpoints(self) -> Path:
        """The run's directory of checkpoints."""
        return self.folder / "out" / "checkpoints"

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, as a person would the first time and every time."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # so that SIGABRT shows all stacks
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_CACHE_HOME": str(self.folder.parent / "cache"),
        }
        with (self.folder / "output").open("ab") as output:
            words = [sys.executable, "-m", "lockstep", *self.words]
            return subprocess.Popen(
                words, env=environ, cwd=self.folder, stdout=output, stderr=output, start_new_session=True
            )


@final
class Run:
    """Starts the command, deals the strikes, starts it again, until it has ended by itself."""

    def __init__(
        self, command: Command, pace: Pace, plan: list[Strike], patience_s: float, say: Callable[[str], None]
    ) -> None:
        self.blows: list[Blow] = []
        self.starts = 0
        self.first_step_s: float | None = None  # from the first start to the first step
        self._command, self._pace, self._plan, self._patience_s, self._say = command, pace, plan, patience_s, say
        self._base_s = 0.0  # the last start or strike: moments count from here
        self._struck_s = 0.0  # the last strike, or the first start: recoveries count from here
        self._open: Blow | None = None  # a strike whose consequences are not known yet
        self._open_pid, self._open_step, self._open_pulses = 0, 0, ""
        self._is_recovered = self._is_cold = self._is_start = False
        self._alive_s = 0.0
        self._seen: object = None
        self._awaited: tuple[int, ...] = ()  # exit codes, beside 0, that are no failure now
        self._shall_stop = False  # ranks that were at work have been asked to
        self._pause = threading.Event()

    def go(self) -> None:
        """Until the run has ended by itself. Deals as many strikes of the plan, from its end, as come to pass.

        Raises: ChaosFailed where the run fails, hangs, or leaves a process behind.
        """
        process, observer = self._start()
        while True:
            code = process.poll()
            if code == 0:
                self._close_blow(None, None)
                break
            if code is not None:
                if code not in self._awaited:
                    raise ChaosFailed(f"it ended with exit code {code}; {self._tail()}")
                process, observer = self._start()
            reap_strangers([process.pid])
            self._tick(observer)
            self._pause.wait(_TICK_S)
        self._check_nothing_is_left()

    def _start(self) -> tuple[subprocess.Popen[bytes], Observer]:
        process = self._command.start()
        self._base_s = self._alive_s = time.monotonic()
        self._struck_s = self._struck_s or self._base_s
        self._is_recovered, self._is_start, self._is_cold = False, True, True
        self._awaited, self._shall_stop = (), False
        self.starts += 1
        return process, Observer(process.pid)

    def _tick(self, observer: Observer) -> None:
        beats = observer.beats()
        self._notice_progress(beats)
        if self._shall_stop and beats and observer.pulses != self._open_pulses:
            raise ChaosFailed(f"it was asked to stop, and has started its ranks anew; {self._tail()}")
        if not self._is_recovered and self._goes_on(observer, beats):
            self._is_recovered = True
            seconds = max(beat.time_ns for beat in beats) / 1e9 - self._struck_s
            self.first_step_s = self.first_step_s or seconds
            if observer.pulses != self._open_pulses:
                self._pace.recovered(self._is_cold, seconds)
            is_same_life = observer.pulses == self._open_pulses
            self._close_blow(seconds, 0 if is_same_life else max(0, self._open_step - observer.resumed_at(beats)))
        if not self._plan:
            return
        if time.monotonic() < self._base_s + self._plan[-1].moment * self._pace.reach_s(self._is_cold):
            return
        present = observer.present(beats)
        if not self._is_cold and not self._is_warm(present):
            self._is_cold = True  # its moment comes later
            return
        self._deal(observer, beats, present)

    def _goes_on(self, observer: Observer, beats: Sequence[Beat]) -> bool:
        if not observer.have_done_a_step(beats, self._command.processes):
            return False
        return all(beat.pid != self._open_pid and beat.time_ns / 1e9 > self._struck_s for beat in beats)

    def _is_warm(self, present: dict[Role, list[Process]]) -> bool:
        servers = present["fork server"]
        return self._is_recovered or any(age_s(server) > self._pace.reach_s(is_cold=True) / 2 for server in servers)

    def _deal(self, observer: Observer, beats: Sequence[Beat], present: dict[Role, list[Process]]) -> None:
        chosen = choose(self._plan[-1], present, self._is_start and not self._is_recovered)
        if chosen is None:
            return
        planned = self._plan.pop()
        role, number = chosen
        victim, phase = present[role][number], self._phase()
        number_of_signal = signal.Signals[planned.signal]
        if role == "supervisor":
            self._awaited = (-number_of_signal, REQUEUE, INTERRUPTED)
        elif number_of_signal == signal.SIGTERM:
            self._awaited = (*self._awaited, REQUEUE, INTERRUPTED)
        if not strike(victim, number_of_signal):
            self._plan.append(planned)  # it had just ended
            return
        self._close_blow(None, None)
        self._pace.struck()
        self._open = Blow(planned.signal, f"rank {number}" if role == "rank" else role, phase, None, None)
        self._open_pid = victim.pid if role == "rank" else 0
        self._open_pulses = observer.pulses if beats else ""
        self._open_step = max((beat.step for beat in beats if beat.step != NONE), default=self._open_step)
        self._shall_stop = number_of_signal == signal.SIGTERM and self._is_recovered
        self._base_s = self._struck_s = self._alive_s = time.monotonic()
        self._is_recovered = self._is_start = self._is_cold = False

    def _phase(self) -> Phase:
        if not self._is_recovered:
            return "start-up" if self._is_start else "restart"
        return "save" if _is_saving(self._command.checkpoints) else "step"

    def _close_blow(self, seconds: float | None, steps: int | None) -> None:
        if self._open is not None:
            self.blows.append(self._open._replace(recovery_s=seconds, steps_redone=steps))
            self._open = None
            if len(self.blows) % 50 == 0:
                self._say(f"  {len(self.blows)} struck")

    # ------------------------------------------------------------------ what must not be

    def _notice_progress(self, beats: Sequence[Beat]) -> None:
        seen = [(beat.pid, beat.step, beat.committed) for beat in beats]
        if seen != self._seen:
            self._seen, self._alive_s = seen, time.monotonic()
        elif time.monotonic() > self._alive_s + self._patience_s:
            for process in _living():
                strike(process, signal.SIGCONT)
                strike(process, signal.SIGABRT)  # it shows its stacks
            wait_until(lambda: not _living(), _LAST_WORDS_S)
            raise ChaosFailed(f"nothing happened for {self._patience_s:g} s; {self._tail()}")

    def _check_nothing_is_left(self) -> None:
        if not wait_until(lambda: not _living(), _LAST_WORDS_S):
            raise ChaosFailed(f"it ended and left {[(p.pid, words_of(p.pid)[:100]) for p in _living()]}")
        reap_strangers([])
        folders = [path.name for path in (self._command.folder / "tmp").glob("lockstep-*")]
        if folders:
            raise ChaosFailed(f"it ended and left {folders} of supervisors that were killed")

    def _tail(self) -> str:
        text = (self._command.folder / "output").read_text(errors="replace")
        blows = "\n".join(f"  {blow}" for blow in [*self.blows, *([self._open] if self._open else [])][-5:])
        return f"the last strikes:\n{blows}\nthe end of its output:\n{text[-_OUTPUT_SHOWN:]}"


def _is_saving(checkpoints: Path) -> bool:
    """Whether a checkpoint is being written or deleted: the newest generation's folder holds something."""
    for folder in checkpoints.glob(".generation-*"):
        try:
            if os.listdir(folder):
                return True
        except FileNotFoundError:
            continue
    return False


def end_all() -> None:
    """Kill whatever this process has started, and what that has."""

    def is_done() -> bool:
        left = _living()
        for process in left:
            strike(process, signal.SIGKILL)
        reap_strangers([])
        return not left

    assert wait_until(is_done, _END_S), f"they cannot be killed: {_living()}"


def _living() -> list[Process]:
    """All that this process has started, and what that has."""
    return [process for process in descendants(os.getpid()) if not process.is_zombie]
