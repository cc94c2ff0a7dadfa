"""The record of the run that this process is a rank of: begun where its folder is known, ended with the process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from lockstep.observe.guard import Guard
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.torch_phases import attach_phases
from lockstep.observe.profile.window import RUN, Window
from lockstep.observe.profile.writer import RunWriter, attempt_of


@final
class Profile:
    """Records one rank. The program marks its phases on `clock`, or torch's hooks do."""

    def __init__(self, writer: RunWriter, window: Window, guard: Guard | None) -> None:
        self.clock = writer.clock
        if self.clock.close_reader is not None:  # of a launcher that did not know that the program records itself
            self.clock.close_reader()
        self.clock.close_reader = self.close
        self.clock.is_marked = True
        self._writer = writer
        self._window = window
        self._guard = guard
        if guard is not None:
            guard.before_look.append(writer.look)
            guard.before_close.append(self.close)
        self._undo: list[Callable[[], None]] = []

    def step_done(self, step: int, tokens: int = 0) -> None:
        """A step has ended whose phases the program has marked."""
        self._writer.step_done(step, tokens, 0 if self._guard is None else self._guard.recorder.started)
        self._profile(step)

    def _profile(self, step: int) -> None:
        if self._window.step_done(step):  # starting torch's profiler takes longer than a step
            self.clock.restart()

    def follow_torch(self) -> None:
        """Phases and steps are those that torch does in this process."""
        self.clock.is_marked = False
        self.clock.after_step = self._profile
        self._undo.append(attach_phases(self.clock))

    def close(self) -> None:
        """Write what is left. What is recorded from now on goes nowhere."""
        if self.clock.close_reader != self.close:
            return
        self.clock.close_reader = self.clock.after_step = None
        while self._undo:
            self._undo.pop()()
        self._window.close()
        if self._guard is not None and self._writer.look in self._guard.before_look:
            self._guard.before_look.remove(self._writer.look)
        self._writer.close()


def open_profile(
    folder: Path,
    guard: Guard | None,
    environ: Mapping[str, str] = os.environ,
    *,
    rank: int = 0,
    world_size: int = 1,
    **about: Any,
) -> Profile:
    """The record of this rank in `folder`.

    guard: of this process, whose thread writes then. about: `device` and `flops_per_token` of `RunWriter`.
    Raises: ConfigError where LOCKSTEP_PROFILE is no window.
    """
    window = Window.of(environ, folder, rank)
    writer = RunWriter(
        folder,
        StepClock() if guard is None else guard.recorder.clock,
        rank=rank,
        world_size=world_size,
        attempt=attempt_of(environ),
        records=None if guard is None else guard.records,
        window=window.steps,
        **about,
    )
    return Profile(writer, window, guard)


def follow_program(guard: Guard, environ: Mapping[str, str]) -> Profile | None:
    """The record of a program that is not ours, where the launcher has named a folder for it."""
    folder = environ.get(RUN, "")
    if not folder:
        return None
    profile = open_profile(Path(folder), guard, environ, rank=guard.rank, world_size=guard.world_size)
    profile.follow_torch()
    atexit.register(profile.close)
    return profile
