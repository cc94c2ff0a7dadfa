"""torch.nn.parallel.DistributedDataParallel's signature over our GradReducer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.errors import ModelMismatch, UnsupportedArgument
from lockstep.observe.gradients import GradientWatch
from lockstep.observe.model_match import describe_model
from lockstep.parallel.buckets import MIB
from lockstep.parallel.comm_hooks import TorchHook
from lockstep.parallel.ddp_arguments import (
    Device,
    bucket_caps_bytes,
    buffer_sync,
    check_module,
    find_devices,
    sparse_params,
    warn_deprecated,
)
from lockstep.parallel.ddp_surface import TorchSurface
from lockstep.parallel.eager import compile_only_the_module
from lockstep.parallel.grad_exchange import GradExchange
from lockstep.parallel.outputs import move_tensors, output_tensors
from lockstep.parallel.reducer import GradReducer
from lockstep.parallel.replica import BufferSync, broadcast_coalesced, verify_same_model
from lockstep.parallel.stats import logging_data


class DistributedDataParallel(TorchSurface):
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
        self.static_graph = static_graph
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
        exchange = GradExchange(
            [param for _, param in named],
            [name for name, _ in named],
            self._comm,
            caps_bytes=self._caps_bytes,
            sparse=[i for i, (_, param) in enumerate(named) if id(param) in sparse],
            delayed=[i for i, (name, _) in enumerate(named) if name in self._delayed_names],
            skip_unused=self.skip_all_reduce_unused_params,
        )
        exchange.watch = GradientWatch(os.environ.get("LOCKSTEP_GUARD", "on"))
        self.reducer = GradReducer(exchange)
        self._lazy_init_ran = False
        self._comm_hooks = []
        self._builtin_hook = None

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

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket) -> Future[Tensor]` reduce each bucket; it divides by the world size itself.

        `bucket` has the methods of torch's GradBucket, so torch's own hooks run unchanged.
        Raises: TypeError, ValueError for what torch refuses; RuntimeError if a hook is registered already.
        """
        torch_hook = TorchHook(state, hook)
        self._refuse_second_hook()
        self.reducer.exchange.hook = torch_hook
        self._comm_hooks.append((hook, state))

    def _get_ddp_logging_data(self) -> dict[str, int | str]:
        return logging_data(self, os.environ)
