"""The training checks for a program that is not ours: what stock DDP wraps, trains and averages, told as facts.

No collective of ours is sent: each rank tells digests in its status, and the guards compare them. Nothing is computed
that the program could notice. Everything here runs in the program's own thread, at the points where it calls torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from lockstep.observe.account import JOIN
from lockstep.observe.call_site import backward_site, call_site
from lockstep.observe.endings import CLOSED, END
from lockstep.observe.followed_model import Model
from lockstep.observe.guard import Guard
from lockstep.observe.native import in_c
from lockstep.observe.pace import PACE
from lockstep.observe.patches import Patches, around
from lockstep.observe.status import RUNNING
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_cuts import CutFacts
from lockstep.observe.torch_data import DataWatch
from lockstep.observe.torch_gradients import GradientFacts
from lockstep.observe.torch_groups import name_of
from lockstep.observe.torch_import import when_imported
from lockstep.observe.torch_models import ModelFacts
from lockstep.observe.torch_optimizers import OPTIMIZERS
from lockstep.observe.torch_replicas import ReplicaFacts
from lockstep.observe.torch_under_way import failure, give_up_if_failed
from lockstep.observe.wording import BEFORE, step_after

_MEET_S, _DISPUTE_S, _MET = 0.5, 2.0, "met"  # the last is told once a rank has seen all others at their end


def attach_training(guard: Guard) -> Callable[[], None]:
    """Let `guard` compare what the ranks train, from torch's import on; after `torch_watch.attach`. The result ends it.

    Raises: ConfigError where LOCKSTEP_REPLICA_EVERY is no number.
    """
    watch = TrainingWatch(guard, os.environ)
    watch.patches.add(
        when_imported("torch.serialization", watch.data.watch_saves),
        when_imported("safetensors.torch", watch.data.watch_safetensors),
        when_imported("torch._dynamo.trace_rules", _stay_out_of_graphs),
    )
    watch.models.watch()
    watch.replicas.watch()
    watch.data.watch_loaders()
    watch.cuts.watch()
    watch.watch_join()
    watch.patches.add(BACKWARDS.attach(), OPTIMIZERS.attach(), partial(atexit.unregister, watch.end))
    OPTIMIZERS.looks, OPTIMIZERS.counted = watch.gradients, watch.stepped
    BACKWARDS.failed = guard.saw
    watch.patches.insert(PACE.dues, watch.replicas.due_after)
    watch.patches.insert(guard.at_end, watch.finish)
    watch.patches.insert(guard.before_destroy, watch.groups_end)
    watch.patches.insert(guard.before_look, watch.gradients.forget)
    atexit.register(watch.end)
    watch.patches.undo_in_children()
    return watch.patches.undo


def _stay_out_of_graphs() -> None:
    """torch.compile is there: it shall take what watches for part of torch, and compile the model only."""
    rules = sys.modules["torch._dynamo.trace_rules"]
    getattr(rules, "add", lambda _: None)("lockstep.observe")


@final
class TrainingWatch:
    """Of one rank."""

    def __init__(self, guard: Guard, environ: Mapping[str, str]) -> None:
        self._guard = guard
        self._models: dict[int, Model] = {}
        self._step = 0
        self._pending: Callable[[], None] | None = None  # the check of the last step
        self._has_hurried = False  # to compare the first step whose gradients were not averaged
        self._is_over = False
        self.patches = Patches()
        self.replicas = ReplicaFacts(guard, self._models, environ, self.patches)
        self.replicas.before_load = self._compare_last
        self._stepper: Callable[[], Any] = lambda: None  # the optimizer that has stepped last
        self._stamped: set[int] = set()  # ids of the optimizers that have taken the step
        self.gradients = GradientFacts(guard, lambda optimizer: self.models.named(optimizer))
        self.models = ModelFacts(guard, self._models, self.patches)
        self.cuts = CutFacts(guard, self.patches)
        self.data = DataWatch(guard, self.models.team, self.patches)

    # ------------------------------------------------------------------ what is replaced

    def watch_join(self) -> None:
        """Within torch's Join, ranks may have different numbers of steps."""
        stack = contextlib.ExitStack()

        def enter(old: Callable[..., Any], join: Any) -> Any:
            stack.enter_context(self._guard.activity(JOIN))
            return old(join)

        def leave(old: Callable[..., Any], join: Any, *error: Any) -> Any:
            with stack:
                return old(join, *error)

        self.patches.replace_in("torch.distributed.algorithms.join", "Join", "__enter__", around(enter))
        self.patches.replace_in("torch.distributed.algorithms.join", "Join", "__exit__", around(leave))

    # ------------------------------------------------------------------ steps

    @in_c
    def stepped(self, optimizer: Any, has_ended: bool) -> None:
        """One of the program's optimizers has stepped, after which a step of the rank may have ended."""
        if not has_ended:
            self._count_on()
        step, key = self._guard.recorder.step, id(optimizer)
        if step != self._step:
            before, self._step, replicas = step - 1 if PACE.until else self._step, step, self.replicas
            if replicas.leader() is not optimizer:
                replicas.lead(optimizer)
            self._stepper = replicas.leader
            unseen: list[Model] = []
            for model in tuple(self._models.values()):
                if not (model.is_forwarded and model.forwards == model.told) and self.models.end_step(before, model):
                    unseen.append(model)
                model.forwards = [0, 0, ""]
                model.stamps = model.stamps[1], (step, model.version())
            self._pending = None
            if replicas.is_on and (step % replicas.stride == 0 or not replicas.checked or unseen):
                self._plan(unseen, before, step)
            self._stamped = {key}
            return
        self._stepper = weakref.ref(optimizer)
        if key not in self._stamped:  # one that goes on without the others has nothing to do with the ranks
            self._stamped.add(key)
            for model in tuple(self._models.values()):
                model.stamps = model.stamps[0], (step, model.version())

    def _plan(self, unseen: Sequence[Model], before: int, step: int) -> None:
        """Compare what the step after `before` has left, if it is due, or the first that went past `unseen` models."""
        new = [model for model in unseen if not model.past and self.replicas.is_trained_by_leader(model)]
        for model in new:
            model.past = f"in {step_after(before)} a backward went past DistributedDataParallel, at {backward_site[0]}"
        hurries = bool(new) and not self._has_hurried
        self._has_hurried |= hurries
        if hurries or step % self.replicas.stride == 0 or not self.replicas.checked:
            self._pending = self.replicas.plan(step)
            BACKWARDS.once.append(self._compare_pending)

    # ------------------------------------------------------------------ the end

    def end(self) -> None:
        """The program has come to its end, with its groups or without."""
        self.finish()
        give_up_if_failed(self._guard)

    def groups_end(self, group: Any) -> None:
        """The program destroys `group`, or all."""
        at = f"at {call_site()}, in {step_after(self._guard.recorder.step)}"
        if group is None:
            self._guard.facts.tell(BEFORE, "groups", f"it had called destroy_process_group {at}")
            self.finish()
            return
        ranks = sys.modules["torch.distributed.distributed_c10d"]._world.pg_group_ranks.get(group)
        if ranks is not None:
            name = name_of(group.group_name, is_default=False, ranks=tuple(ranks))
            self._guard.facts.tell(CLOSED, name, at)

    def _count_on(self) -> None:
        """Steps may have ended since that were not looked at closely."""
        if PACE.until:
            self._step = self._guard.recorder.step

    def _compare_pending(self) -> None:
        """Compare what a step has left, unless that was done."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def _compare_last(self) -> None:
        """Compare what the last step has left, whether it was due or not."""
        self._count_on()
        if self._pending is None and self._step and self.replicas.is_on and self.replicas.checked != self._step:
            self._pending = self.replicas.plan(self._step, is_last=True)
        self._compare_pending()

    def finish(self) -> None:
        """Compare once more, when the program is done. Waits for the other ranks a little, where they are as far."""
        if self._is_over or failure() is not None:
            return
        self._is_over = True
        self._count_on()
        self.data.finish()
        self.gradients.finish(self._stepper())
        if not self._models and not self._guard.recorder.started:
            return
        for model in tuple(self._models.values()):  # loaded, cast or trained further by one rank: to test it, say
            model.is_another = not model.is_as_left(self._step)
            model.is_later = len(self._stamped) > 1 and not self.replicas.is_trained_by_leader(model)
        self._compare_last()
        facts = self._guard.facts
        facts.tell(END, END, self._step)
        deadline = time.monotonic() + _MEET_S
        latest = time.monotonic() + _DISPUTE_S
        while (found := self._guard.look_now()) is None or not found.is_certain:
            ends = [one.status.facts.get(END, {}) for one in facts.sights.values() if one.status.state == RUNNING]
            have_met = len(facts.sights) == self._guard.world_size and all(ends)
            if have_met:  # what differs is shown with that, by each rank its own
                facts.tell(END, _MET, self._step)
            is_done = have_met and (not facts.is_disputed or all(_MET in one for one in ends))
            if is_done or time.monotonic() > (latest if facts.is_disputed else deadline):
                return
            time.sleep(0.01)
