"""Which transport CPU ranks get: shared memory inside a host, Gloo between hosts, both where there are several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from lockstep.comm import preflight
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import HierarchicalTransport
from lockstep.comm.process_group import layered
from lockstep.comm.shm_transport import Exchange, ShmTransport
from lockstep.comm.transport import Transport
from lockstep.errors import ConfigError, SharedMemoryUnavailable

SWITCH = "LOCKSTEP_SHM"


def wants_shared_memory(environ: Mapping[str, str]) -> bool:
    """False where LOCKSTEP_SHM=off says so.  Raises: ConfigError for another word."""
    word = environ.get(SWITCH, "on").lower()
    if word not in ("on", "off", "1", "0", ""):
        raise ConfigError(f"{SWITCH}={environ[SWITCH]!r}: it is on or off")
    return word not in ("off", "0")


def fastest(plain: Transport, exchange: Exchange | None = None, *, group: str = "") -> Transport:
    """The best transport for the ranks of `plain`, which stays beneath it and is closed with it.

    exchange: how the ranks tell each other of it; over `plain` unless given. group: torch's name of one that others
    have made, whose ranks may come late: what watches over its operations does so over these.
    Collective: every rank of `plain`. Where memory cannot be shared rank 0 warns, and it is `plain` itself; so it is
    with one rank on each host.
    """
    if plain.world_size == 1 or plain.device.type != "cpu":
        return plain
    exchange = exchange or Communicator(layered(plain, f"{group} meets") if group else plain).all_gather_object
    wanted = exchange([wants_shared_memory(os.environ), preflight.machine_id()])
    machines = [machine for _, machine in wanted]
    if not all(wants for wants, _ in wanted) or len(set(machines)) == len(machines):
        return plain
    try:
        if len(set(machines)) > 1:
            return HierarchicalTransport.over(plain, machines, _share)
        return _share(plain, exchange, beneath=plain)
    except SharedMemoryUnavailable as error:
        if plain.rank == 0:
            text = f"the ranks of this host use {plain.name}, which is several times slower than shared memory: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return plain


def _share(plain: Transport, exchange: Exchange | None = None, beneath: Transport | None = None) -> Transport:
    """Shared memory for the ranks of `plain`, which are on one host.  Raises: SharedMemoryUnavailable."""
    return ShmTransport.meet(
        exchange or Communicator(plain).all_gather_object,
        rank=plain.rank,
        world_size=plain.world_size,
        global_ranks=plain.global_ranks,
        timeout_s=plain.timeout_s,
        beneath=beneath,
    )
