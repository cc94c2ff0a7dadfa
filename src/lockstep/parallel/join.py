"""Uneven inputs: what a rank that has run out does so that the others can go on. The protocol is torch's Join."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lockstep.comm.torch_names import Join, JoinHook
from lockstep.errors import ConfigError
from lockstep.parallel.replica import broadcast_coalesced

if TYPE_CHECKING:
    from lockstep.parallel.ddp import DistributedDataParallel


def notify_join(ddp: DistributedDataParallel) -> None:
    """Tell ranks without inputs that this one still has some, and count those that have.

    Collective: inside `join`, every rank, at the start of each forward or in place of it; nothing outside.
    """
    if not ddp._join_config.enable:
        return
    work = Join.notify_join_context(ddp)
    if work is not None:
        work.wait()
        active = int(work.result()[0].item())
        ddp.reducer.divide_by = ddp._comm.world_size if ddp._divide_by_initial_world_size else active


class JoinedDdp(JoinHook):
    """Mirrors the collectives of one step of the ranks that still have inputs."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        if ddp.reducer.plan_stays:
            raise ConfigError(
                f"rank {ddp._comm.rank}: join() of a model whose step a ShardedOptimizer shares out: a rank without "
                "inputs would not step its part, and the others would wait for it in step(). Give every rank equally "
                "many batches, or use an optimizer of torch.optim here, or fully_shard(model) and its join(batches)"
            )
        self.ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size

    def main_hook(self) -> None:
        """One step of the others: buffers, whether they synchronise, gradients (zeros from here)."""
        ddp = self.ddp
        with torch.no_grad():
            ddp.reducer.before_forward()
            if ddp.will_sync_module_buffers() and ddp._buffer_sync.is_due("PRE_FORWARD"):
                ddp._buffer_sync.sync(ddp._comm, ddp._find_common_rank(ddp._comm.rank, False))
            if ddp._follow_others():
                ddp.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everybody has joined: all take the model of a rank that trained to the end."""
        ddp = self.ddp
        ddp.reducer.divide_by = ddp._comm.world_size
        with torch.no_grad():
            source = ddp._find_common_rank(ddp._comm.rank, is_last_joiner)
            ddp._buffer_sync.refresh()
            tensors = ddp._synced_params() + (ddp.modules_buffers if ddp.forward_sync_buffers else [])
            broadcast_coalesced(ddp._comm, tensors, source, label="ddp.join")
