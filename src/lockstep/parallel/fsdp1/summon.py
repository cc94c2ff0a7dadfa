"""summon_full_params: for a while modules have whole, plain parameters that may be read and written."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.nn import Module, Parameter

from lockstep.errors import UnsupportedArgument
from lockstep.parallel.dtensors import local_tensor
from lockstep.parallel.fsdp1.tensors import gathered, piece_of
from lockstep.parallel.fsdp1.unit import FsdpUnit, unit_of, units_in
from lockstep.parallel.shard_unit import ShardUnit


@contextlib.contextmanager
def summon_full_params(
    module: Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Let the modules have whole parameters, in the dtype of the shards, for as long as the context.

    For all wrappers in `module`, which need not be one; without `recurse` for `module` itself. `with_grads`: with whole
    gradients. At the end every rank takes its pieces of what is there then, unless writeback=False: write the same on
    all ranks. `rank0_only`: the others keep their shards. A forward without gradients may run inside.
    Collective: the beginning, every rank. Memory: all parameters whole on each rank that has them.
    Raises: UnsupportedArgument for writeback with rank0_only, as torch does; RuntimeError inside itself.
    """
    if writeback and rank0_only:
        raise UnsupportedArgument("writeback", "what rank 0 writes would be on no other rank: pass writeback=False")
    units = [unit for unit in units_in(module) if recurse or unit is unit_of(module)]
    if any(unit.is_summoned for unit in units):
        raise RuntimeError("the parameters of this module are summoned already: leave the outer context first")
    summoned = Summoned(units, writeback)
    summoned.enter(rank0_only, offload_to_cpu, with_grads)
    try:
        yield
    finally:
        summoned.leave()


@final
class Summoned:
    """The whole parameters of some units in the places of their shards."""

    def __init__(self, units: Sequence[FsdpUnit], writeback: bool) -> None:
        self._units = units
        self._writeback = writeback
        self._places: list[tuple[Module, str, Any]] = []  # (module, name, sharded parameter)
        self._wholes: dict[Any, Parameter] = {}  # sharded parameter -> the whole one, where this rank has it
        self._is_hidden = False

    def enter(self, rank0_only: bool, to_cpu: bool, with_grads: bool) -> None:
        """Gather, and put the whole parameters in their places. Collective: every rank."""
        for unit in self._units:
            unit.module.reshard()
            for group in unit.engine.groups:
                group.check()
                for owners, param in zip(group.owners, group.params, strict=True):
                    self._places += [(module, name, param) for module, name in owners]
        for param in dict.fromkeys(param for _, _, param in self._places):
            whole = gathered(param, param, rank0_only)
            grad = gathered(param.grad, param, rank0_only) if with_grads and param.grad is not None else None
            if whole is not None:
                self._wholes[param] = shown = Parameter(whole.cpu() if to_cpu else whole, param.requires_grad)
                if grad is not None:
                    shown.grad_dtype = grad.dtype
                    shown.grad = grad.to(shown.device)
        self._show()
        for unit in self._units:
            unit.is_summoned = True
            engine: Any = unit.engine
            engine.run = functools.partial(self._run, engine)  # in front of the method

    def leave(self) -> None:
        """Put the shards back, with the values that the whole parameters have now."""
        for unit in self._units:
            del vars(unit.engine)["run"]
            unit.is_summoned = False
        self._hide()

    def _show(self) -> None:
        for module, name, param in self._places:
            module._parameters[name] = self._wholes.get(param, param)

    @torch.no_grad()
    def _hide(self) -> None:
        for param, whole in self._wholes.items() if self._writeback else ():
            for into, changed in ((param, whole), (param.grad, whole.grad)):
                if into is not None and changed is not None:
                    local_tensor(into).copy_(piece_of(changed, param))
        for module, name, param in self._places:
            module._parameters[name] = param

    def _run(self, engine: ShardUnit, *forward: Any) -> Any:
        """A forward in between: the engine finds the shards in their places, and takes them away again."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a forward inside summon_full_params cannot be trained on, the gradients would be lost: use "
                "torch.no_grad()"
            )
        if self._is_hidden:
            return ShardUnit.run(engine, *forward)
        self._hide()
        self._is_hidden = True
        try:
            return ShardUnit.run(engine, *forward)
        finally:
            self._is_hidden = False
            for unit in self._units:
                unit.module.reshard()
            self._show()
