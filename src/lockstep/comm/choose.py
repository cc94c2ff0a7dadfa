"""Which transport CPU ranks get: shared memory inside a host, Gloo between hosts, both where there are several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.comm import preflight
from lockstep.comm.communicator import Communicator
from lockstep.comm.hierarchical import HierarchicalTransport
from lockstep.comm.process_group import transport_of
from lockstep.comm.shm_transport import ShmTransport
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import Transport
from lockstep.errors import ConfigError, SharedMemoryUnavailable

SWITCH = "LOCKSTEP_SHM"

_over: WeakKeyDictionary[Any, Transport] = WeakKeyDictionary()  # torch's process groups -> what was chosen for them


def wants_shared_memory(environ: Mapping[str, str]) -> bool:
    """False where LOCKSTEP_SHM=off says so.  Raises: ConfigError for another word."""
    word = environ.get(SWITCH, "on").lower()
    if word not in ("on", "off", "1", "0", ""):
        raise ConfigError(f"{SWITCH}={environ[SWITCH]!r}: it is on or off")
    return word not in ("off", "0")


def fastest(plain: Transport) -> Transport:
    """The best transport for the ranks of `plain`, which stays beneath it and is closed with it.

    Collective: every rank of `plain`. Where memory cannot be shared rank 0 warns, and it is `plain` itself.
    """
    if plain.world_size == 1 or plain.device.type != "cpu":
        return plain
    talk = Communicator(plain)
    wanted = talk.all_gather_object([wants_shared_memory(os.environ), preflight.machine_id()], label="shm")
    if not all(wants for wants, _ in wanted):
        return plain
    machines = [machine for _, machine in wanted]
    if len(set(machines)) == len(machines):
        return plain
    try:
        if len(set(machines)) > 1:
            return HierarchicalTransport.over(plain, machines, lambda part: _share(part, beneath=None))
        return _share(plain, beneath=plain)
    except SharedMemoryUnavailable as error:
        if plain.rank == 0:
            text = f"the ranks of this host use {plain.name}, which is several times slower than shared memory: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return plain


def _share(plain: Transport, beneath: Transport | None) -> Transport:
    """Shared memory for the ranks of `plain`, which are on one host.  Raises: SharedMemoryUnavailable."""
    return ShmTransport.meet(
        Communicator(plain).all_gather_object,
        rank=plain.rank,
        world_size=plain.world_size,
        global_ranks=plain.global_ranks,
        timeout_s=plain.timeout_s,
        beneath=beneath,
    )


def over_group(process_group: Any) -> Transport:
    """The best transport for the ranks of a torch process group; of a group of the backend "lockstep" its own.

    Collective: every rank of the group, the first time for each group; it lives as long as the group.
    """
    chosen = transport_of(process_group) or _over.get(process_group)
    if chosen is None:
        chosen = _over[process_group] = fastest(TorchTransport.over(process_group))
    return chosen
