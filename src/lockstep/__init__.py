"""lockstep: many PyTorch processes that behave like one training system.

Public names are resolved on first use, so `import lockstep` and `lockstep --help` do not load torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # `typing` takes longer than all else here, and `lockstep` cannot answer a Ctrl-C before that
if TYPE_CHECKING:
    from typing import Any

    from lockstep import errors
    from lockstep.checkpoint.checkpointer import Checkpointer
    from lockstep.checkpoint.rng import rng_state, set_rng_state
    from lockstep.checkpoint.weights import load_safetensors
    from lockstep.comm.communicator import Communicator
    from lockstep.comm.mesh import Mesh
    from lockstep.comm.process_group import register_backend
    from lockstep.data.coverage import Coverage
    from lockstep.data.dataloader import DataLoader
    from lockstep.data.sampler import DistributedSampler
    from lockstep.errors import LockstepError
    from lockstep.launch.worker import REQUEUE, StopRequest
    from lockstep.observe.data_checks import DataCheck
    from lockstep.observe.init import init
    from lockstep.observe.log import log
    from lockstep.observe.replica import ReplicaCheck
    from lockstep.parallel.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
    from lockstep.parallel.ddp import DistributedDataParallel
    from lockstep.parallel.fsdp import FullyShardedDataParallel
    from lockstep.parallel.fsdp_module import FSDPModule
    from lockstep.parallel.fully_shard import fully_shard, register_fsdp_forward_method
    from lockstep.parallel.grad_scaler import GradScaler
    from lockstep.parallel.materialize import materialize
    from lockstep.parallel.naive import average_gradients
    from lockstep.parallel.named_state import whole_state_dict
    from lockstep.parallel.sharded_optimizer import ShardedOptimizer
    from lockstep.parallel.strategy import in_step, microbatch, optimizer_for, parallelize
    from lockstep.parallel.torch_fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        MixedPrecision,
        MixedPrecisionPolicy,
        ModuleWrapPolicy,
        OffloadPolicy,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )
    from lockstep.parallel.train_state import TrainState

__version__ = "0.1.0"

_NAMES = {  # by the module that has them, as above
    "lockstep.checkpoint.checkpointer": ("Checkpointer",),
    "lockstep.checkpoint.rng": ("rng_state", "set_rng_state"),
    "lockstep.checkpoint.weights": ("load_safetensors",),
    "lockstep.comm.communicator": ("Communicator",),
    "lockstep.comm.mesh": ("Mesh",),
    "lockstep.comm.process_group": ("register_backend",),
    "lockstep.data.coverage": ("Coverage",),
    "lockstep.data.dataloader": ("DataLoader",),
    "lockstep.data.sampler": ("DistributedSampler",),
    "lockstep.errors": ("LockstepError", "errors"),
    "lockstep.launch.worker": ("REQUEUE", "StopRequest"),
    "lockstep.observe.data_checks": ("DataCheck",),
    "lockstep.observe.init": ("init",),
    "lockstep.observe.log": ("log",),
    "lockstep.observe.replica": ("ReplicaCheck",),
    "lockstep.parallel.clip": ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"),
    "lockstep.parallel.ddp": ("DistributedDataParallel",),
    "lockstep.parallel.fsdp": ("FullyShardedDataParallel",),
    "lockstep.parallel.fsdp_module": ("FSDPModule",),
    "lockstep.parallel.fully_shard": ("fully_shard", "register_fsdp_forward_method"),
    "lockstep.parallel.grad_scaler": ("GradScaler",),
    "lockstep.parallel.materialize": ("materialize",),
    "lockstep.parallel.naive": ("average_gradients",),
    "lockstep.parallel.named_state": ("whole_state_dict",),
    "lockstep.parallel.sharded_optimizer": ("ShardedOptimizer",),
    "lockstep.parallel.strategy": ("in_step", "microbatch", "optimizer_for", "parallelize"),
    "lockstep.parallel.torch_fsdp": (
        "BackwardPrefetch",
        "CPUOffload",
        "CPUOffloadPolicy",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "MixedPrecision",
        "MixedPrecisionPolicy",
        "ModuleWrapPolicy",
        "OffloadPolicy",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "StateDictType",
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
    ),
    "lockstep.parallel.train_state": ("TrainState",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll] - it reads the imports above


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
        value = module if home == f"lockstep.{name}" else getattr(module, name)
    except AttributeError as error:  # Python would take it for "no such name" and hide what is wrong inside
        raise ImportError(f"{home} cannot be loaded: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
