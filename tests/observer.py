"""What the ranks below one launcher are doing, seen from outside: read from their pulses and from /proc. Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from chaos_plan import Role
from lockstep.comm.pulse import NONE, Beat, read_pulses
from process_tree import Process, descendants, look, mapped_files, words_of

_SEARCH_S = 0.02  # between two looks through all processes, which take a millisecond


@final
class Observer:
    """What the ranks below one supervisor are doing, read from their pulses. It asks nobody and stops nothing."""

    def __init__(self, supervisor: int) -> None:
        self.supervisor = supervisor
        self.pulses = ""  # file of the ranks that live now, or lived last
        self._first: dict[int, int] = {}  # slot -> the step that these ranks go on from
        self._searched_s = 0.0

    def beats(self) -> list[Beat]:
        """What the living ranks last wrote; [] where there are none yet."""
        beats = self._read()
        if not beats or any(_is_gone(beat.pid) for beat in beats):
            if time.monotonic() < self._searched_s + _SEARCH_S:
                return []
            self._searched_s = time.monotonic()
            self._search()
            beats = self._read()
        beats = [beat for beat in beats if not _is_gone(beat.pid)]
        for beat in beats:
            if beat.step != NONE:
                self._first.setdefault(beat.pid, beat.step)
        return beats

    def resumed_at(self, beats: Sequence[Beat]) -> int:
        """The step that the ranks of `beats` go on from."""
        return min(self._first.get(beat.pid, 0) for beat in beats)

    def have_done_a_step(self, beats: Sequence[Beat], processes: int) -> bool:
        """Whether all ranks have finished one since they were started."""
        return len(beats) == processes and all(beat.step > self._first.get(beat.pid, beat.step) for beat in beats)

    def present(self, beats: Sequence[Beat]) -> dict[Role, list[Process]]:
        """The living processes by role; ranks in their order, as far as it can be seen."""
        children = [p for p in descendants(self.supervisor) if p.parent == self.supervisor and not p.is_zombie]
        rank_of = {beat.pid: beat.rank for beat in beats}
        servers = [p for p in children if p.pid not in rank_of and _is_fork_server(p.pid)]
        ranks = [p for p in children if p not in servers and "lockstep.launch." in words_of(p.pid)]
        ranks.sort(key=lambda p: (rank_of.get(p.pid, len(children)), p.started, p.pid))
        supervisor = look(self.supervisor)
        lives = supervisor is not None and not supervisor.is_zombie
        return {"rank": ranks, "fork server": servers, "supervisor": [supervisor] if supervisor and lives else []}

    def _search(self) -> None:
        for process in reversed(descendants(self.supervisor)):
            for path in mapped_files(process.pid) if not process.is_zombie else ():
                if "pulse" in Path(path).name:
                    if path != self.pulses:
                        self.pulses, self._first = path, {}
                    return

    def _read(self) -> list[Beat]:
        try:
            return read_pulses(self.pulses) if self.pulses else []
        except FileNotFoundError:
            return []


def _is_fork_server(pid: int) -> bool:
    """Its forks have its command line, but not the socket to the supervisor, which is the last word of it."""
    words = words_of(pid).split()
    if not any("lockstep.launch.fork_server" in word for word in words):
        return False
    try:
        return os.readlink(f"/proc/{pid}/fd/{words[-1]}").startswith("socket:")
    except OSError:
        return False


def _is_gone(pid: int) -> bool:
    process = look(pid)
    return process is None or process.is_zombie
