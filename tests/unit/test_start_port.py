"""The port where the ranks of several machines meet: another for each start, which nobody gets before rank 0."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.comm.preflight import keep_port
from lockstep.launch.start_port import PortForEachStart

_OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class _Torch(RendezvousHandler):
    """One machine's part; its stores are those of the others too."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank, self.store, self.starts, self.said = rank, store, 0, ""

    def next_rendezvous(self) -> RendezvousInfo:
        self.said, self.starts = os.environ.get(_OWN_STORES, ""), self.starts + 1
        here = RendezvousStoreInfo("127.0.0.1", 1)
        return RendezvousInfo(PrefixStore(f"start {self.starts}", self.store), self.rank, 2, here)

    def get_backend(self) -> str:
        return "c10d"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        raise AssertionError

    def num_nodes_waiting(self) -> int:
        return 3

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """Its first loop opens a pipe, which stays."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("own", [None, "0"])
def test_all_machines_are_told_of_one_port_of_each_start(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_OWN_STORES, raising=False)
    if own is not None:
        monkeypatch.setenv(_OWN_STORES, own)
    store = HashStore()
    torch = _Torch(0, store)
    first, second = PortForEachStart(torch), PortForEachStart(_Torch(1, store))
    ports = []
    for _ in range(2):
        infos = [first.next_rendezvous(), second.next_rendezvous()]
        places = [info.bootstrap_store_info for info in infos]
        assert [info.rank for info in infos] == [0, 1]
        assert {place.master_addr for place in places} == {"127.0.0.1"}
        assert len({place.master_port for place in places}) == 1
        ports.append(places[0].master_port)
    assert torch.said == "1"
    assert os.environ.get(_OWN_STORES) == own  # as it was, for the ranks
    assert (first.use_agent_store, first.num_nodes_waiting(), first.get_run_id()) == (False, 3, "job")
    with pytest.raises(OSError, match="in use"), socket.socket() as alone:
        alone.bind(("127.0.0.1", ports[-1]))
    assert first.shutdown()
    with socket.socket() as alone:  # let go of
        alone.bind(("127.0.0.1", ports[-1]))


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_kept_port_is_for_who_asks_for_it_by_number(use_libuv: bool) -> None:
    with keep_port() as kept:
        port = kept.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        store.set("key", "value")
        assert TCPStore("127.0.0.1", port, is_master=False).get("key") == b"value"
        with pytest.raises(Exception, match="in use"):
            TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=use_libuv)  # it is rank 0's
