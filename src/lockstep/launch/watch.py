"""Notices processes that live but do nothing: stopped ones, and a run in which no rank gets on.

`Watch` only compares what it is shown with what it was shown before; `process_states` looks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

from lockstep.comm.kernel import process_state
from lockstep.comm.pulse import NONE, Beat

STOPPED = "T"  # by SIGSTOP, or by Ctrl-Z
TRACED = "t"  # at a debugger's breakpoint
_BLIND_S = 5.0  # between two looks: nobody knows what happened in more time than that
_ELSEWHERE_S = 5.0  # more, for the launcher of whom the ranks here wait for: it may see that one stand still later


class Stuck(NamedTuple):
    """Processes that have to be ended, because they would not end by themselves."""

    ranks: tuple[int, ...]
    what: str  # the end of a sentence that begins with their name: "stopped (SIGSTOP) for 10 s"
    detail: str = ""  # what the ranks had come to, where that tells something


@final
class Watch:
    """Tells when ranks are stuck, from looks at them that somebody takes about every second.

    stopped_limit_s: how long a process may be stopped (state T). One that a debugger holds may stay.
    hang_limit_s: how long no rank at all may give a sign of life, once the first has, and how long one may stand still
    for which others wait, as its guard says. 0 is never, for both.

    Where nobody looked for long (this process was itself stopped, or the machine asleep), that time does not count.
    """

    def __init__(self, stopped_limit_s: float = 10.0, hang_limit_s: float = 600.0) -> None:
        self._stopped_limit_s = stopped_limit_s or float("inf")
        self._hang_limit_s = hang_limit_s or float("inf")
        self._looked_s: float | None = None
        self._stopped_s: dict[int, float] = {}  # rank -> for how long
        self._silent_s = 0.0
        self._more_s = -1.0  # for another launcher; once asked, or ranks that it has let go would be ended meanwhile
        self._heard: dict[int, Beat] = {}

    def look(
        self,
        now_s: float,
        states: Mapping[int, str],
        beats: Sequence[Beat],
        is_elsewhere: Callable[[], bool] = lambda: False,
    ) -> Stuck | None:
        """What is stuck at `now_s` of a clock that never goes back; None while all is well.

        states: rank -> one letter, of the processes that run. beats: what the ranks last wrote. is_elsewhere: whether
        they may all wait for ranks of another machine, whose launcher ends those.
        """
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _BLIND_S)
        self._looked_s = now_s
        stopped = {rank for rank, state in states.items() if state == STOPPED}
        self._stopped_s = {rank: self._stopped_s.get(rank, -passed_s) + passed_s for rank in stopped}
        too_long = tuple(sorted(rank for rank in stopped if self._stopped_s[rank] >= self._stopped_limit_s))
        heard = {beat.rank: beat for beat in beats if beat.count}
        if heard != self._heard or not heard or TRACED in states.values():
            self._silent_s = 0.0
        else:
            self._silent_s += passed_s
        self._heard = heard
        if too_long:
            return Stuck(too_long, f"stopped (SIGSTOP) for {self._stopped_limit_s:g} s")
        still = tuple(beat.rank for beat in beats if beat.stuck_s >= self._hang_limit_s and beat.rank in states)
        if self._silent_s == 0.0:
            self._more_s = -1.0
        if self._silent_s >= self._hang_limit_s and self._more_s < 0.0:
            self._more_s = _ELSEWHERE_S if is_elsewhere() else 0.0
        if self._more_s < 0.0 or self._silent_s < self._hang_limit_s + self._more_s:
            return Stuck(still, f"no progress for {self._hang_limit_s:g} s") if still else None
        ranks, detail = _behind([beat for beat in heard.values() if beat.rank in states])
        return Stuck(ranks or tuple(sorted(states)), f"no progress for {self._hang_limit_s:g} s", detail)


def _behind(beats: Sequence[Beat]) -> tuple[tuple[int, ...], str]:
    """The ranks that did least, all where they are even, and how far each had come."""
    if not beats:
        return (), ""
    did = {beat.rank: (beat.step, beat.count) for beat in sorted(beats, key=lambda beat: beat.rank)}
    least = min(did.values())
    ranks = tuple(rank for rank, done in did.items() if done == least)
    return ranks, "; ".join(f"rank {r}: {f'step {s}, ' * (s != NONE)}{n} operations" for r, (s, n) in did.items())


def process_states(pids: Mapping[int, int]) -> dict[int, str]:
    """Rank -> state of the process pids[rank] as one letter (R, S, D, T, t, Z); those that are gone are left out."""
    if sys.platform == "linux":
        states = {rank: process_state(pid) for rank, pid in pids.items()}
    else:
        by_pid = _states_by_ps(list(pids.values()))
        states = {rank: by_pid.get(pid, "") for rank, pid in pids.items()}
    return {rank: state for rank, state in states.items() if state}


def _states_by_ps(pids: Sequence[int]) -> dict[int, str]:
    """Where there is no /proc. The first letter means the same; a traced process is stopped with an X behind it."""
    if not pids:
        return {}
    command = ["ps", "-o", "pid=,stat=", "-p", ",".join(map(str, pids))]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout
    states: dict[int, str] = {}
    for pid, state in (line.split()[:2] for line in said.splitlines() if len(line.split()) >= 2):
        states[int(pid)] = TRACED if state[0] == STOPPED and "X" in state else state[0]
    return states
