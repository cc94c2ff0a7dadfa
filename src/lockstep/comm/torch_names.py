"""Names of torch.distributed that drop-in classes must inherit, annotate or ask, so that no other file imports it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed import GradBucket as GradBucket
from torch.distributed.algorithms.join import Join, Joinable, JoinHook  # noqa: F401 - imported from here
from torch.distributed.distributed_c10d import _get_default_group, _rank_not_in_group, _world
from torch.nn import Module
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel  # noqa: F401

from lockstep.comm.choose import fastest
from lockstep.comm.communicator import Communicator
from lockstep.comm.process_group import layered, transport_of
from lockstep.comm.torch_transport import TorchTransport, has_gpus
from lockstep.comm.transport import Transport, TransportLayer

_chosen: WeakKeyDictionary[Any, Transport] = WeakKeyDictionary()  # torch's process groups -> what is used over them
_listed: WeakSet[Any] = WeakSet()  # those of them that torch.distributed knew


def default_rank_and_world() -> tuple[int, int] | None:
    """Rank and world size of torch's default group; None where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def communicator_over(process_group: Any = None) -> Communicator:
    """A communicator over a torch process group that exists already; None means torch's default group.

    It has the best transport for these ranks; over a group of the backend "lockstep" its own. Where the group also has
    a backend for the GPUs of this machine, torch's calls, which choose by the tensor.
    Collective: every rank of the group, the first time for each group; the transport lives as long as the group.
    Raises: ValueError, as torch does, where there is no default group.
    """
    process_group = _get_default_group() if process_group is None else process_group
    own = transport_of(process_group)
    if own is not None and not has_gpus(process_group):
        return Communicator(own)
    chosen = _chosen.get(process_group)
    if chosen is None:
        for ended in _listed.difference(_world.pg_map):  # destroyed, but torch's caches of meshes may keep it for ever
            _listed.discard(ended)
            _chosen.pop(ended).close()
        plain = fastest(TorchTransport.over(process_group), group=process_group.group_name)
        chosen = _chosen[process_group] = layered(plain, process_group.group_name)
        if process_group in _world.pg_map:
            _listed.add(process_group)
    return Communicator(chosen)


def flat_group(device_mesh: Any) -> Any:
    """A process group of all ranks of a DeviceMesh. Collective, the first time: every rank of the mesh."""
    if device_mesh.ndim == 1:
        return device_mesh.get_group()
    default = _get_default_group()
    return default if device_mesh.size() == default.size() else device_mesh._flatten().get_group()


def process_group_of(comm: Communicator) -> Any:
    """The torch process group under `comm`; None where it has none (ranks as threads)."""
    transport: Any = comm.transport
    while not hasattr(transport, "process_group") and transport is not None:
        transport = getattr(transport, "inner", None) or getattr(transport, "beneath", None)
    return getattr(transport, "process_group", None)


def on_host(comm: Communicator) -> Communicator:
    """A communicator of the same ranks for tensors in host memory; `comm` itself where there is no other.

    For small messages between GPU ranks that must not wait for the GPU. Who watches over `comm` does over it, too.
    """
    group = process_group_of(comm)
    if comm.device.type == "cpu" or group is None or all(kind.type != "cpu" for kind in group._device_types):
        return comm
    return Communicator(host_transport(comm.transport), name=f"{comm.name}/host")


def host_transport(transport: Transport) -> Transport:
    """See `on_host`: under the same layers, and aborted and closed with `transport`."""
    if isinstance(transport, TransportLayer):
        return transport.over(host_transport(transport.inner))
    assert isinstance(transport, TorchTransport), "there is no other one for GPUs"
    return transport.on_host()


def gloo_threads(process_group: Any) -> int:
    """How many threads Gloo works with in this group; 0 for other backends."""
    if not isinstance(process_group, dist.ProcessGroup) or process_group.name() != "gloo":
        return 0
    return process_group._get_backend(torch.device("cpu")).options._threads  # pyright: ignore[reportAttributeAccessIssue]


def is_default_group(process_group: Any) -> bool:
    """True where `process_group` is torch's default group."""
    return dist.is_initialized() and process_group == _get_default_group()


def is_member(process_group: Any) -> bool:
    """False on a rank for which torch's new_group returned the 'not a member' mark."""
    return not _rank_not_in_group(process_group)


def mesh_process_group(device_mesh: Any, module: Module) -> Any:
    """The group of a one-dimensional DeviceMesh; one sliced from a larger mesh means data over tensor parallelism."""
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def bf16_all_reduce_is_refused() -> bool:
    """True where torch's DDP refuses its bf16 compression hook."""
    from torch.cuda.nccl import version as nccl_version

    cuda = torch.version.cuda is not None or torch.version.hip is not None
    nccl = cuda and dist.is_nccl_available() and nccl_version() >= (2, 10)
    xccl = dist.is_xccl_available() and torch.xpu.is_available()
    return not (nccl or xccl)


def builtin_hook_name(comm_hook_type: Any) -> str:
    """'ALLREDUCE' or 'FP16_COMPRESS' for a member of torch's BuiltinCommHookType."""
    if not isinstance(comm_hook_type, dist.BuiltinCommHookType):
        raise TypeError(f"{comm_hook_type!r} is not a torch.distributed.BuiltinCommHookType")
    return comm_hook_type.name


def as_overlapped_optimizer(optim: type, params: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's wrapper that runs an optimizer of class `optim` on each bucket as it is reduced."""
    from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optim, params, *args, **kwargs)


def take_over_in_backward_optimizers(ddp: Any) -> None:
    """Let optimizers that were set to run during backward run on reduced buckets instead of on local gradients.

    Source: torch.distributed.optim._apply_optimizer_in_backward and torch's DistributedDataParallel.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for param in ddp._module_parameters:
        for handle in param_to_optim_hook_handle_map.get(param, []):
            handle.remove()
    ddp.register_comm_hook(ref(ddp), _apply_optim_in_backward_hook(gradient_is_bucket_view=True))
