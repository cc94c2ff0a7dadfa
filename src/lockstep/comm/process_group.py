"""lockstep as the torch.distributed backend "lockstep", for code that is not ours.

    dist.init_process_group("lockstep")                     or "cpu:lockstep,cuda:nccl"

Stock DistributedDataParallel, fully_shard, DTensor and every `torch.distributed` call then run on our transports.
`import torch` finds the name by itself: the package's entry point in the group "torch.backends" calls `autoload`. So
this file must be cheap to import, and must import torch only when it is called: torch is not complete before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.comm.transport import Transport

NAME = "lockstep"

# laid over a transport of ours when one is made for a torch group, whose name is the second argument
layers: list[Callable[[Transport, str], Transport]] = []


def layered(transport: Transport, group: str) -> Transport:
    """`transport` under all `layers`."""
    return reduce(lambda under, layer: layer(under, group), layers, transport)


def register_backend() -> None:
    """Make the backend "lockstep" known to torch.distributed, where `import torch` has not: a second call does nothing.

    Needed with TORCH_DEVICE_BACKEND_AUTOLOAD=0, and where lockstep is on the path but not installed.
    Raises: RuntimeError where this torch is built without torch.distributed.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise RuntimeError('the backend "lockstep" needs torch.distributed, which this build of torch does not have')
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _open_group, extended_api=True, devices=["cpu"])


def autoload() -> None:
    """`register_backend` for the end of torch's own import, which an error here would break for every program."""
    import torch.distributed as dist

    try:
        if dist.is_available():
            register_backend()
    except Exception as error:  # noqa: BLE001 - a torch that registers backends in another way is still a torch
        logging.getLogger(__name__).warning('torch does not take the backend "lockstep": %r', error)


def transport_of(process_group: Any) -> Transport | None:
    """What carries the CPU tensors of a group of the backend "lockstep"; None for a group of any other backend.

    For our own code over such a group, past torch's calls. Closing it leaves the group alone.
    """
    from lockstep.comm.process_group_calls import LockstepGroup

    return process_group.transport if isinstance(process_group, LockstepGroup) else None


def _open_group(options: Any, backend_options: Any) -> Any:
    """What torch calls for each new group, on each of its ranks: with its DistributedBackendOptions."""
    from lockstep.comm.process_group_calls import LockstepGroup
    from lockstep.comm.process_group_meeting import Member

    size = options.group_size
    member = Member(
        store=options.store,
        rank=options.group_rank,
        world_size=size,
        global_ranks=tuple(options.global_ranks_in_group) or tuple(range(size)),  # the default group has an empty list
        timeout_s=options.timeout.total_seconds(),
        name=options.group_id,
    )
    return LockstepGroup(member, backend_options)
