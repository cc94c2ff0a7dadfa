"""What a user gives an operation: refused where it cannot be right, and made ready for a transport.

That is detached, contiguous, real where it is added.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.comm.op import COLLECTIVE_TAG, REDUCTIONS, CommOp
from lockstep.comm.reduction import is_reducible
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.comm.rank_group import RankGroup

SUM_LIKE = ("sum", "mean")
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}  # to add in


def dense(tensor: Tensor, complex_as_real: bool = False) -> Tensor:
    """`tensor` itself where its memory holds its elements in order, else a copy that does."""
    check_tensors(tensor)
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


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    flat = tensor.view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # the stride of a single element may be anything


def writing_to(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Tensors made in torch.inference_mode may be written in it only, and the thread that writes may be another one."""
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else torch.no_grad()


def pieces(tensors: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """One flat tensor for each of `count` ranks: `tensors` are that already, or one tensor of equal parts."""
    if len(tensors) == 1 and count > 1:
        return tensors[0].view(count, tensors[0].numel() // count).unbind()
    return [tensor.view(-1) for tensor in tensors]


def check_numel(kind: str, numel: Any) -> None:
    """Raises: ConfigError for what is no number of elements."""
    if _whole(numel) < 0:
        raise ConfigError(f"{kind} of {numel!r} elements: give their number, 0 or more")


def _whole(number: Any) -> int:
    """As an int; -1 for what is no whole number."""
    try:
        return operator.index(number)
    except TypeError:
        return -1


def check_tensors(*tensors: object) -> None:
    """Raises: ConfigError for what is no tensor, or one whose elements are not in memory one after the other."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            what = type(tensor).__name__
            raise ConfigError(f"only tensors are sent and filled, not {what}: make one, or use the object operations")
        if tensor.layout is not torch.strided:
            raise ConfigError(f"a tensor of layout {tensor.layout} cannot be sent: send its values and its indices")
        if tensor.is_meta:
            raise ConfigError("a tensor on the meta device has no values to send: fill it first (lockstep.materialize)")


def peer_of(comm: RankGroup, argument: str, rank: Any) -> int:
    """`rank`, a whole number of whatever type, as an int. Raises: ConfigError for what is no rank of `comm`."""
    number = _whole(rank)
    if not 0 <= number < comm.world_size:
        raise ConfigError(f"{argument}={rank!r}: {comm.name!r} has ranks 0 to {comm.world_size - 1}")
    return number


def other_rank(comm: RankGroup, argument: str, rank: Any, tag: Any) -> int:
    """`peer_of` for a message. Raises: ConfigError for this rank itself too, and for a tag that no message can have."""
    number = peer_of(comm, argument, rank)
    if number == comm.rank:
        raise ConfigError(f"{argument}={rank} is this rank itself: a rank cannot send to itself, copy the tensor")
    check_tag(tag)
    return number


def check_tag(tag: Any) -> None:
    """Raises: ConfigError for what is no tag of a user's message."""
    if not isinstance(tag, int) or not 0 <= tag < COLLECTIVE_TAG:
        raise ConfigError(f"tag={tag!r}: a tag is an int from 0 to 2**31 - 3")


def check_list(
    comm: RankGroup, argument: str, tensors: Sequence[Tensor], own: Tensor | None = None, name: str = "tensor"
) -> None:
    """own: what this rank's tensor of the list goes into or comes from, argument `name`."""
    check_tensors(*tensors)
    if len(tensors) != comm.world_size:
        raise ConfigError(f"{argument} has {len(tensors)} tensors: it needs one per rank, {comm.world_size}")
    dtypes = {str(t.dtype) for t in (tensors if own is None else (*tensors, own))}
    if len(dtypes) > 1:
        raise ConfigError(f"{argument} on rank {comm.rank}: one operation has one dtype, not {sorted(dtypes)}")
    if own is not None and tensors[comm.rank].numel() != own.numel():
        raise ConfigError(
            f"on rank {comm.rank} {argument}[{comm.rank}] has {tensors[comm.rank].numel()} elements, but its "
            f"{name} has {own.numel()} elements: they are one and the same data"
        )


def check_root_list(
    comm: RankGroup, argument: str, tensors: Sequence[Tensor] | None, tensor: Tensor, root: int
) -> bool:
    """Whether this rank is the root, which alone has the list."""
    if comm.rank != root:
        if tensors:
            raise ConfigError(f"{argument} belongs to rank {root} only; rank {comm.rank} must pass None")
        return False
    if tensors is None:
        raise ConfigError(f"{argument} is needed on rank {root}, which is the root")
    check_list(comm, argument, tensors, tensor)
    return True


def check_even(comm: RankGroup, kind: str, whole: Tensor, part: Tensor, may_widen: bool = False) -> None:
    """`whole` is one `part` for each rank, of the same dtype; may_widen: the part may be of a wider one."""
    check_tensors(whole, part)
    if whole.numel() != comm.world_size * part.numel():
        raise ConfigError(
            f"{kind} on rank {comm.rank}: the whole has {whole.numel()} elements, but {comm.world_size} ranks x "
            f"{part.numel()} elements each are {comm.world_size * part.numel()}; for uneven parts use the list form"
        )
    if whole.dtype != part.dtype and not (may_widen and part.dtype == WIDER.get(whole.dtype)):
        raise ConfigError(
            f"{kind} on rank {comm.rank}: dtypes differ, {whole.dtype} and {part.dtype}"
            + ("; a wider sum is float32 of bfloat16 or float16, or float64 of float32" if may_widen else "")
        )


def check_reduction(reduce: str, tensor: Tensor) -> None:
    """Raises: ConfigError for a reduction that does not exist, or has no meaning for this dtype."""
    check_tensors(tensor)
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
