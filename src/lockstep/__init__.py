"""lockstep: many PyTorch processes that behave like one training system.

Public names are resolved on first use, so `import lockstep` and `lockstep --help` do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.checkpoint.weights import load_safetensors
    from lockstep.comm.communicator import Communicator
    from lockstep.comm.init import init
    from lockstep.comm.mesh import Mesh
    from lockstep.comm.process_group import register_backend
    from lockstep.data.sampler import DistributedSampler
    from lockstep.parallel.clip import clip_grad_norm_
    from lockstep.parallel.ddp import DistributedDataParallel
    from lockstep.parallel.fsdp import FullyShardedDataParallel
    from lockstep.parallel.fsdp1.arguments import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        ShardingStrategy,
        StateDictType,
    )
    from lockstep.parallel.fsdp_module import FSDPModule
    from lockstep.parallel.fully_shard import fully_shard, register_fsdp_forward_method
    from lockstep.parallel.grad_scaler import GradScaler
    from lockstep.parallel.materialize import materialize
    from lockstep.parallel.naive import average_gradients
    from lockstep.parallel.shard_policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from lockstep.parallel.sharded_optimizer import ShardedOptimizer
    from lockstep.parallel.strategy import in_step, microbatch, optimizer_for, parallelize

__version__ = "0.1.0"

_HOME = {
    "BackwardPrefetch": "lockstep.parallel.fsdp1.arguments",
    "CPUOffload": "lockstep.parallel.fsdp1.arguments",
    "CPUOffloadPolicy": "lockstep.parallel.shard_policies",
    "Communicator": "lockstep.comm.communicator",
    "DistributedDataParallel": "lockstep.parallel.ddp",
    "DistributedSampler": "lockstep.data.sampler",
    "FSDPModule": "lockstep.parallel.fsdp_module",
    "FullyShardedDataParallel": "lockstep.parallel.fsdp",
    "GradScaler": "lockstep.parallel.grad_scaler",
    "Mesh": "lockstep.comm.mesh",
    "MixedPrecision": "lockstep.parallel.fsdp1.arguments",
    "MixedPrecisionPolicy": "lockstep.parallel.shard_policies",
    "OffloadPolicy": "lockstep.parallel.shard_policies",
    "ShardedOptimizer": "lockstep.parallel.sharded_optimizer",
    "ShardingStrategy": "lockstep.parallel.fsdp1.arguments",
    "StateDictType": "lockstep.parallel.fsdp1.arguments",
    "average_gradients": "lockstep.parallel.naive",
    "clip_grad_norm_": "lockstep.parallel.clip",
    "fully_shard": "lockstep.parallel.fully_shard",
    "in_step": "lockstep.parallel.strategy",
    "init": "lockstep.comm.init",
    "load_safetensors": "lockstep.checkpoint.weights",
    "materialize": "lockstep.parallel.materialize",
    "microbatch": "lockstep.parallel.strategy",
    "optimizer_for": "lockstep.parallel.strategy",
    "parallelize": "lockstep.parallel.strategy",
    "register_backend": "lockstep.comm.process_group",
    "register_fsdp_forward_method": "lockstep.parallel.fully_shard",
}

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "Communicator",
    "DistributedDataParallel",
    "DistributedSampler",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GradScaler",
    "Mesh",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedOptimizer",
    "ShardingStrategy",
    "StateDictType",
    "average_gradients",
    "clip_grad_norm_",
    "fully_shard",
    "in_step",
    "init",
    "load_safetensors",
    "materialize",
    "microbatch",
    "optimizer_for",
    "parallelize",
    "register_backend",
    "register_fsdp_forward_method",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except AttributeError as error:  # Python would take it for "no such name" and hide what is wrong inside
        raise ImportError(f"{home} cannot be loaded: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
