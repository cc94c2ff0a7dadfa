"""A user's tensors made ready for a transport: detached, contiguous, real where they are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.op import REDUCTIONS, CommOp
from lockstep.comm.reduction import is_reducible
from lockstep.errors import ConfigError

SUM_LIKE = ("sum", "mean")
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}  # to add in


def dense(tensor: Tensor, complex_as_real: bool = False) -> Tensor:
    """`tensor` itself where its memory holds its elements in order, else a copy that does."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"a {type(tensor).__name__} cannot be sent: make it a tensor, or use the object operations")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"a tensor of layout {tensor.layout} cannot be sent: send its values and its indices")
    flat = tensor.detach().contiguous()
    if flat.is_conj() or flat.is_neg():  # the memory holds other numbers than the tensor says
        flat = flat.resolve_conj().resolve_neg()
    return torch.view_as_real(flat) if complex_as_real and flat.is_complex() else flat


def in_place(tensor: Tensor, complex_as_real: bool = False) -> tuple[Tensor, Callable[[], object] | None]:
    """A contiguous tensor to work on in place, and what copies it back where that is not `tensor`'s own memory."""
    flat = dense(tensor)
    is_own = flat.data_ptr() == tensor.data_ptr() and not (tensor.is_conj() or tensor.is_neg())
    result = torch.view_as_real(flat) if complex_as_real and flat.is_complex() else flat
    if is_own:
        return result, None
    target = tensor.detach()
    return result, lambda: target.copy_(flat)


def in_place_list(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Callable[[], object] | None]:
    """`in_place` for a list: the tensors to fill, and one function that copies back those that needed a buffer."""
    pairs = [in_place(t) for t in tensors]
    copies = [copy for _, copy in pairs if copy is not None]

    def copy_back() -> None:
        for copy in copies:
            copy()

    return tuple(flat for flat, _ in pairs), (copy_back if copies else None)


def pieces(tensors: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """One flat tensor for each of `count` ranks: `tensors` are that already, or one tensor of equal parts."""
    if len(tensors) == 1 and count > 1:
        return tensors[0].view(count, tensors[0].numel() // count).unbind()
    return [tensor.view(-1) for tensor in tensors]


def check_reduction(reduce: str, tensor: Tensor) -> None:
    """Raises: ConfigError for a reduction that does not exist, or has no meaning for this dtype."""
    if reduce == "sum":
        return
    if reduce not in REDUCTIONS:
        raise ConfigError(f"reduce={reduce!r}: choose one of {', '.join(REDUCTIONS)}")
    if reduce == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"the mean of {tensor.dtype} is not a {tensor.dtype}: sum and divide, or convert to float first"
        )
    if tensor.is_complex() and reduce not in SUM_LIKE:
        raise ConfigError(f"reduce={reduce!r} has no meaning for {tensor.dtype}; only sum and mean have")


def check_on_cpu(op: CommOp) -> None:
    """Raises: ConfigError where a tensor is not in this machine's memory, or torch cannot reduce it there."""
    for tensor in (*op.inputs, *op.outputs):
        if not tensor.is_cpu:
            raise ConfigError(f"{op.kind} of a tensor on {tensor.device}: this communicator is for tensors on the CPU")
    check_reducible(op)


def check_reducible(op: CommOp) -> None:
    """Raises: ConfigError where torch has no such reduction of this dtype."""
    if op.reduce is not None and not is_reducible(op.inputs[0].dtype, op.reduce):
        raise ConfigError(
            f"{op.kind} of {op.inputs[0].dtype}: the {op.reduce} of this dtype cannot be computed; convert it first, "
            f"to float32 say"
        )
