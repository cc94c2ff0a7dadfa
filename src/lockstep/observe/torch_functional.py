"""Functional collectives, which DTensor and torch.compile make: they go from the dispatcher to C++, past ProcessGroup.

So a kernel is put before those of the dispatcher: it calls the next one, and enters what that has started. It runs for
compiled code too, which knows nothing of it. Of tensors on the CPU `wait_tensor` stands until their data is there: that
is entered as well, by the storage that the collective has returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import monotonic_ns
from typing import Any

from lockstep.observe.call_site import call_site
from lockstep.observe.first_uses import FirstUses
from lockstep.observe.patches import Patches
from lockstep.observe.torch_groups import WatchedGroup
from lockstep.observe.torch_operations import CALLS

_NAMESPACE = "_c10d_functional"
_BEFORE = "ADInplaceOrView"  # a key of every tensor, which comes after autograd's
_KEPT = 4096  # collectives that nobody has waited for yet
_METHODS = {  # of ProcessGroup, by the functions that call them
    "all_reduce": "allreduce",
    "all_reduce_": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_reduce_coalesced_": "allreduce_coalesced",
    "all_gather_into_tensor": "_allgather_base",
    "all_gather_into_tensor_out": "_allgather_base",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_tensor_out": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


def watch_functional(adopt: Callable[[Any], WatchedGroup | None], first_uses: FirstUses) -> Callable[[], None]:
    """Enter what functional collectives, which are imported, start in groups that `adopt` knows. The result ends it."""
    import torch
    from torch._C import _after_ADInplaceOrView_keyset as after  # pyright: ignore[reportAttributeAccessIssue]
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    library = torch.library.Library(_NAMESPACE, "IMPL")
    under_way: dict[int, tuple[WatchedGroup, int]] = {}  # by storage: the operation that fills it, as it is recorded
    reductions = {name.lower(): kind.value for name, kind in c10d.ReduceOp.RedOpType.__members__.items()}

    def entered(function: Any, method: str, keys: Any, *args: Any, **out: Any) -> Any:
        group = c10d._resolve_process_group(args[-1]) if isinstance(args[-1], str) else args[-1]
        watched = adopt(group)
        if watched is None or watched.inside:
            return function.redispatch(keys & after, *args, **out)
        site = call_site()
        watched.catch_up(group._get_sequence_number_for_group(), site)
        call, tensors = CALLS[method], args[0] if isinstance(args[0], list | tuple) else args[:1]
        shape = tensors[0].shape if call.has_shape else None
        reduction = reductions.get(args[1]) if call.reduces else None
        operation = method, len(tensors), tensors[0].dtype, shape, reduction, args[1] if call.has_root else None, 0
        watched.starts(operation, site)
        try:
            with first_uses.held() if watched.seen == watched.unused else nullcontext():
                result = function.redispatch(keys & after, *args, **out)
        finally:
            number = watched.started(group._get_sequence_number_for_group())
        if number is not None:
            begun = watched, number
            if len(under_way) >= _KEPT:
                under_way.clear()
            results = result if isinstance(result, list | tuple) else (result,)
            under_way.update({one.untyped_storage()._cdata: begun for one in results if one.is_cpu})
        return result

    def stood(wait: Callable[[Any], Any], tensor: Any, waited_for: Any) -> Any:
        begun = under_way.pop(waited_for.untyped_storage()._cdata, None) if under_way else None
        began_ns = monotonic_ns()
        result = wait(tensor)
        if begun is not None:
            begun[0].stood(begun[1], began_ns)
        return result

    def waited(keys: Any, tensor: Any) -> Any:
        return stood(partial(wait_tensor.redispatch, keys & after), tensor, tensor)

    def triggering(old: Callable[[Any], Any]) -> Callable[[Any], Any]:  # within a dispatch, which skips our kernel
        return lambda tensor: stood(old, tensor, tensor.elem)

    wait_tensor = torch.ops._c10d_functional.wait_tensor.default
    library.impl("wait_tensor", waited, _BEFORE, with_keyset=True)
    patches = Patches()
    started = sys.modules["torch.distributed._functional_collectives"].AsyncCollectiveTensor
    patches.replace(started, "trigger_wait", triggering)
    for name, method in _METHODS.items():
        packet = getattr(getattr(torch.ops, _NAMESPACE), name, None)
        if packet is not None:
            library.impl(name, partial(entered, packet.default, method), _BEFORE, with_keyset=True)

    def undo() -> None:
        patches.undo()
        library._destroy()

    return undo
