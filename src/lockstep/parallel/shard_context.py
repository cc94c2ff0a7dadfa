"""All units under one root, and the forward and backward that they go through together."""

from __future__ import annotations

import weakref
from typing import Any, final

import torch
from torch.nn import Module

from lockstep.comm import torch_names
from lockstep.errors import CommError, ShardingError
from lockstep.parallel.backward import step_is_lost, when_autograd_ends
from lockstep.parallel.shard_gradients import ShardGradients
from lockstep.parallel.shard_group import ShardGroup, ShardState
from lockstep.parallel.shard_pass import Outcome, PassKind, ShardOp, ShardPass
from lockstep.parallel.shard_reductions import Losses, ShardReductions
from lockstep.parallel.shard_unit import ShardUnit, unit_of
from lockstep.parallel.shard_wholes import ShardWholes


def context_of(unit: ShardUnit) -> ShardContext:
    """The context of `unit`; where it has none yet, it is the root of a new one."""
    return unit.context or ShardContext.over(unit)


@final
class ShardContext:
    """The units of a model, its root first, and the forward and backward that are under way.

    Collective: every rank of the root's mesh makes one, of the same units, and goes through the same passes.
    """

    def __init__(self, root: ShardUnit, units: list[ShardUnit]) -> None:
        self.root = root
        self.units = units
        self.comm = root.mesh.whole
        self._control = torch_names.on_host(self.comm)
        self.groups: list[ShardGroup] = []
        self.gradients: list[ShardGradients] = []
        for unit in units:
            unit.context = self
            unit.first_index = len(self.groups)
            self.groups += unit.groups
            self.gradients += unit.gradients
        self._unit_numbers = [number for number, unit in enumerate(units) for _ in unit.groups]  # of each group
        self.counts = True  # False on a rank that has run out of inputs: its gradients are zeros
        self._losses = Losses()
        self.wholes = ShardWholes(units, self.groups, self.comm)
        self.reductions = ShardReductions(self.gradients, self._losses)
        self._plans: dict[PassKind, tuple[ShardOp, ...]] = {}
        self._forward: ShardPass | None = None
        self._backward: ShardPass | None = None
        self._callback: weakref.ref[Any] = weakref.ref(type(self))

    @classmethod
    def over(cls, root: ShardUnit) -> ShardContext:
        """A context of `root` and all units in its modules. Earlier contexts of some of them end."""
        units = {id(root): root}
        for module in root.modules:
            for part in module.modules():
                unit = unit_of(part)
                if unit is not None:
                    units[id(unit)] = unit
        found = list(units.values())
        for unit in found:
            if unit.context is not None and unit.context.is_running:
                raise ShardingError(
                    f"rank {unit.mesh.whole.rank}: a forward or backward of a sharded module is under way, so it "
                    "cannot become part of a larger one"
                )
        for module in root.modules:
            _name(module, found)
        counts = all(unit.context.counts for unit in found if unit.context is not None)
        made = cls(root, found)
        made.counts = counts
        return made

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way."""
        return self._backward is not None

    @property
    def is_running(self) -> bool:
        """Whether a forward or backward is under way."""
        return self._forward is not None or self._backward is not None

    # ------------------------------------------------------------------ forward

    def enter_forward(self) -> bool:
        """Begin a forward unless one is under way; whether the unit that calls this is the outermost of it."""
        if self._forward is not None or self._backward is not None:
            if self._backward is None or self._callback() is not None:
                return False
            self._backward_died()
        self.wholes.place()
        kind = PassKind.FORWARD if torch.is_grad_enabled() else PassKind.EVALUATION
        self._forward = self._begin(kind)
        try:
            if any(group.is_shared for group in self.groups):  # all have changed their pieces of what all see
                self._forward.meet()
            self.wholes.publish(self.groups)
        except BaseException:
            self._forward = None
            raise
        self.wholes.keep_parts(kind is PassKind.FORWARD)
        return True

    def make_whole(self, unit: ShardUnit) -> None:
        """Return when the modules of `unit` have whole parameters; begin to gather what comes after them.

        Before a forward, and before a forward that is run again in backward.
        """
        current = self._backward or self._forward
        assert current is not None
        with self._losses:
            for group, op in unit.ops():
                if group.state is not ShardState.UNSHARDED:
                    current.need(op)
            unit.finish()
            if self._backward is not None:
                depth = len(unit.backward_prefetch) or int(unit.prefetches_in_backward)
            else:
                depth = len(unit.forward_prefetch) or 1
            self.wholes.gather_ahead(current, depth)

    def leave_forward(self) -> None:
        """The outermost forward has returned."""
        current, self._forward = self._forward, None
        assert current is not None
        self._end_forward(current, failed=False)

    def forward_raised(self) -> None:
        """The outermost forward has raised: give the other ranks what they still wait for, and tell them."""
        current, self._forward = self._forward, None
        if current is None:
            return
        try:
            if not self._losses.are_known:
                self._end_forward(current, failed=True)
        except CommError:  # nobody can be told any more, and what raised first says why
            self._losses.are_known = True
        if self._losses.are_known:
            self._abandon()

    def _end_forward(self, current: ShardPass, failed: bool) -> None:
        changed = [] if failed else [fqn for group in self.groups for fqn in group.changed_wholes()]
        outcome = current.end(failed=failed or bool(changed))
        self._plans[current.kind] = outcome.plan
        keep = torch.is_grad_enabled() and not outcome.failed
        for unit in self.units:
            unit.forward_ended(keep)
        if outcome.failed and current.kind is PassKind.FORWARD:
            self._abandon()
        if changed:
            raise ShardingError(
                f"rank {self.comm.rank}: {', '.join(changed)} changed in place while whole, and so on every rank, in "
                "the same memory. Change parameters between steps, when they are sharded"
            )
        if not failed:
            self._check_peers(outcome, "forward")

    # ------------------------------------------------------------------ backward

    def pre_backward(self, unit: ShardUnit) -> None:
        """The gradient of an output of `unit` has come: its parameters are needed again."""
        self._enter_backward()
        if unit.unshard_in_backward:
            self.make_whole(unit)

    def _enter_backward(self) -> None:
        if self._backward is not None:
            if self._callback() is not None:
                return
            self._backward_died()
        is_synced = any(gradients.settings.sync for gradients in self.gradients)
        kind = PassKind.BACKWARD if is_synced else PassKind.LOCAL_BACKWARD
        current = self._backward = self._begin(kind, self.reductions.num_params)
        self.reductions.begin()
        self.wholes.keep_parts(False)
        self._callback = when_autograd_ends(current, self._leave_backward, self._died)

    def on_grad(self, unit: ShardUnit, number: int, index: int) -> None:
        """Autograd has accumulated a gradient of a whole parameter."""
        self._enter_backward()
        gradients = unit.gradients[number]
        is_complete = gradients.arrive(index, self.counts)
        self.reductions.make_room(gradients)
        if is_complete:
            unit.complete.append(unit.first_index + number)
            if not unit.open_forwards:
                self._unit_ready(unit)

    def _unit_ready(self, unit: ShardUnit) -> None:
        """Backward is through with what is complete of `unit`: give the parameters back, then reduce."""
        if unit.reshard_after_backward:
            for place in unit.complete:
                self.groups[place].reshard()
        while unit.complete:
            self._group_ready(unit.complete.pop(0))

    def _group_ready(self, place: int) -> None:
        assert self._backward is not None
        if self.gradients[place].settings.sync:
            with self._losses:
                self._backward.need(ShardOp("reduce", place))
        else:
            self.gradients[place].forget_arrivals()

    def unit_through(self, unit: ShardUnit) -> None:
        """The gradients of a forward's inputs are there: backward has used the whole parameters for the last time."""
        if self._backward is not None and not unit.open_forwards:
            if unit.reshard_after_backward:
                unit.reshard()
            self._unit_ready(unit)

    def _leave_backward(self, current: ShardPass) -> None:
        """Autograd is through: reduce what is left, serve the others, hand the gradients out."""
        if self._backward is not current:
            return
        try:
            for unit in self.units:
                for number, gradients in enumerate(unit.gradients):
                    if gradients.is_due:
                        self._group_ready(unit.first_index + number)
                    gradients.forget_arrivals()
            outcome = current.end(self.reductions.used)
            self._plans[current.kind] = outcome.plan
            self.reductions.finish()
        except BaseException:
            self._abandon()  # else what has come of it would be in the next step
            raise
        finally:
            self._backward = None
        if outcome.failed:
            self._abandon()
        self._check_peers(outcome, "backward")
        self.reductions.hand_out(outcome.used)
        self.wholes.end_pass(failed=False, in_forward=self._forward is not None)

    def _died(self, current: ShardPass) -> None:
        if self._backward is current:
            self._backward_died()

    def _backward_died(self) -> None:
        """This rank's backward raised. The others wait in it: give them what they wait for, and tell them."""
        current, self._backward = self._backward, None
        if current is None:
            return
        try:
            if not self._losses.are_known:
                self._plans[current.kind] = current.end(self.reductions.used, failed=True).plan
                self.reductions.finish()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        self.reductions.discard()
        self.wholes.end_pass(failed=True)

    # ------------------------------------------------------------------ operations

    def _begin(self, kind: PassKind, width: int = 0) -> ShardPass:
        plan = self._plans.get(kind, ())
        early = self.root.gathers_early
        return ShardPass(self._control, kind, plan, self._run, self.wholes.give_back, self._unit_numbers, width, early)

    def _run(self, current: ShardPass, op: ShardOp, keep: bool) -> bool:
        if op.verb == "gather":
            return self.wholes.gather(current, self.groups[op.group], keep)
        self.reductions.launch(op.group)
        return keep

    def _check_peers(self, outcome: Outcome, where: str) -> None:
        if outcome.failed:
            raise step_is_lost(self.comm.rank, outcome.failed, where)

    def reset(self) -> None:
        """Forget a forward or backward that did not end."""
        if self._forward is not None:
            self.forward_raised()
        if self._backward is not None:
            self._backward_died()
        self._abandon()


def _name(root: Module, units: list[ShardUnit]) -> None:
    """Parameters are called by their names in the root from now on, also those that were replaced since the cut."""
    prefixes = {id(module): f"{name}." if name else "" for name, module in root.named_modules()}
    for group in [group for unit in units for group in unit.groups]:
        for index, ((module, name), *_) in enumerate(group.owners):
            if id(module) in prefixes:
                group.fqns[index] = prefixes[id(module)] + name
