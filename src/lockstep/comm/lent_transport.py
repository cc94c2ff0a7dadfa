"""A transport in the hands of several."""

from __future__ import annotations

import threading
import weakref
from typing import Any, final

from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import TransportClosed


@final
class LentTransport(TransportLayer):
    """The transport of a torch group, for the group itself and for communicators over it, also from several threads.

    Closing it closes nothing: the group does that, by its own transport, when it is destroyed.
    """

    def __init__(self, transport: Transport, owner: Any) -> None:
        super().__init__(transport)
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
            return self.inner.submit(op)

    def over(self, inner: Transport) -> Transport:
        return inner  # a part is its maker's own

    def close(self) -> None:
        pass
