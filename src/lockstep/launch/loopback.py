"""Where the processes of one machine meet: a store on the loopback interface, a new one for every start."""

from __future__ import annotations

import os
import socket
import uuid
from typing import final

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.errors import LaunchError
from lockstep.launch.doctor.probes import owners

_ADDRESS = "127.0.0.1"


@final
class LoopbackRendezvous(RendezvousHandler):
    """Rendezvous of one machine with itself.

    The launcher holds the store, so no worker listens. Nothing that processes of an earlier start have written can be
    read: their store is gone.
    """

    def __init__(self, run_id: str = "", port: int = 0) -> None:
        self._run_id = run_id or f"lockstep-{uuid.uuid4().hex[:12]}"
        self._port = port  # 0: a free one each time
        self._store: TCPStore | None = None
        self._is_closed = False

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # its port is free again before a fixed one is taken anew
        try:
            listener = socket.create_server((_ADDRESS, self._port))
        except OSError as error:
            held = ", ".join(owners(self._port))
            why = f"is taken by {held}" if held else f"cannot be opened: {os.strerror(error.errno or 0)}"
            raise LaunchError(f"port {self._port} of {_ADDRESS} {why}. Leave out --master-port: any will do") from error
        port = listener.getsockname()[1]
        self._store = TCPStore(
            _ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._is_closed = True
        self._store = None
        return True
