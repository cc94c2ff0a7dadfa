"""Uneven inputs: what a rank that has run out does so that the others can go on. The protocol is torch's Join."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_names import Join, Joinable, JoinHook
from lockstep.errors import ConfigError
from lockstep.parallel.reducer import GradReducer
from lockstep.parallel.replica import BufferSync, broadcast_coalesced


class JoinableReplica(Joinable, abc.ABC):
    """A wrapper around a module of which every rank has a copy: how it goes through inputs that end at other times."""

    reducer: GradReducer
    device: torch.device
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _comm: Communicator
    _buffer_sync: BufferSync
    _divide_by_initial_world_size = True

    @property
    @abc.abstractmethod
    def process_group(self) -> Any:
        """Torch's, or what stands for it."""

    @abc.abstractmethod
    def _synced_params(self) -> list[Tensor]:
        """The parameters that ranks have in common."""

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

    def _follow_others(self) -> None:
        """One step of the others, on a rank without inputs: buffers, whether they synchronise, gradients (zeros)."""
        self.reducer.before_forward()
        self._sync_buffers("PRE_FORWARD", has_inputs=False)
        # whether the others synchronise this step; the next buffers follow from it
        self.require_forward_param_sync = self._check_global_requires_backward_grad_sync(is_joined_rank=True)
        if self.require_forward_param_sync:
            self.reducer.shadow_backward()

    def _take_final_model(self, is_last_joiner: bool) -> None:
        """Everybody has joined: all take the model of a rank that trained to the end."""
        self.reducer.exchange.divide_by = self._comm.world_size
        source = self._find_common_rank(self._comm.rank, is_last_joiner)
        self._buffer_sync.refresh()
        tensors = self._synced_params() + (self._buffer_sync.tensors if self.forward_sync_buffers else [])
        broadcast_coalesced(self._comm, tensors, source, label="ddp.join")


class JoinedReplica(JoinHook):
    """Mirrors the collectives of one step of the ranks that still have inputs."""

    def __init__(self, replica: JoinableReplica, divide_by_initial_world_size: bool) -> None:
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
        self.replica._follow_others()

    @torch.no_grad()
    def post_hook(self, is_last_joiner: bool) -> None:
        self.replica._take_final_model(is_last_joiner)
