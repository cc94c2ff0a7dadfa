"""What a FullyShardedDataParallel wrapper knows of itself, and how wrappers are found in a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch.nn import Module, Parameter

from lockstep.parallel.fsdp1.arguments import Ignored, MixedPrecision, ShardingStrategy, StateDictSettings
from lockstep.parallel.shard_mesh import ShardMesh

if TYPE_CHECKING:
    from lockstep.parallel.fsdp1.summon import Summoned

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
    settings: StateDictSettings = field(default_factory=StateDictSettings)
    is_root: bool = True  # in no other wrapper
    is_synced: bool = True  # not in no_sync
    is_fp32: bool = False  # casts its inputs to fp32, and its output back
    ran: bool = False
    saved_dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the buffers that were cast, by name
    summoned: Summoned | None = None  # inside summon_full_params

    def modules(self) -> Iterator[tuple[str, Module]]:
        """(name below the wrapper, module) of all modules that are in no wrapper inside this one, and not ignored."""
        return modules_outside_units(self.module, self.ignored.modules)

    def named_parameters(self) -> dict[str, Parameter]:
        """Every parameter below the wrapper, also in wrappers inside it, by each of its names in state dicts."""
        named = Module.named_parameters(self.wrapper, remove_duplicate=False)
        return {clean_name(name): param for name, param in named}


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
    seen: set[Module] = set(ignored)

    def walk(name: str, module: Module) -> Iterator[tuple[str, Module]]:
        if module in seen or unit_of(module) is not None:
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk("", top)
