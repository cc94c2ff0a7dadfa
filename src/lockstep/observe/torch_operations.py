"""The calls of torch's ProcessGroup: what each says of itself, in words that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.observe.scene import message_text

_REDUCTIONS = {"AVG": "mean", "PREMUL_SUM": "sum of scaled"}


class Call(NamedTuple):
    """One method of ProcessGroup.

    kind: as in `comm.op`. tensor: where the tensor stands that tells the dtype, and the shape where all ranks must give
    the same: (which argument, the names it goes by). A list there stands for its first tensor.
    """

    kind: str
    tensor: tuple[int, tuple[str, ...]]
    has_shape: bool = True
    reduces: bool = False
    has_root: bool = False
    is_message: bool = False


_FIRST = (0, ("tensors", "tensor", "output_tensors", "output", "outputs"))
_NONE = (99, ())  # no argument
_PEERS = ("dstRank", "srcRank")
_SECOND = (1, ("input_tensors", "input_tensor", "input", "inputs"))

CALLS: Mapping[str, Call] = {
    "allreduce": Call("all_reduce", _FIRST, reduces=True),
    "allreduce_coalesced": Call("all_reduce_coalesced", _FIRST, reduces=True),
    "reduce": Call("reduce", _FIRST, reduces=True, has_root=True),
    "broadcast": Call("broadcast", _FIRST, has_root=True),
    "allgather": Call("all_gather", _FIRST),  # its first output is rank 0's part, also where the parts differ
    "allgather_coalesced": Call("all_gather_coalesced", _SECOND),
    "_allgather_base": Call("all_gather", _SECOND),
    "all_gather_single": Call("all_gather", _SECOND),
    "allgather_into_tensor_coalesced": Call("all_gather_coalesced", _SECOND),
    "all_gather_single_coalesced": Call("all_gather_coalesced", _SECOND),
    "gather": Call("gather", _SECOND, has_root=True),
    "scatter": Call("scatter", _FIRST, has_root=True),
    "reduce_scatter": Call("reduce_scatter", _SECOND, reduces=True),  # its first input is rank 0's part
    "_reduce_scatter_base": Call("reduce_scatter", _FIRST, reduces=True),
    "reduce_scatter_single": Call("reduce_scatter", _FIRST, reduces=True),
    "reduce_scatter_tensor_coalesced": Call("reduce_scatter_coalesced", _FIRST, reduces=True),
    "reduce_scatter_single_coalesced": Call("reduce_scatter_coalesced", _FIRST, reduces=True),
    "alltoall": Call("all_to_all", _SECOND, has_shape=False),
    "alltoall_base": Call("all_to_all", _SECOND, has_shape=False),
    "all_to_all_single": Call("all_to_all", _SECOND, has_shape=False),
    "barrier": Call("barrier", _NONE),
    "monitored_barrier": Call("monitored_barrier", _NONE),
    "send": Call("send", _FIRST, is_message=True),
    "recv": Call("recv", _FIRST, is_message=True),
    "recv_anysource": Call("recv", _FIRST, is_message=True),
}


class Operation(NamedTuple):
    """What tells one operation from another."""

    name: str
    tensors: int = 1
    dtype: Any = None
    shape: Any = None
    reduction: int | None = None  # of torch's enum; None means a sum
    peer: Any = None  # rank in the group: the root, or the other end of a message
    tag: int = 0
    ignored_tag: int = 0


def by_order(operation: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fields of a message as NCCL has it: it pairs a rank's sends with the receives by their order, not by tag."""
    return (*operation[:6], 0, operation[6])


def read(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The fields of the Operation that these arguments of method `name` ask for; and one of its tensors, or None."""
    _, (index, names), has_shape, reduces, has_root, is_message = CALLS[name]
    tensor = args[index] if len(args) > index else _named(kwargs, names)
    tensors = 1
    while type(tensor) is list or type(tensor) is tuple:
        tensors = len(tensor)
        tensor = tensor[0] if tensor else None
    shape = reduction = peer = None
    dtype = getattr(tensor, "dtype", None)
    if tensor is None or dtype is None:
        tensor = None  # whatever it is, torch will refuse it
    elif has_shape:
        shape = tensor.shape
    if is_message:
        ends = (None, *args[1:]) if name == "recv_anysource" else args[1:]
        peer = ends[0] if ends else _named(kwargs, _PEERS)
        tag = ends[1] if len(ends) > 1 else kwargs.get("tag", 0)
        return (name, 1, dtype, shape, None, _number(peer), _number(tag)), tensor
    if reduces or has_root:
        options = args[-1] if args and "opts" not in kwargs else kwargs.get("opts")
        if reduces:
            reduction = getattr(options, "reduceOp", None) or _reduction(args, kwargs)
            reduction = None if reduction is None else hash(reduction)  # its number: the quickest way to it
        if has_root:
            peer = getattr(options, "rootRank", None)
            if peer is None:
                peer = args[1] if len(args) > 1 else kwargs.get("root")
    return (name, tensors, dtype, shape, reduction, peer if peer is None else _number(peer), 0), tensor


def has_one_tensor(name: str) -> bool:
    """Whether method `name` is for all ranks, and tells by one tensor what it does, as by a rule torch calls it."""
    _, (index, _), has_shape, _, _, is_message = CALLS[name]
    return has_shape and index <= 1 and not is_message


def _number(value: Any) -> Any:
    return value if value is None or type(value) is int else str(value)


def _named(kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((kwargs[name] for name in names if name in kwargs), None)


def _reduction(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of the short forms of a call, `group.allreduce(tensor, ReduceOp.MAX)`; None means a sum."""
    given = [value for value in (*args, *kwargs.values()) if type(value).__name__ in ("ReduceOp", "RedOpType")]
    return given[0] if given else None


def text_of(operation: Operation, ranks: Sequence[int]) -> str:
    """`all_reduce float32 [262144] sum`. ranks: of the job, in the order of the group.

    Equal on all ranks, or they do not do the same; the text of a message is as `read_message` reads it.
    """
    call = CALLS[operation.name]
    what = "" if operation.dtype is None else str(operation.dtype).removeprefix("torch.")
    if operation.shape is not None:
        what += f" {list(operation.shape)}"
    if call.is_message:
        what += f" tagged {operation.ignored_tag}" if operation.ignored_tag else ""
        return message_text(call.kind, what, _of_job(operation.peer, ranks), operation.tag)
    words = [call.kind, what]
    if operation.tensors > 1 and call.kind.endswith("coalesced"):
        words.append(f"of {operation.tensors} tensors")
    if call.reduces:
        words.append(_name_of(operation.reduction))
    if operation.peer is not None:
        words.append(f"root={_of_job(operation.peer, ranks)}")
    return " ".join(word for word in words if word)


def _name_of(reduction: int | None) -> str:
    from torch._C._distributed_c10d import ReduceOp

    names = {member.value: name for name, member in ReduceOp.RedOpType.__members__.items()}
    name = names.get(reduction, "SUM")
    return _REDUCTIONS.get(name, name.lower())


def _of_job(rank: Any, ranks: Sequence[int]) -> Any:
    return ranks[rank] if isinstance(rank, int) and 0 <= rank < len(ranks) else rank
