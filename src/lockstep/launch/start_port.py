"""Where the ranks of several machines meet: at a port of their own for each start, which nobody can take before."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, final

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.comm.preflight import keep_port
from lockstep.launch.processes import environment

_OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_KEY = "lockstep/port"


@final
class PortForEachStart(RendezvousHandler):
    """`torch`'s rendezvous, after which rank 0 listens, not the launcher.

    torch has one store for all starts, which may lead to a machine that has gone, or names a port that is free as it
    looks; until rank 0 opens it, seconds later, anybody may have got it. Here the launcher of rank 0 keeps it bound
    until the next start: the kernel then gives it to nobody who asks for any port, and to rank 0, who asks for it.
    """

    def __init__(self, torch: RendezvousHandler) -> None:
        self._torch = torch
        self._kept = ExitStack()

    def get_backend(self) -> str:
        return self._torch.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        self._kept.close()
        with environment({_OWN_STORES: "1"}):  # not for the ranks, whose own torchrun would be worse for it
            info = self._torch.next_rendezvous()
        store: Any = info.store  # of this start alone
        if info.rank == 0:
            store.set(_KEY, str(self._kept.enter_context(keep_port()).getsockname()[1]))
        named = info.bootstrap_store_info
        assert named is not None  # torch's say where rank 0 is, of each start
        place = RendezvousStoreInfo(named.master_addr, int(store.get(_KEY)))
        return RendezvousInfo(store, info.rank, info.world_size, place)

    def is_closed(self) -> bool:
        return self._torch.is_closed()

    def set_closed(self) -> None:
        self._torch.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._torch.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._torch.get_run_id()

    def shutdown(self) -> bool:
        self._kept.close()
        return self._torch.shutdown()
