"""What happens to a module before its parameters are sharded: units made of parts of it, values, device, equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DTensor
from lockstep.parallel.fsdp1.arguments import Ignored
from lockstep.parallel.fsdp1.unit import FsdpUnit, clean_name, modules_outside_units, unit_of
from lockstep.parallel.initialisers import drawn_seed
from lockstep.parallel.materialize import materialize
from lockstep.parallel.replica import broadcast_coalesced
from lockstep.parallel.shard_mesh import ShardMesh
from lockstep.parallel.wrap_policies import as_function, unit_overrides


def wrap_inside(
    root: Module, policy: Any, fp32: tuple[type[Module], ...], ignored: Ignored, wrap: Callable[..., Module]
) -> None:
    """Put `wrap(module, **overrides)` in the place of every module that the policy makes a unit, inner ones first.

    fp32: classes whose modules become units too, without mixed precision.
    Raises: ConfigError where a wrapper is in `root` already.
    """
    if policy is None:
        return
    places: dict[Module, list[tuple[Module, str]]] = {}
    for name, module in root.named_modules():
        if unit_of(module) is not None:
            raise ConfigError(
                f"auto_wrap_policy: {clean_name(name) or 'the module'} is a FullyShardedDataParallel already. Wrap by "
                "hand or by policy, not both"
            )
        for child_name, child in module._modules.items():
            if child is not None:
                places.setdefault(child, []).append((module, child_name))

    asked = as_function(policy, root, ignored.modules)

    def or_fp32(module: Module, recurse: bool, nonwrapped_numel: int) -> Any:
        own = {"mixed_precision": None} if isinstance(module, fp32) else None
        return recurse or own or asked(module=module, recurse=False, nonwrapped_numel=nonwrapped_numel)

    for module, overrides in unit_overrides(root, or_fp32 if fp32 else asked, ignored.modules).items():
        wrapped = wrap(module, **overrides)
        vars(wrapped)["_fsdp_unit"].is_fp32 = isinstance(module, fp32)
        for parent, name in places[module]:
            parent._modules[name] = wrapped


def fill_meta(module: Module, init: Callable[[Module], object] | None, ignored: Ignored, device: torch.device) -> None:
    """Give what is on the meta device memory and values: as `materialize` does, or by `init(part)` for each part.

    Parts in wrappers inside have theirs already. `init` has to do both, for the part's own tensors alone.
    Raises: ConfigError where something is left without values.
    """
    found = _meta_tensors(module, ignored)
    if init is None:
        if found:  # the seed: units have the same names inside, and must not have the same numbers
            materialize(module, seed=drawn_seed(), device=device)
        return
    for part in dict.fromkeys(found.values()):
        init(part)
    left = _meta_tensors(module, ignored)
    if left:
        raise ConfigError(
            f"after param_init_fn {', '.join(left)} are still on the meta device: call "
            "module.to_empty(device=..., recurse=False) in it, then write values"
        )


def _meta_tensors(module: Module, ignored: Ignored) -> dict[str, Module]:
    """Names of tensors, and the modules that own them."""
    return {
        f"{name}.{own_name}".lstrip("."): part
        for name, part in modules_outside_units(module, ignored.modules)
        for own_name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None and tensor.is_meta and tensor not in ignored.params
    }


def _plain_tensors(module: Module) -> list[Tensor]:
    """All but the shards of wrappers inside, which are where they belong, and in step."""
    return [t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, DTensor)]


def move_to(device: torch.device, module: Module) -> None:
    """Move what is on the CPU to `device`, also what is ignored."""
    for tensor in _plain_tensors(module):
        if tensor.device.type == "cpu" != device.type:
            tensor.data = tensor.data.to(device)


def sync_states(module: Module, mesh: ShardMesh, ignored: Ignored) -> None:
    """Every rank's parameters and buffers become rank 0's. Collective: every rank of `mesh`."""
    tensors = [tensor.detach() for tensor in _plain_tensors(module) if tensor not in ignored.params]
    broadcast_coalesced(mesh.whole, tensors, label="fsdp.init")


def check_device(device_id: int | str | torch.device | None, mesh: ShardMesh) -> None:
    """Raises: ConfigError where `device_id` is not where the ranks of `mesh` communicate and compute."""
    if device_id is not None and torch.device(device_id) not in (mesh.device, torch.device(mesh.device.type)):
        raise ConfigError(
            f"device_id={device_id!r} is a {torch.device(device_id).type} device, and the ranks of this group "
            f"communicate on {mesh.device}: call torch.cuda.set_device before, or make the group with another backend"
        )


def cast_buffers(unit: FsdpUnit) -> dict[str, torch.dtype]:
    """Cast a wrapper's floating-point buffers as its `mixed_precision` says; the dtypes they had, by name."""
    before: dict[str, torch.dtype] = {}
    dtype = unit.precision.buffer_dtype
    for name, part in modules_outside_units(unit.module, unit.ignored.modules) if dtype is not None else ():
        for own_name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                before[clean_name(f"{name}.{own_name}".lstrip("."))] = buffer.dtype
                part._buffers[own_name] = buffer.to(dtype)
    return before
