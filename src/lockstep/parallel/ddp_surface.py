"""What other libraries touch of torch's DistributedDataParallel beyond its documented methods."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable
from typing import Any

from torch.nn import Module, Parameter

from lockstep.comm import torch_names
from lockstep.comm.torch_names import TorchDistributedDataParallel
from lockstep.errors import ConfigError
from lockstep.parallel.comm_hooks import CommHook, Fp16Mean, Mean
from lockstep.parallel.join import JoinableReplica
from lockstep.parallel.replica import BufferHook

_BUILTIN_HOOKS: dict[str, type[CommHook]] = {"ALLREDUCE": Mean, "FP16_COMPRESS": Fp16Mean}
_OF_THE_GROUP = ("_comm", "reducer", "_frozen", "_comm_hooks", "_builtin_hook")  # made anew where it is unpickled


class TorchSurface(Module, JoinableReplica, abc.ABC):
    """A wrapper that passes for torch's: for isinstance, pickle, and code that calls its private methods."""

    module: Module
    static_graph: bool
    _module_parameters: list[Parameter]
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _builtin_hook: Any  # torch's name of it

    @abc.abstractmethod
    def _build_reducer(self) -> None:
        """Make what averages gradients over the ranks of `_comm`, without a hook."""

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return TorchDistributedDataParallel

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *self._parameters, *self._modules, *self._buffers})

    # ------------------------------------------------------------------ hooks

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._refuse_second_hook()
        self.reducer.exchange.hook = _BUILTIN_HOOKS[torch_names.builtin_hook_name(comm_hook_type)]()
        self._builtin_hook = comm_hook_type

    def _refuse_second_hook(self) -> None:
        if self.reducer.exchange.plan_stays:
            raise ConfigError("a ShardedOptimizer reduces this module's gradients: it takes no communication hook")
        if self._comm_hooks or self._builtin_hook is not None:
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

    # ------------------------------------------------------------------ pickle

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        if not torch_names.is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THE_GROUP}
        return {**state, "require_backward_grad_sync": self.reducer.sync}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sync = state.pop("require_backward_grad_sync", True)
        super().__setstate__(state)
        self._comm = torch_names.communicator_over()
        self._build_reducer()
        self.reducer.sync = sync

    # ------------------------------------------------------------------ the rest

    # Kept by torch for code of the time of DataParallel; they need nothing of the wrapper but its device and `dim`.
    scatter = TorchDistributedDataParallel.scatter
    gather = TorchDistributedDataParallel.gather
    to_kwargs = TorchDistributedDataParallel.to_kwargs
    use_side_stream_for_tensor_copies = True
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        TorchDistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(TorchDistributedDataParallel._get_data_parallel_params)

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
        self.static_graph = True

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


def _empty(cls: type[TorchSurface]) -> TorchSurface:
    return cls.__new__(cls)
