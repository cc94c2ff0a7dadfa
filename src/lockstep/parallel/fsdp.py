"""torch.distributed.fsdp.FullyShardedDataParallel's signature over fully_shard."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.comm import torch_names
from lockstep.errors import ConfigError, UnsupportedArgument
from lockstep.parallel.clip import clip_grad_norm_
from lockstep.parallel.fsdp1 import optim_state, preparation, state, summon
from lockstep.parallel.fsdp1.arguments import HYBRID, RESHARD_AFTER_FORWARD, checked, mesh_for, understand_ignored
from lockstep.parallel.fsdp1.unit import WRAPPED, FsdpUnit, units_in
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.outputs import cast_floats, find_tensors
from lockstep.parallel.torch_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from lockstep.parallel.uneven_inputs import Batch, JoinedBatches

# torch's hooks that only change the dtype; they stop on a CPU, where there are no streams
_COMPRESSED = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


class FullyShardedDataParallel(Module):
    """Trains `module` with its parameters, gradients and optimizer state cut over the ranks.

    The arguments are those of torch's class and mean the same, but:

    - parameters are DTensors under the names of `module`, never one flat parameter: an optimizer may treat each its own
      way, and frozen ones stand among others. `use_orig_params` is so in effect always, and accepted either way;
    - `process_group` may be a lockstep Communicator, `device_mesh` a lockstep Mesh;
    - forward gathers one unit ahead, in the order of the last step, and at most two units are whole at a time: what
      `forward_prefetch=True` and `limit_all_gathers=True` ask for, and what is done without them too;
    - SHARDED_STATE_DICT holds DTensors, with or without `device_mesh`.

    `isinstance(x, torch.distributed.fsdp.FullyShardedDataParallel)` is false.

    Collective: construction, and equally many forwards and backwards, on every rank of the group.
    Raises: ConfigError and UnsupportedArgument; what fully_shard raises.
    """

    def __init__(
        self,
        module: Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
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
        strategy = checked(ShardingStrategy, sharding_strategy, "sharding_strategy", ShardingStrategy.FULL_SHARD)
        precision = checked(MixedPrecision, mixed_precision, "mixed_precision", MixedPrecision())
        offload = checked(CPUOffload, cpu_offload, "cpu_offload", CPUOffload())
        if backward_prefetch is not None:
            checked(BackwardPrefetch, backward_prefetch, "backward_prefetch")
        ignored = understand_ignored(ignored_modules, ignored_states)
        mesh = mesh_for(strategy, process_group, device_mesh)
        preparation.check_device(device_id, mesh)
        wrap = functools.partial(
            FullyShardedDataParallel,
            process_group=mesh,
            sharding_strategy=strategy,
            cpu_offload=offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
            ignored_states=ignored.params,
        )
        fp32 = () if mixed_precision is None else tuple(precision._module_classes_to_ignore)
        preparation.wrap_inside(module, auto_wrap_policy, fp32, ignored, wrap)
        preparation.fill_meta(module, param_init_fn, ignored, mesh.device)
        preparation.move_to(mesh.device, module)
        if sync_module_states:
            preparation.sync_states(module, mesh, ignored)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=None if strategy in RESHARD_AFTER_FORWARD else False,
            # whether inputs are cast depends on who is the root
            mp_policy=MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy() if offload.offload_params else None,
            ignored_params=ignored.params,
        )
        self._fsdp_wrapped_module = module
        self._fsdp_unit = FsdpUnit(self, module, mesh, strategy, precision, ignored)
        self._fsdp_unit.engine.prefetches_in_backward = backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        self._fsdp_unit.engine.gathers_early = backward_prefetch is not None
        if precision.keep_low_precision_grads:
            self._fsdp_unit.module._set_gradients(False, grad_dtype=precision.param_dtype)
        for inner in units_in(module):
            inner.is_root = False
        ranks = mesh.whole if strategy is ShardingStrategy.NO_SHARD else mesh.shard
        self.rank, self.world_size, self.compute_device = ranks.rank, ranks.world_size, mesh.device
        self.process_group = torch_names.process_group_of(ranks)
        self.sharding_strategy, self.mixed_precision = strategy, precision
        state.attach_state_dict(self)

    # ------------------------------------------------------------------ what it is

    @property
    def module(self) -> Module:
        """The module inside, also inside an activation checkpoint."""
        return getattr(self._fsdp_wrapped_module, "_checkpoint_wrapped_module", self._fsdp_wrapped_module)

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
        unit, precision = self._fsdp_unit, self._fsdp_unit.precision
        if unit.saved_dtypes is None:
            unit.saved_dtypes = preparation.cast_buffers(unit)
        if precision.cast_forward_inputs or (unit.is_root and precision.cast_root_forward_inputs):
            args, kwargs = cast_floats((args, kwargs), precision.param_dtype)
        if not unit.is_fp32:
            return self._fsdp_wrapped_module(*args, **kwargs)
        came_in = next((t.dtype for t in find_tensors([args, kwargs]) if t.is_floating_point()), None)
        args, kwargs = cast_floats((args, kwargs), torch.float32)
        return cast_floats(self._fsdp_wrapped_module(*args, **kwargs), came_in)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank only; the next backward outside reduces the sum.

        Memory: up to all gradients whole. Raises: RuntimeError on a wrapper inside another.
        """
        self._refuse_inner("no_sync")
        with self._fsdp_unit.module.no_sync():
            yield

    def join(self, batches: Iterable[Batch], divide_by_initial_world_size: bool = True) -> JoinedBatches[Batch]:
        """Go through `batches`, of which ranks may have differently many: `FSDPModule.join`. Collective: every rank."""
        self._refuse_inner("join")
        return self._fsdp_unit.module.join(batches, divide_by_initial_world_size)

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
        """Let `hook(state, gradient, shard)` put the ranks' mean of whole gradients [W * S] into their shards [S].

        With NO_SHARD, or on one rank, it is `hook(state, gradient)`, in place. It runs on all ranks in the same order,
        once for each reduction. torch's fp16_compress_hook and bf16_compress_hook are not called: gradients travel in
        that dtype, and are added in that of the shards.
        Raises: ConfigError, also where there is one already; UnsupportedArgument for hybrid strategies, as torch does.
        """
        self._refuse_inner("register_comm_hook")
        if not callable(hook):
            raise ConfigError(f"register_comm_hook: hook={hook!r} is not callable")
        if self._fsdp_unit.has_hook:
            raise ConfigError("register_comm_hook: this FullyShardedDataParallel has a hook already")
        hybrid = [unit.strategy.name for unit in units_in(self) if unit.strategy in HYBRID]
        if hybrid:
            raise UnsupportedArgument("register_comm_hook", f"{hybrid[0]} adds along two axes, a hook along one")
        self._fsdp_unit.has_hook = True
        dtype = _COMPRESSED.get(getattr(hook, "__name__", ""))
        changes = {"comm_hook": functools.partial(hook, state)} if dtype is None else {"reduce_dtype": dtype}
        self._fsdp_unit.module._set_gradients(True, **changes)

    def apply(self, fn: Callable[[Module], None]) -> FullyShardedDataParallel:
        """`fn` on every module, children first, with the whole parameters of its unit. Write the same on all ranks.

        Collective: every rank.
        """
        with summon.summon_full_params(self, recurse=False):
            return super().apply(fn)

    # ------------------------------------------------------------------ state

    summon_full_params = staticmethod(summon.summon_full_params)
    state_dict_type = staticmethod(state.state_dict_type)
    set_state_dict_type = staticmethod(state.set_state_dict_type)
    get_state_dict_type = staticmethod(state.get_state_dict_type)
    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_state.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_state.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_state.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_state.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_state.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_state.rekey_optim_state_dict)
