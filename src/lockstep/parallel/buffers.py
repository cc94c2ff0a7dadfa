"""Buffers follow rank 0 (or a hook) from step to step, as in torch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from lockstep.comm.communicator import Communicator
from lockstep.parallel.replica import broadcast_coalesced


class BufferHook(NamedTuple):
    """`hook(state, {name: buffer})` in place of the broadcast; `location` is PRE_FORWARD or POST_FORWARD."""

    hook: Callable[..., Any]
    state: Any
    location: str


class BufferSync:
    """Gives every rank the buffers of one, before or after a forward.

    Collective: `sync` on every rank. `forward_raised`: this rank's last forward raised outside training; when it is
    repeated it does not ask for a second synchronisation, for the other ranks have had theirs.
    """

    def __init__(self, module: Module, ignored: Collection[str]) -> None:
        self.hook: BufferHook | None = None
        self.forward_raised = False
        self._module = module
        self._ignored = ignored
        self.refresh()

    def refresh(self) -> None:
        """Look the buffers up again: modules may replace them (pytorch issue 63916)."""
        self.named = {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}
        self.tensors = list(self.named.values())

    def is_due(self, location: str) -> bool:
        """True where a synchronisation belongs at `location` of the current forward."""
        if not self.tensors:
            return False
        due = location == ("PRE_FORWARD" if self.hook is None else self.hook.location)
        return due and not self.forward_raised

    def sync(self, comm: Communicator, source: int) -> list[Any]:
        """Broadcast from `source`, or run the hook; returns the hook's futures, to wait for at the end of backward."""
        self.refresh()
        # A buffer saved for a backward that is still to come may be overwritten with new values: torch allows it too.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.tensors)):
            if self.hook is None:
                broadcast_coalesced(comm, self.tensors, source, label="ddp.buffers")
                return []
            futures = self.hook.hook(self.hook.state, self.named)
        return [] if futures is None else list(futures) if isinstance(futures, (list, tuple)) else [futures]
