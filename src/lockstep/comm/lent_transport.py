"""A transport in the hands of several."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport
from lockstep.errors import CommError, TransportClosed


@final
class LentTransport(Transport):
    """The transport of a torch group, for the group itself and for communicators over it, also from several threads.

    Closing it closes nothing: the group does that, by its own transport, when it is destroyed.
    """

    def __init__(self, transport: Transport, owner: Any) -> None:
        self.name = transport.name
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.global_ranks = transport.global_ranks
        self.device = transport.device
        self.timeout_s = transport.timeout_s
        self._transport = transport
        self._owner = weakref.ref(owner)
        self._submitting = threading.Lock()

    @property
    def process_group(self) -> Any:
        """The torch group that lends it."""
        owner = self._owner()
        if owner is None:
            raise TransportClosed(f"rank {self.rank}: the process group under this communicator was destroyed")
        return owner

    def submit(self, op: CommOp) -> Work:
        with self._submitting:
            return self._transport.submit(op)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        return self._transport.split(groups)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._transport.empty(numel, dtype)

    def shared(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._transport.shared(numel, dtype)

    def release(self, tensor: Tensor) -> None:
        self._transport.release(tensor)

    def abort(self, error: CommError) -> None:
        self._transport.abort(error)

    def close(self) -> None:
        pass
