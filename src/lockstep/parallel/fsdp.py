"""torch.distributed.fsdp.FullyShardedDataParallel's signature over fully_shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.errors import UnsupportedArgument
from lockstep.parallel.clip import clip_grad_norm_
from lockstep.parallel.fsdp1 import optim_state as fsdp_optim_state
from lockstep.parallel.fsdp1 import preparation as fsdp_preparation
from lockstep.parallel.fsdp1 import state as fsdp_state
from lockstep.parallel.fsdp1 import summon as fsdp_summon
from lockstep.parallel.fsdp1.arguments import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    understand_ignored,
    understood,
)
from lockstep.parallel.fsdp1.mesh import mesh_for
from lockstep.parallel.fsdp1.unit import WRAPPED, FsdpUnit, units_in
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.outputs import find_tensors
from lockstep.parallel.shard_context import unit_of
from lockstep.parallel.shard_policies import cast_floats


class FullyShardedDataParallel(Module):
    """Trains `module` with its parameters, gradients and optimizer state cut over the ranks.

    The arguments are those of torch's class, its enums and dataclasses are taken too, and they mean the same, with
    these differences:

    - parameters are DTensors under the names of `module`, never one flat parameter: an optimizer may treat each its own
      way, and frozen ones stand among others. `use_orig_params` is so in effect always, and accepted either way;
    - `process_group` may be a lockstep Communicator, `device_mesh` a lockstep Mesh;
    - gathers run one unit ahead in forward and backward, in the order of the last step, so that at most two units are
      whole at a time. `backward_prefetch=None` lets backward wait for each gather and saves memory; the other values,
      `forward_prefetch` and `limit_all_gathers`, choose other times for the same gathers in torch and nothing here;
    - SHARDED_STATE_DICT holds DTensors, with or without `device_mesh`;
    - `keep_low_precision_grads` and `register_comm_hook` raise UnsupportedArgument.

    `isinstance(x, torch.distributed.fsdp.FullyShardedDataParallel)` is false.

    Collective: construction, and equally many forwards and backwards, on every rank of the group.
    Raises: ConfigError and UnsupportedArgument; what fully_shard raises.
    """

    def __init__(
        self,
        module: Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | Any = None,
        cpu_offload: CPUOffload | Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | Any = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | Any = None,
        ignored_modules: Iterable[Module] | None = None,
        param_init_fn: Callable[[Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[Parameter] | Iterable[Module] | None = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        strategy = understood(ShardingStrategy, sharding_strategy, "sharding_strategy", ShardingStrategy.FULL_SHARD)
        precision = understood(MixedPrecision, mixed_precision, "mixed_precision", MixedPrecision())
        offload = understood(CPUOffload, cpu_offload, "cpu_offload", CPUOffload())
        if backward_prefetch is not None:
            understood(BackwardPrefetch, backward_prefetch, "backward_prefetch", BackwardPrefetch.BACKWARD_PRE)
        ignored = understand_ignored(ignored_modules, ignored_states)
        policy = precision.policy()
        mesh = mesh_for(strategy, process_group, device_mesh)
        device = fsdp_preparation.find_device(device_id, mesh)

        def wrap(part: Module, **overrides: Any) -> FullyShardedDataParallel:
            shared = {
                "process_group": mesh,
                "sharding_strategy": strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "ignored_states": [*ignored.params],
            }
            return FullyShardedDataParallel(part, **{**shared, **overrides})

        fsdp_preparation.wrap_inside(
            module, auto_wrap_policy, None if mixed_precision is None else precision, ignored, wrap
        )
        fsdp_preparation.fill_meta(module, param_init_fn, ignored, device)
        fsdp_preparation.move_to(device, module, ignored)
        if sync_module_states:
            fsdp_preparation.sync_states(module, mesh, ignored)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=strategy.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload.policy(),
            ignored_params=ignored.params,
        )
        unit = unit_of(module)
        assert unit is not None, "fully_shard has made one"
        unit.prefetches_in_backward = backward_prefetch is not None
        for inner in units_in(module):
            inner.is_root = False
        self._fsdp_wrapped_module = module
        self._fsdp_unit = FsdpUnit(self, module, mesh, strategy, precision, ignored)
        fsdp_state.attach_state_dict(self)

    # ------------------------------------------------------------------ what it is

    @property
    def module(self) -> Module:
        """The module inside, also inside an activation checkpoint."""
        return getattr(self._fsdp_wrapped_module, "_checkpoint_wrapped_module", self._fsdp_wrapped_module)

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """What the constructor got."""
        return self._fsdp_unit.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """What the constructor got."""
        return self._fsdp_unit.precision

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:  # not there yet
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        inside: Any = self._fsdp_wrapped_module
        return inside[key]

    def check_is_root(self) -> bool:
        """Whether this wrapper is in no other."""
        return self._fsdp_unit.is_root

    @staticmethod
    def fsdp_modules(module: Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in `module`, which may be one; only those that are in no other of them if `root_only`."""
        found = [unit.wrapper for unit in units_in(module)]
        inner = {id(unit.wrapper) for outer in found for unit in units_in(outer)[1:]} if root_only else set()
        return [each for each in found if isinstance(each, FullyShardedDataParallel) and id(each) not in inner]

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, Module], None, None]:
        """The module inside has the wrapper's name: all names of parameters and buffers are as if it were not there."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint: which child's name is in no state dict."""
        return {"": WRAPPED}

    # ------------------------------------------------------------------ one step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module inside, on inputs cast as `mixed_precision` says."""
        unit = self._fsdp_unit
        precision = unit.precision
        if not unit.ran:
            unit.ran = True
            unit.saved_dtypes = fsdp_preparation.cast_buffers(unit.module, precision.buffer_dtype, unit.ignored)
        if precision.cast_forward_inputs or (unit.is_root and precision.cast_root_forward_inputs):
            args, kwargs = (cast_floats(part, precision.param_dtype) for part in (args, kwargs))
        if not unit.is_fp32:
            return self._fsdp_wrapped_module(*args, **kwargs)
        came_in = next((t.dtype for t in find_tensors([args, kwargs]) if t.is_floating_point()), None)
        args, kwargs = (cast_floats(part, torch.float32) for part in (args, kwargs))
        return cast_floats(self._fsdp_wrapped_module(*args, **kwargs), came_in)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank only; the next backward outside reduces the sum.

        Memory: up to all gradients whole. Raises: RuntimeError on a wrapper inside another.
        """
        self._refuse_inner("no_sync")
        units = units_in(self)
        before = [unit.is_synced for unit in units]
        self._set_synced(units, [False] * len(units))
        try:
            yield
        finally:
            self._set_synced(units, before)

    @staticmethod
    def _set_synced(units: list[FsdpUnit], synced: list[bool]) -> None:
        for unit, value in zip(units, synced, strict=True):
            unit.is_synced = value
            unit.module.set_requires_gradient_sync(value, recurse=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; the norm they had.

        Collective: every rank. Raises: RuntimeError on a wrapper inside another.
        """
        self._refuse_inner("clip_grad_norm_")
        return clip_grad_norm_(list(self.parameters()), max_norm, norm_type)

    def _refuse_inner(self, method: str) -> None:
        if not self._fsdp_unit.is_root:
            raise RuntimeError(f"{method}() on a wrapper inside another: call it on the outermost one")

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Raises UnsupportedArgument."""
        raise UnsupportedArgument(
            "register_comm_hook",
            "gradients are added in the dtype of their shards whatever they travel in, which a hook would not know. To "
            "send less use MixedPrecision(reduce_dtype=torch.bfloat16)",
        )

    def apply(self, fn: Callable[[Module], None]) -> FullyShardedDataParallel:
        """`fn` on every module, children first, with the whole parameters of its unit. Write the same on all ranks.

        Collective: every rank.
        """
        with fsdp_summon.summon_full_params(self, recurse=False):
            return super().apply(fn)

    # ------------------------------------------------------------------ state

    summon_full_params = staticmethod(fsdp_summon.summon_full_params)
    state_dict_type = staticmethod(fsdp_state.state_dict_type)
    set_state_dict_type = staticmethod(fsdp_state.set_state_dict_type)
    get_state_dict_type = staticmethod(fsdp_state.get_state_dict_type)
    optim_state_dict = staticmethod(fsdp_optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(fsdp_optim_state.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(fsdp_optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(fsdp_optim_state.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(fsdp_optim_state.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(fsdp_optim_state.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(fsdp_optim_state.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(fsdp_optim_state.rekey_optim_state_dict)
