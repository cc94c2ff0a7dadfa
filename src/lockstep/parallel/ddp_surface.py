"""What torch's DistributedDataParallel has beside its forward: uneven inputs, hooks, pickle, what libraries touch."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_names import Join, Joinable, JoinHook, TorchDistributedDataParallel
from lockstep.errors import ConfigError
from lockstep.parallel.comm_hooks import CommHook, Fp16Mean, Mean
from lockstep.parallel.reducer import GradReducer
from lockstep.parallel.replica import BufferSync, broadcast_coalesced

_BUILTIN_HOOKS: dict[str, type[CommHook]] = {"ALLREDUCE": Mean, "FP16_COMPRESS": Fp16Mean}
_OF_THE_GROUP = ("_comm", "reducer", "_frozen", "_comm_hooks", "_builtin_hook")  # made anew where it is unpickled


class TorchSurface(Module, Joinable, abc.ABC):
    """A wrapper that passes for torch's: for isinstance, Join, pickle, and code that calls its private methods."""

    module: Module
    reducer: GradReducer
    device: torch.device
    static_graph: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _comm: Communicator
    _buffer_sync: BufferSync
    _module_parameters: list[Parameter]
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _builtin_hook: Any  # torch's name of it
    _divide_by_initial_world_size = True

    def __init__(self) -> None:
        super().__init__()
        Joinable.__init__(self)

    @property
    @abc.abstractmethod
    def process_group(self) -> Any:
        """Torch's, or what stands for it."""

    @abc.abstractmethod
    def _synced_params(self) -> list[Tensor]:
        """The parameters that ranks have in common."""

    @abc.abstractmethod
    def _build_reducer(self) -> None:
        """Make what averages gradients over the ranks of `_comm`, without a hook."""

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return TorchDistributedDataParallel

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *self._parameters, *self._modules, *self._buffers})

    # ------------------------------------------------------------------ inputs that end at other times

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Context in which ranks may run out of inputs at different times; torch's Join with this module."""
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does while others still train; part of torch's Join protocol."""
        return JoinedReplica(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Part of torch's Join protocol."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Part of torch's Join protocol."""
        return self.process_group

    @property
    def broadcast_buffers(self) -> bool:
        """Older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronised."""
        return self._buffer_sync.tensors

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronised, by name."""
        return self._buffer_sync.named

    def will_sync_module_buffers(self) -> bool:
        """True where the next forward synchronises buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self._buffer_sync.tensors) > 0

    def _sync_buffers(self, location: str, has_inputs: bool = True) -> None:
        if self.will_sync_module_buffers() and self._buffer_sync.is_due(location):
            source = self._find_common_rank(self._comm.rank, has_inputs) if self._join_config.enable else 0
            self.reducer.exchange.futures += self._buffer_sync.sync(self._comm, source)

    def _notify_join(self) -> None:
        """Tell ranks without inputs that this one still has some, and count those that have.

        Collective: inside `join`, every rank, at the start of each forward or in place of it; nothing outside.
        """
        work = Join.notify_join_context(self) if self._join_config.enable else None
        if work is not None:
            work.wait()
            active = int(work.result()[0].item())
            self.reducer.exchange.divide_by = self._comm.world_size if self._divide_by_initial_world_size else active

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:
        flag = torch.tensor([0.0 if is_joined_rank else float(self.reducer.sync)], device=self.device)
        self._comm.all_reduce(flag, label="ddp.join")
        return bool(flag.item())

    def _find_common_rank(self, rank: int, is_candidate: bool) -> int:
        chosen = torch.tensor([rank if is_candidate else -1], device=self.device)
        self._comm.all_reduce(chosen, "max", label="ddp.join")
        assert chosen.item() >= 0, "at least one rank must be a candidate"
        return int(chosen.item())

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
        self._buffer_sync.hook = partial(hook, state)
        self._buffer_sync.location = getattr(comm_hook_location, "name", comm_hook_location)

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


class JoinedReplica(JoinHook):
    """What a rank that has run out of inputs does: the collectives of one step of the ranks that still have some."""

    def __init__(self, replica: TorchSurface, divide_by_initial_world_size: bool) -> None:
        if replica.reducer.exchange.plan_stays:
            raise ConfigError(
                f"rank {replica._comm.rank}: join() of a model whose step a ShardedOptimizer shares out: a rank "
                "without inputs would not step its part, and the others would wait for it in step(). Give every rank "
                "equally many batches, or use an optimizer of torch.optim here, or fully_shard(model) and its "
                "join(batches)"
            )
        self.replica = replica
        replica._divide_by_initial_world_size = divide_by_initial_world_size

    @torch.no_grad()
    def main_hook(self) -> None:
        """One step of the others: buffers, whether they synchronise, gradients (zeros)."""
        replica = self.replica
        replica.reducer.before_forward()
        replica._sync_buffers("PRE_FORWARD", has_inputs=False)
        # whether the others synchronise this step; the next buffers follow from it
        replica.require_forward_param_sync = replica._check_global_requires_backward_grad_sync(is_joined_rank=True)
        if replica.require_forward_param_sync:
            replica.reducer.shadow_backward()

    @torch.no_grad()
    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody has joined: all take the model of a rank that trained to the end."""
        replica, comm = self.replica, self.replica._comm
        replica.reducer.exchange.divide_by = comm.world_size
        source = replica._find_common_rank(comm.rank, is_last_joiner)
        replica._buffer_sync.refresh()
        tensors = replica._synced_params() + (replica._buffer_sync.tensors if replica.forward_sync_buffers else [])
        broadcast_coalesced(comm, tensors, source, label="ddp.join")
