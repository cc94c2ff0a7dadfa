"""All units under one root: the passes they go through together, and who is whole at which time."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.autograd import Variable
from torch.nn import Module, Parameter

from lockstep.comm import torch_names
from lockstep.errors import CollectiveTimeout, CommError, PeerFailed, PeerLost, ShardingError
from lockstep.parallel.buffer_pool import BufferPool
from lockstep.parallel.shard_gradients import ShardGradients
from lockstep.parallel.shard_group import ShardGroup, ShardState, slot_of
from lockstep.parallel.shard_pass import Outcome, PassKind, ShardOp, ShardPass
from lockstep.parallel.shard_unit import ShardUnit

_UNIT = "_lockstep_unit"  # in a module's own dict: module and unit are one cycle, and go together


def unit_of(module: Module) -> ShardUnit | None:
    """The unit that fully_shard made of `module`, if it did."""
    unit = vars(module).get(_UNIT)
    return unit if unit is not None and module in unit.modules else None


def register_unit(unit: ShardUnit) -> None:
    """Make `unit` known as that of its modules."""
    for module in unit.modules:
        vars(module)[_UNIT] = unit


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
        sizes = [len(group.params) for group in self.groups]
        *self._starts, self._num_params = itertools.accumulate(sizes, initial=0)  # of each group among all parameters
        self._unit_numbers = [number for number, unit in enumerate(units) for _ in unit.groups]  # of each group
        self.counts = True  # False on a rank that has run out of inputs: its gradients are zeros
        self.flights = 1  # reductions that may be under way at once
        self._in_flight: list[ShardGradients] = []
        self._pool = BufferPool()
        self.sharing = True  # whether ranks of one host may have one copy of the whole parameters
        self._plans: dict[PassKind, tuple[ShardOp, ...]] = {}
        self._forward: ShardPass | None = None
        self._backward: ShardPass | None = None
        self._callback: weakref.ref[Any] = weakref.ref(type(self))
        self._is_cut_off = False  # this rank knows that other ranks are gone

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
            if unit.context is not None:
                unit.context._refuse_if_running()
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

    def enter_forward(self, unit: ShardUnit) -> bool:
        """Begin a forward unless one is under way; whether `unit` is the outermost of it."""
        if self._forward is not None or self._backward is not None:
            if self._backward is None or self._callback() is not None:
                return False
            self._backward_died()
        self._place()
        kind = PassKind.FORWARD if torch.is_grad_enabled() else PassKind.EVALUATION
        self._forward = self._begin(kind)
        try:
            if any(
                group.is_shared for group in self.groups
            ):  # not before all have changed their pieces of what all see
                self._forward.meet()
            self._publish(self.groups)
        except BaseException:
            self._forward = None
            raise
        self._keep_parts(kind is PassKind.FORWARD)
        return True

    def _keep_parts(self, of_this_pass: bool) -> None:
        for unit in self.units:
            for group in unit.groups:
                if group.kept_part is not None:
                    group.kept_part.keeps = of_this_pass and unit.parts is not None

    def _place(self) -> None:
        """Parameters may have changed since the last pass: what is whole is gathered again, unless made so by hand."""
        for unit in self.units:
            if not unit.made_by_hand:
                unit.forget_parts()
            unit.check()
            for group in unit.groups:
                group.place(self.sharing, unit.parts)
                if not unit.made_by_hand:
                    group.reshard()
            unit.made_by_hand = False

    def _publish(self, groups: list[ShardGroup]) -> None:
        if any(group.is_copied for group in groups):
            for group in groups:
                group.publish()
            self.comm.barrier(label="shard.written")

    def make_whole(self, unit: ShardUnit) -> None:
        """Return when the modules of `unit` have whole parameters; begin to gather what comes after them.

        Before a forward, and before a forward that is run again in backward.
        """
        current = self._backward or self._forward
        assert current is not None
        with self._noting_losses():
            for group, op in unit.ops():
                if group.state is not ShardState.UNSHARDED:
                    current.need(op)
            unit.finish()
            self._gather_ahead(current, unit)

    def _gather_ahead(self, current: ShardPass, unit: ShardUnit) -> None:
        if self._backward is not None:
            depth = len(unit.backward_prefetch) or int(unit.prefetches_in_backward)
        else:
            depth = len(unit.forward_prefetch) or 1
        gathered = (group for group in self.groups if group.unsharded is not None and group.unsharded.needs_gather)
        for _ in range(depth - sum(group.state is ShardState.GATHERING for group in gathered)):
            following = current.following
            if following is None or following.verb != "gather":
                break
            if self.groups[following.group].state is not ShardState.SHARDED:
                break  # in use: it will be needed again only after it has been given back
            current.run_ahead()

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
            if not self._is_cut_off:
                self._end_forward(current, failed=True)
        except CommError:  # nobody can be told any more, and what raised first says why
            self._is_cut_off = True
        if self._is_cut_off:
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
        current = self._begin(kind, self._num_params)
        self._used = [0] * self._num_params
        self._keep_parts(False)

        def finish() -> None:
            self._leave_backward(current)

        context: weakref.ref[ShardContext] = weakref.ref(self)
        # autograd lets go of the callback without calling it when a hook or a function of the graph raised
        self._callback = weakref.ref(finish, lambda _: _backward_ended(context, current))
        self._backward = current
        Variable._execution_engine.queue_callback(finish)  # type: ignore[attr-defined]

    def on_grad(self, unit: ShardUnit, number: int, index: int) -> None:
        """Autograd has accumulated a gradient of a whole parameter."""
        self._enter_backward()
        gradients = unit.gradients[number]
        is_complete = gradients.arrive(index, self.counts)
        self._make_room(gradients)
        if is_complete:
            unit.complete.append(unit.first_index + number)
            if not unit.open_forwards:
                self._unit_ready(unit)

    def _make_room(self, gradients: ShardGradients) -> None:
        """Let gradients go where they are reduced from, as soon as many have come and no reduction has the buffer."""
        if self._in_flight and self._in_flight[0].may_finish(in_need=gradients.many_wait):
            self._finish_oldest()
        if gradients.many_wait and len(self._in_flight) < self.flights:
            gradients.lay_waiting(self._pool)

    def _unit_ready(self, unit: ShardUnit) -> None:
        """Backward is through with what is complete of `unit`: give the parameters back, then reduce."""
        if unit.reshard_after_backward:
            unit.reshard_complete()
        while unit.complete:
            self._group_ready(unit.complete.pop(0))

    def _group_ready(self, place: int) -> None:
        assert self._backward is not None
        if self.gradients[place].settings.sync:
            with self._noting_losses():
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
            outcome = current.end(self._used)
            self._plans[current.kind] = outcome.plan
            self._finish_reductions()
        finally:
            self._backward = None
        if outcome.failed:
            self._abandon()
        self._check_peers(outcome, "backward")
        self._hand_out(outcome.used)
        self._reshard_after_backward()

    def _hand_out(self, used: list[int]) -> None:
        """Let all parameters have their gradients; then call the hooks, of which one may step and clear many."""
        handed: list[Parameter] = []
        for gradients, start in zip(self.gradients, self._starts, strict=True):
            handed += gradients.hand_out(used[start : start + len(gradients.group.params)])
        for param in handed:
            for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(param)

    def _reshard_after_backward(self) -> None:
        for unit in self.units:
            unit.complete.clear()
            unit.forget_parts()
            if unit.reshard_after_backward and self._forward is None:  # a forward may take gradients inside
                unit.reshard()

    def _backward_died(self) -> None:
        """This rank's backward raised. The others wait in it: give them what they wait for, and tell them."""
        current, self._backward = self._backward, None
        if current is None:
            return
        try:
            if not self._is_cut_off:
                self._plans[current.kind] = current.end(self._used, failed=True).plan
                self._finish_reductions()
        finally:
            self._abandon()

    def _finish_oldest(self) -> None:
        gradients = self._in_flight[0]
        with self._noting_losses():
            gradients.wait_for_oldest(self._pool)  # raised out of here, it is still what the other ranks wait for
        del self._in_flight[0]
        gradients.take_oldest()

    @contextlib.contextmanager
    def _noting_losses(self) -> Iterator[None]:
        """A rank that has heard of others that are gone starts nothing more: it would wait for them again."""
        try:
            yield
        except (CollectiveTimeout, PeerLost):
            self._is_cut_off = True
            raise

    def _finish_reductions(self) -> None:
        while self._in_flight:
            self._finish_oldest()
        self._pool.trim()

    def _abandon(self) -> None:
        self._in_flight.clear()
        for gradients in self.gradients:
            gradients.discard()
        for unit in self.units:
            unit.complete.clear()
            unit.forget_parts()
            unit.reshard()

    # ------------------------------------------------------------------ operations

    def _begin(self, kind: PassKind, width: int = 0) -> ShardPass:
        plan = self._plans.get(kind, ())
        early = self.root.gathers_early
        return ShardPass(self._control, kind, plan, self._run, self._give_back, self._unit_numbers, width, early)

    def _give_back(self, op: ShardOp) -> None:
        group = self.groups[op.group]
        if group.state is ShardState.GATHERING:
            group.reshard()

    def _run(self, current: ShardPass, op: ShardOp, keep: bool) -> bool:
        if op.verb == "gather":
            group = self.groups[op.group]
            was_sharded = group.state is ShardState.SHARDED
            for_others = group.launch()
            current.begun()
            for_others.wait()
            if was_sharded and not keep:
                group.reshard()
            return was_sharded and keep
        gradients = self.gradients[op.group]
        for index, used in enumerate(gradients.used, self._starts[op.group]):
            self._used[index] |= used
        while len(self._in_flight) >= self.flights:
            self._finish_oldest()
        gradients.launch(self._pool)
        self._in_flight.append(gradients)
        return keep

    def _check_peers(self, outcome: Outcome, where: str) -> None:
        if outcome.failed:
            ranks = ", ".join(str(rank) for rank in outcome.failed)
            raise PeerFailed(
                f"rank {self.comm.rank}: rank {ranks} raised in the middle of this {where} pass, see its own output "
                "for the reason. The step has no gradients on any rank (.grad is None). If the program goes on, all "
                "ranks must skip this step; the next one starts afresh."
            )

    def _refuse_if_running(self) -> None:
        if self.is_running:
            raise ShardingError(
                f"rank {self.comm.rank}: a forward or backward of a sharded module is under way, so it cannot become "
                "part of a larger one"
            )

    def make_whole_now(self, unit: ShardUnit) -> None:
        """Gather the parameters of `unit` outside of any pass.  Collective: every rank of the root's mesh."""
        unit.forget_parts()
        unit.check()
        for group in unit.groups:
            group.place(self.sharing, unit.parts)
        if any(group.is_shared for group in unit.groups):
            self.comm.barrier(label="shard.read")
        self._publish(unit.groups)
        for group in unit.groups:
            group.launch().wait()
        unit.made_by_hand = True

    def reset(self) -> None:
        """Forget a forward or backward that did not end."""
        if self._forward is not None:
            self.forward_raised()
        if self._backward is not None:
            self._backward_died()
        self._abandon()


def _backward_ended(context: weakref.ref[ShardContext], current: ShardPass) -> None:
    target = context()
    if target is not None and target._backward is current:
        with torch.no_grad(), contextlib.suppress(CommError):  # what autograd raises says why
            target._backward_died()


def _name(root: Module, units: list[ShardUnit]) -> None:
    """Parameters are called by their names in the root from now on."""
    groups = {id(group) for unit in units for group in unit.groups}
    for fqn, param in root.named_parameters():
        slot = slot_of(param)
        if slot is not None and id(slot.group) in groups:
            slot.group.fqns[slot.index] = fqn
