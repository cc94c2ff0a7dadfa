"""The constructor's arguments, checked as torch checks them. Functions of their arguments only."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter

from lockstep.parallel.buckets import BUCKET_CAP_BYTES, FIRST_BUCKET_CAP_BYTES, MIB

Device = int | str | torch.device


def find_devices(
    params: Collection[Parameter], device_ids: Sequence[Device] | None, output_device: Device | None
) -> tuple[str, torch.device, bool, list[int] | None, int | None]:
    """Where a module lives: its kind of device, the first, whether there are several; then torch's two arguments.

    Raises ValueError for what torch refuses.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, but got {device_ids}.")
    devices = {param.device for param in params}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {types}."
        )
    kind = types.pop()
    first = next(iter(params)).device
    if kind == "cpu" or len(devices) > 1 or not device_ids:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
                f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
                f"{output_device}, and module parameters {devices}."
            )
        return kind, first, len(devices) > 1, None, None
    chosen = _device_index(device_ids[0])
    return kind, first, False, [chosen], chosen if output_device is None else _device_index(output_device)


def _device_index(device: Device) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def check_module(
    module: Module, delayed: Sequence[tuple[str, Parameter]] | None, released_by: Parameter | None
) -> None:
    """Refuse what cannot be wrapped, with torch's exception types."""
    if (delayed is None) != (released_by is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    if released_by is not None and not any(param is released_by for param in module.parameters()):
        raise ValueError("param_to_hook_all_reduce is not a parameter of the module")
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    kept = [param for name, param in module.named_parameters() if name not in ignored]
    if not any(param.requires_grad for param in kept):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(isinstance(param, UninitializedParameter) for param in kept):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    on_cpu = all(param.device.type == "cpu" for param in kept)
    if on_cpu and any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def bucket_caps_bytes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> tuple[int, ...]:
    """The cap of each bucket in order of launch, the last one for all further; a small first one by default."""
    if bucket_cap_mb_list:
        return tuple(int(cap * MIB) for cap in bucket_cap_mb_list)
    if bucket_cap_mb is not None:
        return (int(bucket_cap_mb * MIB),)
    return (FIRST_BUCKET_CAP_BYTES, BUCKET_CAP_BYTES)


def buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """(synchronise before each forward, synchronise at construction) from torch's older and newer argument."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warn_deprecated(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated and "
            "its value is ignored when `forward_sync_buffers` is provided."
        )
    elif broadcast_buffers is not None:
        warn_deprecated(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at init."
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    old = True if broadcast_buffers is None else broadcast_buffers
    return old, old


def sparse_params(module: Module) -> list[torch.Tensor]:
    """Parameters whose gradient will be sparse: weights of embeddings made with sparse=True."""
    owners = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [layer.weight for layer in module.modules() if isinstance(layer, owners) and layer.sparse]


def warn_deprecated(message: str) -> None:
    """A FutureWarning that points at the line that constructs the wrapper."""
    warnings.warn(message, FutureWarning, stacklevel=4)
