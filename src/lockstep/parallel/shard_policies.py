"""In which dtypes a sharded module computes and its gradients travel, and where its shards are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from lockstep.errors import ConfigError
from lockstep.parallel.torch_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


def understand_policy(given: Any) -> MixedPrecisionPolicy:
    """`given`, or a policy that leaves all dtypes as they are.  Raises: ConfigError."""
    policy = MixedPrecisionPolicy() if given is None else given
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ConfigError(f"mp_policy={given!r}: pass a MixedPrecisionPolicy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"mp_policy: {name}={dtype!r} is not a floating-point torch.dtype")
    return policy


def understand_offload(given: Any) -> CPUOffloadPolicy | None:
    """`given`; None where nothing is kept elsewhere than where it is computed with.  Raises: ConfigError."""
    if given is not None and not isinstance(given, OffloadPolicy):
        raise ConfigError(f"offload_policy={given!r}: pass an OffloadPolicy or CPUOffloadPolicy")
    return given if isinstance(given, CPUOffloadPolicy) else None


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with every floating-point tensor in it as `dtype`; None leaves it alone."""
    if dtype is None:
        return value
    return _pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)
