"""In which dtypes a sharded module computes and its gradients travel, and where its shards are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree

from lockstep.errors import ConfigError


@final
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The fields of torch's class of the same name, whose instances are accepted too. None leaves a dtype as it is.

    param_dtype: of the whole parameters and so of the computation; shards stay in their own.
    reduce_dtype: in which gradients travel; by default the one they are computed in. However narrow, ranks' gradients
        are added in the dtype of the shard.
    output_dtype: floating-point outputs of the module are cast to it.
    cast_forward_inputs: whether floating-point inputs are cast to param_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@final
@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing is kept elsewhere than where it is computed with."""


@final
@dataclass(frozen=True)
class CPUOffloadPolicy:
    """Shards, their gradients and so the optimizer's state stay in host memory; on a CPU they are there anyhow.

    pin_memory: whether in pages that a GPU can copy from while it computes.
    """

    pin_memory: bool = True


def understand_policy(given: Any) -> MixedPrecisionPolicy:
    """`given` as our policy, where it has the same fields.  Raises: ConfigError."""
    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, MixedPrecisionPolicy):
        policy = given
    else:
        try:
            policy = MixedPrecisionPolicy(
                given.param_dtype, given.reduce_dtype, given.output_dtype, given.cast_forward_inputs
            )
        except AttributeError as error:
            raise ConfigError(f"mp_policy={given!r}: pass a MixedPrecisionPolicy, lockstep's or torch's") from error
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"mp_policy: {name}={dtype!r} is not a floating-point torch.dtype")
    return policy


def understand_offload(given: Any) -> CPUOffloadPolicy | None:
    """`given`, ours or torch's, as our policy; None where nothing is kept elsewhere.  Raises: ConfigError."""
    if hasattr(given, "pin_memory"):
        return CPUOffloadPolicy(bool(given.pin_memory))
    if given is None or type(given).__name__ == "OffloadPolicy":
        return None
    raise ConfigError(f"offload_policy={given!r}: pass an OffloadPolicy or CPUOffloadPolicy, lockstep's or torch's")


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with every floating-point tensor in it as `dtype`; None leaves it alone."""
    if dtype is None:
        return value
    return _pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value
    )
