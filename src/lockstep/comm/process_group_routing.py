"""Which of torch's calls our communicator serves, and which go on to a group of torch's own that can."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.op import Reduction

if TYPE_CHECKING:
    from lockstep.comm.process_group_calls import LockstepGroup

_REDUCTIONS: dict[Any, Reduction] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
}
_PLAIN = (Tensor, torch.nn.Parameter)  # other classes (FakeTensor, AsyncCollectiveTensor) are the dispatcher's


def served(options: type | None = None) -> Callable[[Callable[..., dist.Work]], Any]:
    """Marks one of torch's calls: what it works on, then `options`, which may be left out; None for a message.

    What serves a reduction is given the reduction as its last argument.
    """
    reduces = hasattr(options, "reduceOp")

    def mark(serve: Callable[..., dist.Work]) -> Any:
        @functools.wraps(serve)
        def method(self: LockstepGroup, *operands: Any, opts: Any = None, **named: Any) -> dist.Work:
            if options is not None and opts is None:
                is_last = bool(operands) and isinstance(operands[-1], options)
                operands, opts = (operands[:-1], operands[-1]) if is_last else (operands, options())
            arguments = operands if options is None else (*operands, opts)
            reduce = _REDUCTIONS.get(opts.reduceOp.op) if reduces else None
            kind = kind_elsewhere(operands, opts)
            if kind is None and reduces and reduce is None:
                kind = "cpu"  # bitwise, say
            if kind is not None:
                return getattr(self.other(kind), serve.__name__)(*arguments, **named)
            return serve(self, *arguments, reduce) if reduces else serve(self, *arguments, **named)

        return method

    return mark


def kind_elsewhere(operands: Sequence[Any], opts: Any = None) -> str | None:
    """The kind of device whose group of torch's own is for such operands; None where our communicator takes them."""
    for operand in operands:  # a tensor, a list of them, or a list of lists, which may be empty on this rank
        while isinstance(operand, list):
            operand = operand[0] if operand else None
        if isinstance(operand, Tensor):
            if operand.is_cpu or operand.is_meta:
                is_plain = operand.is_cpu and operand.layout is torch.strided and type(operand) in _PLAIN
                return None if is_plain else "cpu"
            return operand.device.type
    device = getattr(opts, "device", None)  # of a barrier
    return None if device is None or device.type == "cpu" else device.type
