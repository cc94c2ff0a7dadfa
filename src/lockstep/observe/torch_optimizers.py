"""Every step of every optimizer of this process, seen in one place: its time, what it applies, what ends with it.

Whoever wants to know of them attaches `OPTIMIZERS`. One hook before and one after a step are for all, as in
`torch_backward`. No torch is imported here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.native import in_c, read_in_c
from lockstep.observe.pace import PACE
from lockstep.observe.patches import SharedPatches
from lockstep.observe.profile.phases import FORWARD, OPTIMIZER, OTHER
from lockstep.observe.torch_backward import BACKWARDS, Loss
from lockstep.observe.torch_batches import Timed
from lockstep.observe.torch_import import when_imported

if TYPE_CHECKING:
    from lockstep.observe.step_ends import Started
    from lockstep.observe.torch_gradients import GradientFacts
    from lockstep.observe.torch_steps import TorchSteps

_nothing = memoryview(b"").__exit__  # of C: takes three arguments, and does no more

# step; of its backwards: losses, and gradients of probes before averaging; on a device also these as they are applied
Seen = tuple[int, list[Loss], list[Any], list[Any]]


def params_of(optimizer: Any) -> list[Any]:
    """What `optimizer` trains, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


@final
@read_in_c
class Optimizers(SharedPatches):
    """Those of one process. An optimizer whose step calls that of its parent class steps once: when that has ended."""

    __slots__ = ("_begun", "_is_unseen", "_marked", "backwards", "counted", "looks", "phases", "steps")

    def _end(self) -> None:
        self.backwards = BACKWARDS
        self.phases: Timed | None = None
        self.looks: GradientFacts | None = None  # called where it is due, or a loss is not finite or not known
        self.steps: TorchSteps | None = None
        self.counted: Callable[[Any, bool], object] | None = None  # called when `steps` has counted: has a step ended?
        self._begun: dict[int, int] = {}  # by id of an optimizer that steps: the phase before
        self._marked: Callable[[], Any] = lambda: None  # the one that stepped last in a loop that ends its steps itself
        self._is_unseen = False  # no beginning of a step has been seen since steps were only counted
        PACE.reset()
        PACE.turned = lambda is_brief: None

    def _begin(self) -> None:
        self._patches.add(when_imported("torch.optim.optimizer", self._watch))

    def _watch(self) -> None:
        optimizers = sys.modules["torch.optim.optimizer"]
        before = optimizers.register_optimizer_step_pre_hook(self._begins)
        after = optimizers.register_optimizer_step_post_hook(self._ends)
        self._patches.add(before.remove, after.remove)

        def turned(is_brief: bool) -> None:
            self._is_unseen |= is_brief
            BACKWARDS.turned(is_brief, is_marked=self._is_marked())
            for handle, seeing in (before, _nothing if is_brief else self._begins), (after, self._passing(is_brief)):
                hooks = handle.hooks_dict_ref()
                if hooks is not None and handle.id in hooks:
                    hooks[handle.id] = seeing  # where it stands: another thread may go through them at this moment

        PACE.turned = turned

    def _passing(self, is_brief: bool) -> Callable[[Any, Any, Any], None]:
        """What is called after an optimizer's step from now on."""
        steps = self.steps
        if steps is None or not is_brief:
            return self._ends
        if self._is_marked():
            return _nothing
        leader, owner, until = steps.counter.leader, steps.guard.recorder.clock.owner, PACE.until
        listed = steps.groups.listed
        passed, count = steps.guard.passing([watched for _, watched in steps.groups.all()]), len(listed)

        def passes(optimizer: Any, args: Any, kwargs: Any) -> None:
            if leader() is not optimizer or get_ident() != owner or len(listed) != count:
                PACE.leave()
                self._ends(optimizer, args, kwargs)
                return
            site, BACKWARDS.step_site = BACKWARDS.step_site, ""
            step = passed(site, 0, 0)
            if not step:
                BACKWARDS.step_site = site
                PACE.turn(is_brief=False)
                self._ends(optimizer, args, kwargs)
            elif step + 1 >= until:
                steps.look_closely()

        return passes

    def _is_marked(self) -> bool:
        return self.steps is not None and self.steps.clock.is_marked

    @in_c
    def step_done(self) -> None:
        """A step has ended, which was looked at closely: our own loop says so."""
        optimizer, self._marked = self._marked(), lambda: None
        if self.counted is not None and optimizer is not None:
            self.counted(optimizer, True)
        if self.steps is not None:
            self.steps.plan()

    @in_c
    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._is_unseen = False
        phases, backwards = self.phases, BACKWARDS
        before = phases.clock.switch(OPTIMIZER) if phases is not None and phases.owner else OTHER
        self._begun.setdefault(id(optimizer), before)
        looks = self.looks
        if looks is not None:
            looks.seen.append((looks.recorder.step, backwards.recent, [*backwards.own], []))
            is_sound = backwards.is_sound
            backwards.recent, backwards.is_sound = [], None
            backwards.own.clear()
            if monotonic_ns() >= looks.due_ns or not is_sound:
                looks.look(optimizer)

    @in_c
    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self._begun.pop(id(optimizer), None)
        if before is None:
            if not self._is_unseen:  # its parent class's has, within this step
                PACE.look_at_many()
                return
            before = OTHER
        if self._is_marked():
            self._marked = weakref.ref(optimizer)
            return
        steps, has_ended = self.steps, False
        if steps is not None:
            counter, groups, guard = steps.counter, steps.groups, steps.guard
            started: list[Started] = []
            # what C++ has started belongs to the step that ends, and as a rule to the line of its backward
            site, BACKWARDS.step_site = BACKWARDS.step_site, ""
            for group in tuple(groups.listed) or [group for group, _ in groups.all()]:  # DDP's may outlive the list
                watched = groups.followed.get(id(group)) or groups.known(group)
                if watched is not None and not watched.inside:
                    number = group._get_sequence_number_for_group()
                    if number != watched.seen:
                        started.append((watched, number, site or call_site()))
            if counter.leads_alone and counter.leader() is optimizer and get_ident() == guard.recorder.clock.owner:
                guard.step_done(started)
                has_ended = True
            else:
                PACE.leave()
                has_ended = steps.stepped(optimizer, started)
        phases = self.phases
        if not has_ended and phases is not None and phases.owner:  # else what the thread does now begins with the step
            phases.clock.switch(phases.clock.rest if before in (FORWARD, OTHER) else before)
        if self.counted is not None:
            self.counted(optimizer, has_ended)
        if has_ended and steps is not None:
            steps.plan()


OPTIMIZERS = Optimizers()
