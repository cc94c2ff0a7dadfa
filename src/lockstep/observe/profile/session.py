"""The record of the run that this process is a rank of: begun where its folder is known, ended with the process."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from lockstep.observe.guard import Guard
from lockstep.observe.loggers import LOG, Loggers, logger_names, open_loggers
from lockstep.observe.pace import PACE
from lockstep.observe.profile.device_values import read_later
from lockstep.observe.profile.notes import Later, take_notes
from lockstep.observe.profile.run_facts import run_facts
from lockstep.observe.profile.run_record import WHOLE_MAX, attempt_of
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.torch_notes import TorchNotes
from lockstep.observe.profile.torch_phases import attach_phases
from lockstep.observe.profile.window import LAUNCH, PROFILE, RUN, Window, read_window
from lockstep.observe.profile.writer import RunWriter
from lockstep.observe.torch_optimizers import OPTIMIZERS
from lockstep.observe.wording import Finding


@final
class Profile:
    """Records one rank. The program marks its phases on `clock`, or torch's hooks do."""

    def __init__(self, writer: RunWriter, window: Window, guard: Guard | None) -> None:
        self.clock = writer.clock
        if self.clock.close_reader is not None:  # of a launcher that did not know that the program records itself
            self.clock.close_reader()
        self.clock.close_reader = self._give_way
        PACE.leave()  # what is there was made for who ended the steps before
        self.clock.is_marked = True
        self._writer = writer
        self._window = window
        self._guard = guard
        self._passed = None if guard is None else guard.passing()
        if guard is not None:
            guard.before_look.append(writer.look)
            guard.before_close.append(self.close)
            guard.on_finding.append(self._found)
        self._notes: TorchNotes | None = None
        self.open_loggers: Callable[[], Loggers] | None = None  # for what `lockstep.log` is given
        self._loggers: Loggers | None = None
        self._undo: list[Callable[[], None]] = [take_notes(self), partial(PACE.dues.remove, self._due)]
        PACE.dues.append(self._due)

    def note(self, kind: str, later: Later | None = None, /, **fields: Any) -> None:
        """Write down a note of `notes.py`; where that has a step, it is of the last one unless it says so."""
        if kind in ("values", "layout", "replicas") and fields.get("step") is None:
            fields["step"] = self.clock.step
        self._writer.note(kind, later, **fields)

    def log(self, step: int | None, values: Mapping[str, Any]) -> None:
        """The user's own numbers of a step, for the record and for loggers."""
        step = self.clock.step if step is None else step
        if self._notes is not None and "loss" in values:
            self._notes.knows_loss = True
        there = {name: value for name, value in values.items() if isinstance(value, float)}
        coming = {name: [value] for name, value in values.items() if name not in there}
        later = read_later(coming) if coming else None
        self.note("values", later, step=step, **there, **dict.fromkeys(coming))
        if self.open_loggers is not None:
            self._loggers, self.open_loggers = self.open_loggers(), None
        if self._loggers is not None:
            self._loggers.log(step, there, later)

    def _found(self, finding: Finding) -> None:
        self._writer.note("finding", **json.loads(finding.to_json()))
        self._writer.look()  # this process may be about to end

    def step_done(self, step: int, tokens: int = 0) -> None:
        """A step has ended whose phases the program has marked.  Raises: as `Guard.step_done`."""
        guard, passed = self._guard, self._passed
        if guard is None or passed is None:
            self.clock.step_done(step, 0, tokens)
            self._writer.look_now_and_then()  # as the guard's thread would
        else:
            if not passed("", step, tokens):
                guard.step_done()
                self.clock.step_done(step, guard.recorder.started, tokens, is_brief=PACE.is_brief)
            if not PACE.is_brief:
                OPTIMIZERS.step_done()
                if PACE.is_brief:
                    self.clock.time_batches_only()
            elif guard.recorder.step + 1 >= PACE.until:
                PACE.turn(is_brief=False)
                self.clock.time_all()
        if self._window.steps and self._window.step_done(step):  # to start torch's profiler takes longer than a step
            self.clock.restart()

    def raise_if_found(self) -> None:
        """See `Guard.raise_if_found`: for what is not to be done then, before the step ends."""
        if self._guard is not None:
            self._guard.raise_if_found()

    def follow_torch(self, guard: Guard) -> None:
        """Phases, steps and notes are those that torch does in this process."""
        self.clock.is_marked = False
        notes = self._notes = TorchNotes(self._writer, guard)
        self._undo += [attach_phases(self.clock), notes.attach()]

        def stepped(step: int) -> None:
            if self._window.steps and self._window.step_done(step):
                self.clock.restart()
            following = notes.stepped(step)
            self.clock.after_from = 0 if self._window.steps else following

        self.clock.after_step, self.clock.values = stepped, notes.values

    def _due(self, step: int) -> float:
        """Which step after `step` is to be looked at for what is noted after it, or for a window."""
        if self._window.steps:
            return step + 1
        return math.inf if self.clock.after_step is None else max(step + 1, self.clock.after_from)

    def _give_way(self) -> None:
        """The program has a record of its own."""
        self.close()
        if self.clock.step == 0:
            self._writer.withdraw()

    def end(self) -> None:
        """`close`, at the end of the process: a program that has ended no step is told as if it were one.

        That begins with its first operation, or with the first of the newest that make a picture.
        """
        guard, clock = self._guard, self.clock
        if guard is not None and clock.close_reader == self._give_way and clock.step == 0:
            guard.recorder.take_up()
            operations = guard.recorder.started
            if operations:
                since = max(0, operations - WHOLE_MAX)
                for first in guard.records(since, since + 1):
                    clock.begin_at(first.entered_ns, since)
                clock.after_step = clock.values = None
                self._writer.is_whole = True
                clock.step_done(1, operations)
        self.close()

    def close(self) -> None:
        """Write what is left. What is recorded from now on goes nowhere."""
        if self.clock.close_reader != self._give_way:
            return
        if self._guard is not None:
            self._guard.recorder.take_up()  # the last steps
        self.clock.close_reader = self.clock.after_step = self.clock.values = None
        if self.clock.is_marked:
            PACE.leave()
            self.clock.is_marked = False
        while self._undo:
            self._undo.pop()()
        self._window.close()
        if self._loggers is not None:
            self._loggers.close()
        if self._guard is not None and self._writer.look in self._guard.before_look:
            self._guard.before_look.remove(self._writer.look)
            self._guard.on_finding.remove(self._found)
        self._writer.close()


def open_profile(
    folder: Path,
    guard: Guard | None,
    environ: Mapping[str, str] = os.environ,
    *,
    rank: int = 0,
    world_size: int = 1,
    command: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    data: str = "",
    begins_after: int = 0,
    **about: Any,
) -> Profile:
    """The record of this rank in `folder`, which begins with its facts.

    guard: of this process, whose thread writes then. command, config, data: see `run_facts`. begins_after: the step
    that the program goes on from. about: `device` and `flops_per_token` of `RunWriter`.
    Raises: ConfigError where LOCKSTEP_PROFILE is no window.
    """
    window = Window(read_window(environ.get(PROFILE, "")), folder, rank)
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
    profile = Profile(writer, window, guard)
    if guard is not None and begins_after:
        guard.begin_after(begins_after)
    launched = environ.get(RUN, "")
    if rank == 0 and launched:
        _point_to(folder, Path(launched))
    profile.note("facts", **run_facts(environ, command or sys.argv, config=config, data=data))
    writer.look()  # whoever is killed before the first step has left this much
    return profile


def _point_to(folder: Path, launched: Path) -> None:
    """Let who looks at the folder that the launcher has named find this record."""
    path = launched / LAUNCH
    if path.is_file() and launched.resolve() != folder.resolve():
        line = {"record": str(folder.resolve()), "time_ns": time.time_ns()}
        with contextlib.suppress(OSError), path.open("a") as file:  # the run goes on
            file.write(json.dumps(line) + "\n")


def follow_program(guard: Guard, environ: Mapping[str, str], command: Sequence[str]) -> Profile | None:
    """The record of a program that is not ours, where the launcher has named a folder for it."""
    folder = environ.get(RUN, "")
    if not folder:
        return None
    profile = open_profile(Path(folder), guard, environ, command=command, rank=guard.rank, world_size=guard.world_size)
    profile.follow_torch(guard)
    names = logger_names(environ.get(LOG, "")) if guard.rank == 0 else ()
    if names:  # opened by the first number: their imports take seconds
        profile.open_loggers = partial(open_loggers, names, Path(folder), {"command": list(command)})
    atexit.register(profile.end)
    return profile
