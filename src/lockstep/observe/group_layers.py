"""The guard over transports of ours under torch's process groups: `DistributedDataParallel` of lockstep in a program
that called `init_process_group`, and every call to a group of the backend "lockstep".
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lockstep.comm.process_group import layers
from lockstep.observe.guard import Guard
from lockstep.observe.settings import Mode
from lockstep.observe.torch_groups import numbered

if TYPE_CHECKING:
    from lockstep.comm.transport import Transport  # imports torch, which comes when the program wants it

_NAME_CHARS = 8  # of torch's name for a group


def watch_groups(guard: Guard) -> Callable[[], None]:
    """Let `guard` see what goes through such transports, of groups that are made from now on. The result ends that."""
    over = partial(_over, guard, os.getpid(), Counter())
    layers.append(over)
    return partial(layers.remove, over)


def _over(guard: Guard, pid: int, made: Counter[str], transport: Transport, group: str) -> Transport:
    ranks = transport.global_ranks
    if os.getpid() != pid:  # a fork: the record is its parent's
        return transport
    if transport.world_size == 1 or ranks[transport.rank] != guard.rank or max(ranks) >= guard.world_size:
        return transport  # of a world of its own
    name = numbered(f"lockstep {group[:_NAME_CHARS]}", made)
    return watched_by(guard, guard.settings.mode, transport, name)


def watched_by(
    guard: Guard, mode: Mode, transport: Transport, name: str, *, is_world: bool = False, owns_guard: bool = False
) -> Transport:
    """`transport` under the layers of `guard`, which can abort it from now on. The others: see `GuardLayer`."""
    from lockstep.observe.checking import CheckLayer
    from lockstep.observe.recording import GuardLayer

    here = weakref.ref(transport)
    guard.aborts.append(lambda error: None if (alive := here()) is None else alive.abort(error))
    under = CheckLayer(transport, guard) if mode == "check" else transport
    return GuardLayer(under, guard, name=name, is_world=is_world, owns_guard=owns_guard)


def is_watched(transport: Transport) -> bool:
    """Whether a guard lies over it, or within."""
    from lockstep.comm.transport import TransportLayer
    from lockstep.observe.recording import GuardLayer

    while isinstance(transport, TransportLayer) and not isinstance(transport, GuardLayer):
        transport = transport.inner
    return isinstance(transport, GuardLayer)
