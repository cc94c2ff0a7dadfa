"""torch.nn.parallel.DistributedDataParallel's signature over our GradReducer."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_names import TorchDistributedDataParallel
from lockstep.errors import ConfigError, ModelMismatch, UnsupportedArgument
from lockstep.observe.gradients import GradientWatch
from lockstep.observe.model_match import describe_model
from lockstep.parallel.buckets import MIB
from lockstep.parallel.buffers import BufferHook, BufferSync
from lockstep.parallel.comm_hooks import Fp16Mean, Mean, TorchHook
from lockstep.parallel.ddp_arguments import (
    Device,
    bucket_caps_bytes,
    buffer_sync,
    check_module,
    find_devices,
    sparse_params,
    warn_deprecated,
)
from lockstep.parallel.eager import compile_only_the_module
from lockstep.parallel.join import JoinableReplica
from lockstep.parallel.outputs import move_tensors, output_tensors
from lockstep.parallel.reducer import GradReducer
from lockstep.parallel.replica import broadcast_coalesced, verify_same_model
from lockstep.parallel.stats import logging_data


class DistributedDataParallel(Module, JoinableReplica):
    """Trains copies of `module` on every rank as one: gradients are averaged while backward runs.

    The arguments are those of torch's class and mean the same, with these differences:

    - `process_group` may also be a lockstep Communicator;
    - `find_unused_parameters`, `static_graph`: never needed. Parameters without gradient, on some ranks or on all, and
      re-entrant checkpoints are handled in every step. Both are accepted;
    - `gradient_as_bucket_view`, `batched_grad_copy`: gradients always live in their buckets and are scaled while they
      are copied there. A gradient that the caller keeps is never overwritten by a later step. Both are accepted;
    - `require_backward_grad_sync` may be switched between forward and backward: a step is synchronised if either saw
      it on;
    - `delay_all_reduce_named_params` are reduced after all others; `param_to_hook_all_reduce` must be given with it
      and be a parameter of the module;
    - `mixed_precision`, a private prototype of torch, raises UnsupportedArgument.

    `isinstance(x, torch.nn.parallel.DistributedDataParallel)` is true, so that libraries that look for the wrapper to
    take `.module` out of it find it.

    Collective: construction, and equally many synchronised backward passes, on every rank of the group.
    Memory: one bucket element per parameter element; gradients are views of the buckets.
    Raises: ModelMismatch if ranks built different modules; PeerFailed from backward if another rank's forward or
    backward raised in this step, which then has gradients on no rank; CommError.
    """

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        JoinableReplica.__init__(self)
        compile_only_the_module(DistributedDataParallel, ("forward",), ("_pre_forward", "_post_forward"))
        if mixed_precision is not None:
            raise UnsupportedArgument(
                "mixed_precision", "use torch.autocast around the forward, it does the same in public"
            )
        if check_reduction:
            warn_deprecated(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it."
            )
        self._join_group(module, process_group, device_mesh)
        check_module(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._delayed_names = {name for name, _ in delay_all_reduce_named_params or ()}
        self.parameters_to_ignore = {*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *self._delayed_names}
        self._module_parameters = [p for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
        devices = find_devices(self._module_parameters or list(module.parameters()), device_ids, output_device)
        self.device_type, self.device, self.is_multi_device_module, self.device_ids, self.output_device = devices
        self.module = module
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = None
        self.static_graph = False
        self.require_forward_param_sync = True
        self._caps_bytes = bucket_caps_bytes(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self._caps_bytes)
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in bucket_cap_mb_list or ()]
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.forward_sync_buffers, sync_buffers_now = buffer_sync(broadcast_buffers, forward_sync_buffers)
        self._buffer_sync = BufferSync(module, self.parameters_to_ignore)
        if init_sync:
            rows = describe_model(module, self._never_synced())
            verify_same_model(self._comm, rows)
            broadcast_coalesced(self._comm, self._synced_params() + (self.modules_buffers if sync_buffers_now else []))
        self._build_reducer()
        if static_graph:
            self._set_static_graph()

    # ------------------------------------------------------------------ construction

    def _join_group(self, module: Module, process_group: Any, device_mesh: Any) -> None:
        if process_group is not None and device_mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh is not None:
            self.device_mesh = device_mesh
            process_group = torch_names.mesh_process_group(device_mesh, module)
        is_ours = isinstance(process_group, Communicator)
        self._comm = process_group if is_ours else torch_names.communicator_over(process_group)

    @property
    def process_group(self) -> Any:
        """Torch's process group; the communicator itself where there is none under it."""
        # Not kept here: a Gloo group that outlives its destruction can abort the process at exit.
        return torch_names.process_group_of(self._comm) or self._comm

    def _never_synced(self) -> set[str]:
        return self.parameters_to_ignore - self._delayed_names

    def _synced_params(self) -> list[Tensor]:
        ignored = self._never_synced()
        return [param for name, param in self.module.named_parameters() if name not in ignored]

    def _build_reducer(self) -> None:
        ignored = self._never_synced()
        wrapped = [layer for layer in self.module.modules() if type(layer) is DistributedDataParallel]
        inner = {id(param) for layer in wrapped for param in layer.reducer.params}  # a wrapper inside reduces these
        named = [
            (name, param)
            for name, param in self.module.named_parameters()
            if param.requires_grad and name not in ignored and id(param) not in inner
        ]
        self._frozen = [p for p in self._synced_params() if not p.requires_grad]
        sparse = {id(param) for param in sparse_params(self.module)}
        self.reducer = GradReducer(
            [param for _, param in named],
            [name for name, _ in named],
            self._comm,
            caps_bytes=self._caps_bytes,
            sparse=[i for i, (_, param) in enumerate(named) if id(param) in sparse],
            delayed=[i for i, (name, _) in enumerate(named) if name in self._delayed_names],
            skip_unused=self.skip_all_reduce_unused_params,
        )
        self.reducer.exchange.watch = GradientWatch(os.environ.get("LOCKSTEP_GUARD", "on"))
        self._lazy_init_ran = False
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []

    # ------------------------------------------------------------------ one step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the first gradient that comes back to its output begins the synchronised backward."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            try:
                output = self.module(*inputs, **kwargs)
            except Exception:
                self._forward_raised()
                raise
            return self._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.reducer.before_forward()
        if not self._lazy_init_ran:
            self._lazy_init_ran = True
            self._setup_in_backward_optimizers()
        if torch.is_grad_enabled():
            self._refuse_thawed()
            self.reducer.exchange.stats.mark("forward")
        self._notify_join()
        self._sync_buffers("PRE_FORWARD")
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            return move_tensors(inputs, device), move_tensors(kwargs, device)
        return inputs, kwargs

    def _forward_raised(self) -> None:
        """Tell the others, who are or will be in this step's backward; outside training none of them waits."""
        if self.training and torch.is_grad_enabled() and self.reducer.sync:
            self._sync_buffers("POST_FORWARD")  # whose hook the others run now, if there is one
            self.require_forward_param_sync = True
            self.reducer.abandon_step()
        else:
            self._buffer_sync.forward_raised = True

    def _post_forward(self, output: Any) -> Any:
        self._sync_buffers("POST_FORWARD")
        self._buffer_sync.forward_raised = False
        self.require_forward_param_sync = torch.is_grad_enabled() and self.reducer.sync
        if torch.is_grad_enabled():
            self.reducer.after_forward(output_tensors(output))
        return output

    def _refuse_thawed(self) -> None:
        thawed = [param for param in self._frozen if param.requires_grad]
        if thawed:
            names = [name for name, param in self.module.named_parameters() if any(param is t for t in thawed)]
            raise ModelMismatch(
                f"rank {self._comm.rank}: {', '.join(names)} did not require a gradient when the module was wrapped "
                "and does now; its gradient would differ between ranks. Wrap the module again after thawing."
            )

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside `no_sync`; may also be set directly."""
        return self.reducer.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the next synchronised backward averages the sum.

        Forward and backward both belong inside: if either is outside, gradients are synchronised.
        """
        before = self.reducer.sync
        self.reducer.sync = False
        try:
            yield
        finally:
            self.reducer.sync = before

    # ------------------------------------------------------------------ hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket) -> Future[Tensor]` reduce each bucket; it divides by the world size itself.

        `bucket` has the methods of torch's GradBucket, so torch's own hooks run unchanged.
        Raises: TypeError, ValueError for what torch refuses; RuntimeError if a hook is registered already.
        """
        torch_hook = TorchHook(state, hook)
        self._refuse_second_hook()
        self.reducer.exchange.hook = torch_hook
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._refuse_second_hook()
        self.reducer.exchange.hook = {"ALLREDUCE": Mean, "FP16_COMPRESS": Fp16Mean}[
            torch_names.builtin_hook_name(comm_hook_type)
        ]()
        self._builtin_hook = comm_hook_type

    def _refuse_second_hook(self) -> None:
        if self.reducer.exchange.plan_stays:
            raise ConfigError("a ShardedOptimizer reduces this module's gradients: it takes no communication hook")
        if self._comm_hooks or getattr(self, "_builtin_hook", None) is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = "POST_FORWARD"
    ) -> None:
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self._buffer_sync.hook = BufferHook(hook, state, getattr(comm_hook_location, "name", comm_hook_location))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        overlapped = torch_names.as_overlapped_optimizer(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP.") from error

    def _setup_in_backward_optimizers(self) -> None:
        if any(hasattr(param, "_in_backward_optimizers") for param in self._module_parameters):
            torch_names.take_over_in_backward_optimizers(self)

    # ------------------------------------------------------------------ what other libraries touch

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return TorchDistributedDataParallel

    def __dir__(self) -> list[str]:
        return sorted(
            {*dir(DistributedDataParallel), *self.__dict__, *self._parameters, *self._modules, *self._buffers}
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_ddp, (), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        if not torch_names.is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        left_out = ("_comm", "reducer", "_frozen", "_comm_hooks", "_builtin_hook")
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return {**state, "require_backward_grad_sync": self.require_backward_grad_sync}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sync = state.pop("require_backward_grad_sync", True)
        super().__setstate__(state)
        self._comm = torch_names.communicator_over()
        self._build_reducer()
        self.require_backward_grad_sync = sync

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
        self.static_graph = True

    # Kept by torch for code of the time of DataParallel; they need nothing of the wrapper but its device and `dim`.
    scatter = TorchDistributedDataParallel.scatter
    gather = TorchDistributedDataParallel.gather
    to_kwargs = TorchDistributedDataParallel.to_kwargs
    use_side_stream_for_tensor_copies = True
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        TorchDistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(TorchDistributedDataParallel._get_data_parallel_params)

    def _update_process_group(self, new_process_group: Any) -> None:
        if torch_names.is_member(new_process_group):
            self._comm = torch_names.communicator_over(new_process_group)
            self.reducer.reset_plan(self._comm)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.exchange.rebuilt

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        # Nothing to set: times are taken in every step, five clock readings each.
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        return logging_data(self, os.environ)


def _new_ddp() -> DistributedDataParallel:
    return DistributedDataParallel.__new__(DistributedDataParallel)
