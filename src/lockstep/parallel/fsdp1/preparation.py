"""What happens to a module before its parameters are sharded: units made of parts of it, values, device, equality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.comm.tensor_parts import give_memory
from lockstep.errors import ConfigError
from lockstep.parallel.fsdp1.arguments import Ignored, MixedPrecision
from lockstep.parallel.fsdp1.unit import clean_name, modules_outside_units, unit_of
from lockstep.parallel.replica import broadcast_coalesced
from lockstep.parallel.shard_mesh import ShardMesh
from lockstep.parallel.wrap_policies import CustomPolicy, Overrides, unit_overrides


def wrap_inside(
    root: Module,
    policy: Any,
    precision: MixedPrecision | None,
    ignored: Ignored,
    wrap: Callable[..., Module],
) -> None:
    """Put `wrap(module, **overrides)` in the place of every module that the policy makes a unit, inner ones first.

    With mixed precision also of every module of the classes that it leaves out, which compute in their own dtype.
    Raises: ConfigError where a wrapper is in `root` already.
    """
    if policy is None:
        return
    for name, module in root.named_modules():
        if unit_of(module) is not None:
            raise ConfigError(
                f"auto_wrap_policy: {clean_name(name) or 'the module'} is a FullyShardedDataParallel already. Wrap by "
                "hand or by policy, not both"
            )
    chosen: dict[Module, Overrides] = unit_overrides(root, policy, ignored.modules)
    fp32: dict[Module, Overrides] = {}
    if precision is not None:
        left_out = CustomPolicy(lambda module: isinstance(module, precision.ignored_classes))
        fp32 = {module: {"mixed_precision": None} for module in unit_overrides(root, left_out, ignored.modules)}
        chosen = {**chosen, **fp32}
    modules = list(root.modules())
    places = [(parent, name, child) for parent in modules for name, child in parent.named_children() if child in chosen]
    for module in reversed(modules):  # parents stand before their children
        if module in chosen:
            wrapped = wrap(module, **chosen[module])
            vars(wrapped)["_fsdp_unit"].is_fp32 = module in fp32
            for parent, name, child in places:
                if child is module:
                    setattr(parent, name, wrapped)


def fill_meta(module: Module, init: Callable[[Module], object] | None, ignored: Ignored, device: torch.device) -> None:
    """Give what is on the meta device memory and values: by `init(part)` for each part, or `part.reset_parameters()`.

    Parts in wrappers inside have theirs already. `init` has to do both, for the part's own tensors alone.
    Raises: ConfigError where something is left without values.
    """
    parts = [
        (name, part) for name, part in modules_outside_units(module, ignored.modules) if _meta_tensors(part, ignored)
    ]
    if not parts:
        return
    if init is not None:
        for _, part in parts:
            init(part)
        left = [f"{name}.{each}" if name else each for name, part in parts for each in _meta_tensors(part, ignored)]
        if left:
            raise ConfigError(
                f"after param_init_fn {', '.join(left)} are still on the meta device: call "
                "module.to_empty(device=..., recurse=False) in it, then write values"
            )
        return
    for name, part in parts:
        if not callable(getattr(part, "reset_parameters", None)):
            raise ConfigError(
                f"{name or 'the module'} ({type(part).__name__}) is on the meta device and has no reset_parameters(): "
                "pass param_init_fn"
            )
    give_memory(module, device)
    with torch.no_grad():
        for _, part in parts:
            getattr(part, "reset_parameters")()  # noqa: B009 - a Module's attributes have no type


def _meta_tensors(module: Module, ignored: Ignored) -> list[str]:
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    return [
        name for name, tensor in own.items() if tensor is not None and tensor.is_meta and tensor not in ignored.params
    ]


def move_to(device: torch.device, module: Module, ignored: Ignored) -> None:
    """Move what is on the CPU to `device`."""
    for tensor in _own_tensors(module, ignored):
        if tensor.device.type == "cpu" and device.type != "cpu":
            tensor.data = tensor.data.to(device)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(device)


def find_device(device_id: int | str | torch.device | None, mesh: ShardMesh) -> torch.device:
    """The device that `device_id` names, or the one of the ranks' communicator.

    Raises: ConfigError where they are of different kinds.
    """
    if device_id is None:
        return mesh.device
    device = torch.device(device_id)
    if device.type != mesh.device.type:
        raise ConfigError(
            f"device_id={device_id!r} is a {device.type} device, and the ranks of this group communicate on "
            f"{mesh.device.type}: pass a device of that type, or make the group with a backend for {device.type}"
        )
    return device if device.index is not None or device.type == "cpu" else mesh.device


def sync_states(module: Module, mesh: ShardMesh, ignored: Ignored) -> None:
    """Every rank's parameters and buffers become rank 0's. Collective: every rank of `mesh`."""
    broadcast_coalesced(mesh.whole, [tensor.detach() for tensor in _own_tensors(module, ignored)], label="fsdp.init")


def cast_buffers(module: Module, dtype: torch.dtype | None, ignored: Ignored) -> dict[str, torch.dtype]:
    """Cast floating-point buffers; the dtypes they had, by name."""
    before: dict[str, torch.dtype] = {}
    for name, part in modules_outside_units(module, ignored.modules) if dtype is not None else ():
        for own_name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                before[clean_name(f"{name}.{own_name}" if name else own_name)] = buffer.dtype
                part._buffers[own_name] = buffer.to(dtype)
    return before


def _own_tensors(module: Module, ignored: Ignored) -> list[Tensor]:
    """Parameters and buffers outside of wrappers inside; tied ones once."""
    parts = [part for _, part in modules_outside_units(module, ignored.modules)]
    params = [p for part in parts for p in part._parameters.values() if p is not None and p not in ignored.params]
    buffers = [buffer for part in parts for buffer in part._buffers.values() if buffer is not None]
    return list(dict.fromkeys([*params, *buffers]))
