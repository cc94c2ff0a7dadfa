"""One call of fully_shard: modules whose parameters are gathered together, and what happens around their forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree

from lockstep.errors import ShardingError
from lockstep.parallel.eager import compile_only_the_module
from lockstep.parallel.outputs import cast_floats, move_tensors, output_tensors
from lockstep.parallel.shard_gradients import ShardGradients
from lockstep.parallel.shard_group import ShardGroup
from lockstep.parallel.shard_mesh import ShardMesh
from lockstep.parallel.shard_pass import ShardOp
from lockstep.parallel.torch_fsdp import MixedPrecisionPolicy

if TYPE_CHECKING:
    from lockstep.parallel.shard_context import ShardContext


_TELLS = "_lockstep_tells"  # on a whole parameter whose gradients are announced
_UNIT = "_lockstep_unit"  # in a module's own dict: module and unit are one cycle, and go together


def unit_of(module: Module) -> ShardUnit | None:
    """The unit that fully_shard made of `module`, if it did."""
    unit = vars(module).get(_UNIT)
    return unit if unit is not None and module in unit.modules else None


def register_unit(unit: ShardUnit) -> None:
    """Make `unit` known as that of its modules."""
    for module in unit.modules:
        vars(module)[_UNIT] = unit


@final
class ShardUnit:
    """Modules that are made whole before their forward and backward, and sharded again after."""

    def __init__(
        self,
        modules: Sequence[Module],
        managed: Sequence[Module],
        groups: Sequence[ShardGroup],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = tuple(modules)
        self._managed = tuple(managed)  # `modules` and what is in them, without other units
        self.mesh = mesh
        self.policy = policy
        self.groups = list(groups)
        self.gradients = [ShardGradients(group, policy.reduce_dtype) for group in groups]
        self.first_index = 0  # of `groups` among all groups of the context
        # True, False, or on how many neighbours the whole parameters stay; None: unless it is the root
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.made_by_hand = False  # whole since `unshard()`, for the next forward
        self.forward_prefetch: list[ShardUnit] = []
        self.backward_prefetch: list[ShardUnit] = []
        self.prefetches_in_backward = True  # False: less memory, and waiting for each gather
        self.gathers_early = True  # as the root: gathers of backward stand before the reduction that they follow
        self.context: ShardContext | None = None
        self._ran: set[int] = set()  # modules of this unit that ran in the current forward
        # Forwards whose backward will tell when it is through with the parameters; a dropped graph drops its own
        self.open_forwards: weakref.WeakSet[_OpenForward] = weakref.WeakSet()
        self.complete: list[int] = []  # groups, by their place in the context, whose gradients are all here
        self._parameters = _count_parameters(self._managed)
        self._attach_to_state_dicts()
        compile_only_the_module(ShardUnit, ("run",), ("_enter", "_before", "_after", "_raised", "_leave"))

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the whole parameters are given back between forward and backward."""
        if self.reshard_after_forward is None:
            return self.context is None or self.context.root is not self
        return bool(self.reshard_after_forward)

    @property
    def parts(self) -> int | None:
        """On how many neighbours the whole parameters stay, in parts, between forward and backward."""
        return None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward

    def check(self) -> None:
        """Raises: ShardingError where parameters are not what they were when they were sharded."""
        for group in self.groups:
            group.check()
        if _count_parameters(self._managed) != self._parameters:
            raise ShardingError(
                f"rank {self.mesh.whole.rank}: the parameters of a unit are not those that were sharded; new, or "
                f"ignored till now: {', '.join(self._strangers()) or 'none'}. Add parameters before fully_shard"
            )

    def _strangers(self) -> list[str]:
        """Names of parameters that are in the modules of this unit, and not sharded with it."""
        roots = self.modules if self.context is None else self.context.root.modules
        names = {id(part): name for root in roots for name, part in root.named_modules()}
        owners = [owner for group in self.groups for owners in group.owners for owner in owners]
        known = {(id(module), name) for module, name in owners}
        return [
            f"{names.get(id(module), '?')}.{name}".lstrip(".")
            for module in self._managed
            for name, param in module._parameters.items()
            if param is not None and (id(module), name) not in known
        ]

    def _attach_to_state_dicts(self) -> None:
        """State dicts hold shards, also right after a forward that left the parameters whole; dtypes stay."""
        this: weakref.ref[ShardUnit] = weakref.ref(self)

        def reshard(*_: object) -> None:
            unit = this()
            if unit is not None and (unit.context is None or not unit.context.is_running):
                unit.reshard()

        def check(module: Module, _: object) -> None:
            unit = this()
            for group in unit.groups if unit is not None else ():
                group.check_loaded(module)

        owners = {id(module): module for group in self.groups for owned in group.owners for module, _ in owned}
        for module in owners.values():
            module.register_state_dict_pre_hook(reshard)
            module._register_load_state_dict_pre_hook(reshard)
            module.register_load_state_dict_post_hook(check)

    # ------------------------------------------------------------------ around a forward

    def run(self, context: ShardContext, call: Callable[..., Any], module: Module, args: Any, kwargs: Any) -> Any:
        """`call(*args, **kwargs)`, the forward of `module`, with whole parameters."""
        is_outermost = self._enter(context)
        try:
            args, kwargs = self._before(context, is_outermost, args, kwargs)
            output = self._after(context, module, call(*args, **kwargs))
        except BaseException:
            self._raised(context, is_outermost)
            raise
        return self._leave(context, is_outermost, output)

    def _enter(self, context: ShardContext) -> bool:
        return context.enter_forward()

    def _before(self, context: ShardContext, is_outermost: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if is_outermost and self.mesh.device.type != "cpu":
            args, kwargs = move_tensors(args, self.mesh.device), move_tensors(kwargs, self.mesh.device)
        if self.policy.cast_forward_inputs:
            args, kwargs = (cast_floats(part, self.policy.param_dtype) for part in (args, kwargs))
        context.make_whole(self)
        if torch.is_grad_enabled() and not context.in_backward and self.ops():
            args, kwargs = self._tell_when_through(args, kwargs)
        return args, kwargs

    def _tell_when_through(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Where parameters are gathered: let the inputs tell when backward has come through this unit."""
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not places:
            return args, kwargs
        opened = _OpenForward()
        self.open_forwards.add(opened)
        passed = _Through.apply(weakref.ref(self), opened, *[leaves[i] for i in places])
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
        return _pytree.tree_unflatten(leaves, structure)

    def _raised(self, context: ShardContext, is_outermost: bool) -> None:
        if is_outermost:
            context.forward_raised()

    def _leave(self, context: ShardContext, is_outermost: bool, output: Any) -> Any:
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
            self.reshard(shows_part=True)
        return output

    def forward_ended(self, keep: bool) -> None:
        """The outermost forward has ended; `keep` what a backward is going to use."""
        self._ran.clear()
        if not keep:
            self.forget_parts()
        if self.reshards_after_forward or not keep:
            self.reshard(shows_part=True)

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
                if whole.requires_grad and not hasattr(whole, _TELLS):
                    setattr(whole, _TELLS, True)
                    whole.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self), number, index))

    def reshard(self, shows_part: bool = False) -> None:
        """Let the modules have the shards, or the parts of the whole parameters that stay until backward."""
        for group in self.groups:
            group.reshard(shows_part)

    def forget_parts(self) -> None:
        """Keep nothing of whole parameters that were given back. All ranks at the same point."""
        for group in self.groups:
            group.forget_part()


def _count_parameters(modules: Sequence[Module]) -> int:
    return sum(param is not None for module in modules for param in module._parameters.values())


@final
class _OpenForward:
    """Stands for one forward, as long as its graph lives and no backward has come through it."""


class _Through(torch.autograd.Function):
    """The inputs of a unit, unchanged; in backward the last of it."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, unit: weakref.ref[ShardUnit], opened: _OpenForward, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.unit, ctx.opened = unit, opened
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        unit = ctx.unit()
        if unit is not None and unit.context is not None:
            unit.open_forwards.discard(ctx.opened)
            unit.context.unit_through(unit)
        if torch.is_grad_enabled():  # these gradients may be differentiated in turn, with the whole parameters again
            for grad in grads:
                if isinstance(grad, Tensor) and grad.requires_grad:
                    grad.register_hook(lambda again, unit=ctx.unit: _pre_backward(unit, again))
        return (None, None, *grads)


def _arrived(unit: weakref.ref[ShardUnit], number: int, index: int, _: Tensor) -> None:
    """Called by autograd when a gradient has been accumulated; the unit may be gone by then."""
    target = unit()
    if target is not None and target.context is not None:
        target.context.on_grad(target, number, index)


def _pre_backward(unit: weakref.ref[ShardUnit], grad: Tensor) -> Tensor:
    target = unit()
    if target is not None and target.context is not None:
        target.context.pre_backward(target)
    return grad
