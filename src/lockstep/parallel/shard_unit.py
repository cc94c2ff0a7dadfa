"""One call of fully_shard: modules whose parameters are gathered together, and what happens around their forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.parallel.outputs import move_tensors, output_tensors
from lockstep.parallel.shard_gradients import ShardGradients
from lockstep.parallel.shard_group import ShardGroup, ShardState
from lockstep.parallel.shard_mesh import ShardMesh
from lockstep.parallel.shard_pass import ShardOp
from lockstep.parallel.shard_policies import MixedPrecisionPolicy, cast_floats

if TYPE_CHECKING:
    from lockstep.parallel.shard_context import ShardContext


@final
class ShardUnit:
    """Modules that are made whole before their forward and backward, and sharded again after."""

    def __init__(
        self,
        modules: Sequence[Module],
        groups: Sequence[ShardGroup],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.modules = tuple(modules)
        self.mesh = mesh
        self.policy = policy
        self.groups = list(groups)
        self.gradients = [ShardGradients(group, policy.reduce_dtype) for group in groups]
        self.first_index = 0  # of `groups` among all groups of the context
        self.reshard_after_forward = reshard_after_forward  # None: unless it is the root
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.made_by_hand = False  # whole since `unshard()`, for the next forward
        self.forward_prefetch: list[ShardUnit] = []
        self.backward_prefetch: list[ShardUnit] = []
        self.context: ShardContext | None = None
        self._ran: set[int] = set()  # modules of this unit that ran in the current forward
        self._hooked: set[int] = set()  # wholes that tell of their gradients
        self._reshard_for_state_dicts()

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the whole parameters are given back between forward and backward."""
        if self.reshard_after_forward is None:
            return self.context is None or self.context.root is not self
        return self.reshard_after_forward

    def _reshard_for_state_dicts(self) -> None:
        """State dicts hold shards, also right after a forward that left the parameters whole."""
        this: weakref.ref[ShardUnit] = weakref.ref(self)

        def reshard(*_: object) -> None:
            unit = this()
            if unit is not None and (unit.context is None or not unit.context.is_running):
                unit.reshard()

        owners = {id(module): module for group in self.groups for owned in group.owners for module, _ in owned}
        for module in owners.values():
            module.register_state_dict_pre_hook(reshard)
            module._register_load_state_dict_pre_hook(reshard)

    # ------------------------------------------------------------------ around a forward

    def run(self, context: ShardContext, call: Callable[..., Any], module: Module, args: Any, kwargs: Any) -> Any:
        """`call(*args, **kwargs)`, the forward of `module`, with whole parameters."""
        is_outermost = context.enter_forward(self)
        try:
            if is_outermost and self.mesh.device.type != "cpu":
                args, kwargs = move_tensors(args, self.mesh.device), move_tensors(kwargs, self.mesh.device)
            if self.policy.cast_forward_inputs:
                args, kwargs = (cast_floats(part, self.policy.param_dtype) for part in (args, kwargs))
            context.make_whole(self)
            output = self._after(context, module, call(*args, **kwargs))
        except BaseException:
            if is_outermost:
                context.forward_raised()
            raise
        if is_outermost:
            context.leave_forward()
        return cast_floats(output, self.policy.output_dtype)

    def _after(self, context: ShardContext, module: Module, output: Any) -> Any:
        if context.in_backward:  # an activation checkpoint runs its forward again: backward decides when it is over
            return output
        if torch.is_grad_enabled():
            this: weakref.ref[ShardUnit] = weakref.ref(self)
            for tensor in output_tensors(output):
                tensor.register_hook(lambda grad: _pre_backward(this, grad))
        self._ran.add(id(module))
        if self.reshards_after_forward and len(self._ran) == len(self.modules):
            self._ran.clear()
            self.reshard()
        return output

    def forward_ended(self, keep: bool) -> None:
        """The outermost forward has ended; `keep` what a backward is going to use."""
        self._ran.clear()
        if self.reshards_after_forward or not keep:
            self.reshard()

    # ------------------------------------------------------------------ parameters

    def ops(self) -> list[tuple[ShardGroup, ShardOp]]:
        """The groups that have to be gathered by all ranks together, with the operation."""
        return [
            (group, ShardOp("gather", self.first_index + number))
            for number, group in enumerate(self.groups)
            if group.unsharded is not None and group.unsharded.needs_gather
        ]

    def finish(self) -> None:
        """Let the modules have the whole parameters, and their gradients tell when they come."""
        for number, group in enumerate(self.groups):
            group.finish()
            for index, whole in enumerate(group.wholes):
                if whole.requires_grad and id(whole) not in self._hooked:
                    self._hooked.add(id(whole))
                    whole.register_post_accumulate_grad_hook(_Arrival(self, number, index))

    def reshard(self) -> None:
        """Let the modules have the shards."""
        for group in self.groups:
            group.reshard()

    @property
    def is_whole(self) -> bool:
        """Whether the modules have the whole parameters."""
        return all(group.state is ShardState.UNSHARDED for group in self.groups)


@final
class _Arrival:
    """Called by autograd when a gradient has been accumulated; the unit may be gone by then."""

    def __init__(self, unit: ShardUnit, number: int, index: int) -> None:
        self._unit = weakref.ref(unit)
        self._number = number
        self._index = index

    def __call__(self, _: Tensor) -> None:
        unit = self._unit()
        if unit is not None and unit.context is not None:
            unit.context.on_grad(unit, self._number, self._index)


def _pre_backward(unit: weakref.ref[ShardUnit], grad: Tensor) -> Tensor:
    target = unit()
    if target is not None and target.context is not None:
        target.context.pre_backward(target)
    return grad
