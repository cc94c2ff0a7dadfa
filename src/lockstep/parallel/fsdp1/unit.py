"""What a FullyShardedDataParallel wrapper knows of itself, and how wrappers are found in a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.nn import Module, Parameter

from lockstep.parallel import shard_unit
from lockstep.parallel.fsdp1.arguments import Ignored, settings_of
from lockstep.parallel.shard_mesh import ShardMesh
from lockstep.parallel.shard_unit import ShardUnit
from lockstep.parallel.torch_fsdp import MixedPrecision, ShardingStrategy, StateDictSettings

WRAPPED = "_fsdp_wrapped_module"  # torch's name: its checkpoint and activation-checkpoint code takes it out of names
_CHECKPOINTED = "_checkpoint_wrapped_module"


@final
@dataclass(eq=False)
class FsdpUnit:
    """One wrapper: the module inside, and how it is sharded."""

    wrapper: Module
    module: Any  # the module inside, which fully_shard has made an FSDPModule
    mesh: ShardMesh
    strategy: ShardingStrategy
    precision: MixedPrecision
    ignored: Ignored
    settings: StateDictSettings = field(default_factory=settings_of)
    is_root: bool = True  # in no other wrapper
    has_hook: bool = False  # reduces gradients in a way of the user's
    is_fp32: bool = False  # casts its inputs to fp32, and its output back
    saved_dtypes: dict[str, torch.dtype] | None = None  # of the buffers that the first forward has cast, by name
    is_summoned: bool = False  # inside summon_full_params

    @property
    def engine(self) -> ShardUnit:
        """What gathers and reduces."""
        found = shard_unit.unit_of(self.module)
        assert found is not None, "the wrapper called fully_shard"
        return found

    def named_parameters(self) -> dict[str, Parameter]:
        """Every parameter below the wrapper, also in wrappers inside it, by each of its names in state dicts."""
        return {clean_name(name): param for name, param in self.wrapper.named_parameters(remove_duplicate=False)}

    def named_buffers(self) -> set[str]:
        """The names of all buffers below the wrapper, as in state dicts."""
        return {clean_name(name) for name, _ in self.wrapper.named_buffers(remove_duplicate=False)}


def unit_of(module: Module) -> FsdpUnit | None:
    """What a wrapper knows of itself; None for any other module."""
    return vars(module).get("_fsdp_unit")


def units_in(module: Module) -> list[FsdpUnit]:
    """The units of all wrappers in `module`, outer ones first."""
    return [unit for part in module.modules() if (unit := unit_of(part)) is not None]


def clean_name(name: str) -> str:
    """A dotted name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, _CHECKPOINTED))


def modules_outside_units(top: Module, ignored: set[Module]) -> Iterator[tuple[str, Module]]:
    """(name, module) of `top` and all below it that are neither ignored nor in a wrapper."""
    inside = {part for unit in units_in(top) for part in unit.wrapper.modules()} | ignored
    return ((name, part) for name, part in top.named_modules() if part not in inside)
