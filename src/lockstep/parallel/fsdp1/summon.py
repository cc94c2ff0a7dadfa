"""summon_full_params: for a while modules have whole, plain parameters that may be read and written."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.errors import UnsupportedArgument
from lockstep.parallel import shard_context
from lockstep.parallel.dtensors import DTensor, local_tensor
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
    units = units_in(module) if recurse else [unit for unit in [unit_of(module)] if unit is not None]
    if any(unit.summoned is not None for unit in units):
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
        self._shown: dict[int, Parameter] = {}  # id of a sharded parameter -> the whole one, where this rank has it
        self._is_hidden = False

    def holds(self, param: Tensor) -> bool:
        """Whether `param` is a sharded parameter of these units."""
        return any(param is sharded for _, _, sharded in self._places)

    def enter(self, rank0_only: bool, to_cpu: bool, with_grads: bool) -> None:
        """Gather, and put the whole parameters in their places. Collective: every rank."""
        for unit in self._units:
            unit.module.reshard()
            for _, module in unit.modules():
                sharded = [(name, param) for name, param in module._parameters.items() if isinstance(param, DTensor)]
                self._places += [(module, name, param) for name, param in sharded]
        with torch.no_grad():
            for param in self._distinct():
                self._gather(param, rank0_only, to_cpu, with_grads)
        self._show()
        for unit in self._units:
            unit.summoned = self
            engine: Any = _engine(unit)
            engine.run = functools.partial(self._run, engine)  # in front of the method

    def leave(self) -> None:
        """Put the shards back, with the values that the whole parameters have now."""
        for unit in self._units:
            del vars(_engine(unit))["run"]
            unit.summoned = None
        self._hide()

    def _distinct(self) -> list[Any]:
        return list({id(param): param for _, _, param in self._places}.values())

    def _gather(self, param: Any, rank0_only: bool, to_cpu: bool, with_grads: bool) -> None:
        whole = gathered(local_tensor(param), param, rank0_only)
        sharded_grad: Tensor | None = param.grad if with_grads else None
        grad = None if sharded_grad is None else gathered(local_tensor(sharded_grad), param, rank0_only)
        if whole is not None:
            shown = Parameter(whole.cpu() if to_cpu else whole, requires_grad=param.requires_grad)
            shown.grad = grad.cpu() if to_cpu and grad is not None else grad
            self._shown[id(param)] = shown

    def _show(self) -> None:
        for unit in self._units:
            unit.module.reshard()
        for module, name, param in self._places:
            module._parameters[name] = self._shown.get(id(param), param)

    def _hide(self) -> None:
        if self._writeback:
            self._write_back()
        for module, name, param in self._places:
            module._parameters[name] = param

    @torch.no_grad()
    def _write_back(self) -> None:
        for param in self._distinct():
            shown = self._shown[id(param)]
            for sharded, whole in ((param, shown), (param.grad, shown.grad)):
                if sharded is not None and whole is not None:
                    local_tensor(sharded).copy_(piece_of(whole, param))

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
            self._show()


def _engine(unit: FsdpUnit) -> ShardUnit:
    engine = shard_context.unit_of(unit.module)
    assert engine is not None, "the wrapper called fully_shard"
    return engine
