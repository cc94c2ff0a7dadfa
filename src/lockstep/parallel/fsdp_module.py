"""What a sharded module can do besides what it could before: the methods of torch's FSDPModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module

from lockstep.errors import ConfigError, ShardingError, UnsupportedArgument
from lockstep.parallel.shard_context import context_of
from lockstep.parallel.shard_group import ShardState
from lockstep.parallel.shard_mesh import apart
from lockstep.parallel.shard_unit import ShardUnit, unit_of
from lockstep.parallel.uneven_inputs import Batch, JoinedBatches, ShardedParticipant

_LAYERS = (
    "what ranks say to each other passes through layers. Write a lockstep.comm.transport.TransportLayer whose submit "
    "does operations of kind {0!r} in your way and hands on the others, and shard over it: "
    "mesh=Communicator(YourLayer(comm.transport))"
)


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, unit: ShardUnit) -> None:
        self._unit: ShardUnit | None = unit

    def wait(self) -> None:
        """Return when the module has its whole parameters."""
        unit, self._unit = self._unit, None
        if unit is not None and any(group.state is ShardState.GATHERING for group in unit.groups):
            unit.finish()


class FSDPModule:
    """Mixed into the class of every module that fully_shard was called on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new object of the class is an unsharded one, as slices of a Sequential are."""
        original: Any = next(base for base in cls.__mro__[1:] if not issubclass(base, FSDPModule))
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    @property
    def _unit(self) -> ShardUnit:
        unit = unit_of(self)  # pyright: ignore[reportArgumentType]
        assert unit is not None, "fully_shard made this class, and the unit with it"
        return unit

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ShardingError("a sharded module cannot be deep-copied: copy it before fully_shard")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardingError(
            "a sharded module cannot be pickled or copied: save its state_dict(), or whole_state_dict(model)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_whole(super().__call__, args, kwargs)  # type: ignore[misc]

    def run_whole(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`call(*args, **kwargs)` as if it were this module's forward: with whole parameters.

        Collective: every rank, as all forwards.
        """
        unit = self._unit
        return unit.run(context_of(unit), call, self, args, kwargs)  # pyright: ignore[reportArgumentType]

    # ------------------------------------------------------------------ parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Give the module its whole parameters, for as long as until its next forward or `reshard`. Not recursive.

        Collective: every rank. Blocks, or with `async_op` in the handle's `wait`, at the latest in the next forward.
        """
        unit = self._unit
        context_of(unit).wholes.make_now(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give the module its shards and free the whole parameters. Not recursive, not collective."""
        self._unit.reshard()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        units = [unit for unit in map(unit_of, self.modules()) if unit is not None]  # type: ignore[attr-defined]
        for unit in units:
            unit.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for unit in units:
            for group in unit.groups:
                group.check()
        return result

    # ------------------------------------------------------------------ gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; where not, this rank keeps whole ones and adds to them."""
        self._set_gradients(recurse, sync=requires_gradient_sync, all_reduce=requires_gradient_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank; the next backward outside of it reduces them all."""
        before = [(gradients, gradients.settings) for unit in self._units(True) for gradients in unit.gradients]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for gradients, settings in before:
                gradients.settings = settings

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward also adds over replicas; where not, the sum over shards waits for the next one that does."""
        self._set_gradients(recurse, all_reduce=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` instead of by the number of ranks."""
        self._set_gradients(False, divide_factor=factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # its older name

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each reduced flat gradient [S] of this rank, before it becomes `.grad`."""
        if stream is not None:
            raise UnsupportedArgument(
                "stream",
                "the hook runs on the stream that uses the gradient next. To work on another, let the hook do so: "
                "stream.wait_stream(current); with torch.cuda.stream(stream): ...; current.wait_stream(stream)",
            )
        self._set_gradients(False, all_reduce_hook=hook)

    def _set_gradients(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            for gradients in unit.gradients:
                gradients.settings = gradients.settings._replace(**changes)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: every backward waits for its reductions at its end, and gradients are there after each."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted: parameters that only some ranks use are always handled."""

    def join(self, batches: Iterable[Batch], divide_by_initial_world_size: bool = True) -> JoinedBatches[Batch]:
        """Go through `batches`, of which ranks may have differently many; see `JoinedBatches`.

        divide_by_initial_world_size: whether gradients are divided by the number of all ranks, or by that of the ranks
            that still have batches of their own.
        Collective: every rank, as often as the one with the most batches asks for one.
        """
        return JoinedBatches(ShardedParticipant(self._unit), batches, divide_by_initial_world_size)

    # ------------------------------------------------------------------ when to be whole

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether whole parameters are given back between forward and backward, wherever it was a number till now."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward={reshard_after_forward!r} is not a bool")
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters are given back after backward; the next forward gathers anew in any case."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the whole parameters; an embedding's does not."""
        self._unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather as many units ahead as `modules` has, while this one runs forward; the last forward tells which."""
        self._unit.forward_prefetch = [_unit_among(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather as many units ahead as `modules` has, while this one runs backward."""
        self._unit.backward_prefetch = [_unit_among(module) for module in modules]

    # ------------------------------------------------------------------ after an exception

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that did not end, and its gradients. Needed only where torch needs it too."""
        context = self._unit.context
        if context is not None:
            context.reset()

    # ------------------------------------------------------------------ how gradients travel

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions of the whole model may be under way at once. Raises: ConfigError below 1."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int) or max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers={max_input_buffers!r} is not a number from 1")
        for unit in self._units(recurse):
            context_of(unit).reductions.flights = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients over a communicator of their own, so that they and gathers do not wait for each other.

        Collective: every rank, the first time, between steps. Where ranks share memory nothing is gathered anyhow.
        """
        for unit in self._units(recurse):
            for gradients in unit.gradients:
                gradients.comm = apart(unit.mesh.shard) if enable else unit.mesh.shard

    # ------------------------------------------------------------------ settings of torch's that have no meaning here

    def set_post_optim_event(self, event: Any) -> None:
        """Accepted: gathers wait for the current stream, which the optimizer has run on."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: gradients are always added, and divided afterwards."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted: buffers of reductions come from the communicator, and gathers write where parameters are read."""

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused: where ranks share memory there is no all-gather, elsewhere layers see all that ranks say."""
        raise UnsupportedArgument("set_custom_all_gather", _LAYERS.format("all_gather"))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused, as `set_custom_all_gather`."""
        raise UnsupportedArgument("set_custom_reduce_scatter", _LAYERS.format("reduce_scatter"))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: it is memory of torch's own all-gather."""
        raise UnsupportedArgument(
            "set_symm_mem_for_comm",
            "it allocates for torch's own all-gather, which is not used here. Leave the call out; ranks on one host's "
            "CPUs share memory without it",
        )

    # ------------------------------------------------------------------ inside

    def _units(self, recurse: bool) -> list[ShardUnit]:
        modules: Iterator[Module] = self.modules() if recurse else iter([self])  # type: ignore[attr-defined,list-item]
        units = {id(unit): unit for unit in map(unit_of, modules) if unit is not None}
        return list(units.values())


def _unit_among(module: Any) -> ShardUnit:
    unit = unit_of(module) if isinstance(module, Module) else None
    if unit is None:
        raise ConfigError(f"{type(module).__name__} is not a module that fully_shard was called on")
    return unit
