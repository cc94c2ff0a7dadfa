"""Every step of every optimizer of this process, seen in one place: its time, what it applies, what ends with it.

Whoever wants to know of them attaches `OPTIMIZERS`. One hook before and one after a step are for all, as in
`torch_backward`. No torch is imported here.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any, Protocol, final

from lockstep.observe.flight import FlightRecorder
from lockstep.observe.patches import SharedPatches
from lockstep.observe.profile.step_clock import FORWARD, MARKS, OPTIMIZER, OTHER
from lockstep.observe.torch_backward import BACKWARDS, Loss
from lockstep.observe.torch_batches import Timed
from lockstep.observe.torch_import import when_imported

Seen = tuple[int, list[Loss], list[Any]]  # step; of its backwards: losses, and gradients of probes before averaging


class Looks(Protocol):
    """Who looks at what optimizers apply."""

    recorder: FlightRecorder
    seen: deque[Seen]  # of each step of an optimizer
    due_ns: float  # from then on `look` is called before each, by time.monotonic_ns; else where a loss is not known

    def look(self, optimizer: Any) -> None: ...


@final
class Optimizers(SharedPatches):
    """Those of one process. An optimizer whose step calls that of its parent class steps once: when that has ended."""

    def _end(self) -> None:
        self.phases: Timed | None = None
        self.looks: Looks | None = None
        self.counts: Callable[[Any], bool] | None = None  # called after a step: whether a step of the rank has ended
        self.counted: Callable[[Any], object] | None = None  # called after that
        self._begun: dict[int, int] = {}  # by id of an optimizer that steps: the phase before

    def _begin(self) -> None:
        self._patches.add(when_imported("torch.optim.optimizer", self._watch))

    def _watch(self) -> None:
        optimizers = sys.modules["torch.optim.optimizer"]
        self._patches.add(optimizers.register_optimizer_step_pre_hook(self._begins).remove)
        self._patches.add(optimizers.register_optimizer_step_post_hook(self._ends).remove)

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        now_ns, before, phases, backwards = monotonic_ns(), OTHER, self.phases, BACKWARDS
        if phases is not None and get_ident() == phases.owner:
            marks = phases.clock.marks
            before = marks[-1][0]
            marks.append((OPTIMIZER, now_ns))
        self._begun.setdefault(id(optimizer), before)
        looks = self.looks
        if looks is not None:
            looks.seen.append((looks.recorder.step, backwards.recent, backwards.own))
            is_sound = backwards.is_sound
            backwards.recent, backwards.own, backwards.is_sound = [], [], None
            if now_ns >= looks.due_ns or not is_sound:
                looks.look(optimizer)

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self._begun.pop(id(optimizer), None)
        if before is None:  # its parent class's has, within this step
            return
        if self.counts is None or not self.counts(optimizer):  # else what the thread does now begins with the step
            phases = self.phases
            if phases is not None and get_ident() == phases.owner:
                clock, now_ns, marks = phases.clock, monotonic_ns(), phases.clock.marks
                marks.append((clock.rest if before in (FORWARD, OTHER) else before, now_ns))
                if len(marks) >= MARKS:
                    clock.sum_up(now_ns)
        if self.counted is not None:
            self.counted(optimizer)


OPTIMIZERS = Optimizers()
