"""The mark on a sharded parameter: of which group it is, and where in it."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lockstep.parallel.shard_group import ShardGroup

_SLOT = "_lockstep_slot"


@dataclass(frozen=True)
class ShardSlot:
    """Where a sharded parameter belongs."""

    group: ShardGroup
    index: int

    def __reduce__(self) -> tuple[Any, ...]:
        return NoneType, ()  # None: a copy of a parameter is not in the group, and must not bring it along


def slot_of(param: Tensor) -> ShardSlot | None:
    """Where `param` belongs if fully_shard made it; None for any other tensor."""
    slot = getattr(param, _SLOT, None)
    return slot if slot is not None and slot.group.params[slot.index] is param else None


def put_into(slot: ShardSlot, param: Tensor) -> None:
    """Let `slot_of(param)` be `slot`, once the group has it there."""
    setattr(param, _SLOT, slot)
