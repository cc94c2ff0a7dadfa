"""How the ranks of a new torch group meet: over its store first, then over what carries their tensors."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo, distributed_c10d

from lockstep.comm import preflight
from lockstep.comm.choose import fastest
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import Transport
from lockstep.errors import CollectiveTimeout, CommError, PeerLost

_CPU = torch.device("cpu")
_BACKENDS = ProcessGroup.BackendType


class Member(NamedTuple):
    """One rank of a torch group that is being made."""

    store: dist.Store  # of this group alone
    rank: int
    world_size: int
    global_ranks: tuple[int, ...]  # rank in this group -> rank in the job
    timeout_s: float
    name: str


def connect(member: Member) -> tuple[Transport, ProcessGroup]:
    """The transport of a new group, and the plain Gloo group of the same ranks that lies beneath it.

    Collective: every rank of the group.
    Raises: CollectiveTimeout with the ranks that did not come; PeerLost where the store is gone.
    """
    exchange = exchange_over(member)
    plain = plain_transport(member, exchange(preflight.machine_id()))
    return fastest(plain, exchange), plain.process_group


def numbered(member: Member) -> Member:
    """The same member with a store that no earlier group of this name has written to.

    Torch counts its groups anew after destroy_process_group; a store that lives on then holds an earlier group's keys.
    Collective: every rank of the group, which must all have come to the earlier one too. It does not wait for them.
    """
    arrivals = member.store.add("lockstep/arrivals", 1)
    generation = (arrivals - 1) // member.world_size
    return member._replace(store=dist.PrefixStore(f"lockstep/{generation}", member.store))


def exchange_over(member: Member) -> Callable[[Any], list[Any]]:
    """A collective of the group's ranks: every rank's JSON value, in rank order, over the group's store."""
    store = member.store
    rounds = itertools.count()

    def exchange(value: Any) -> list[Any]:
        number = next(rounds)
        keys = [f"exchange/{number}/{rank}" for rank in range(member.world_size)]
        here = f"group {member.name!r} on rank {member.rank} of {member.world_size}"
        try:
            store.set(keys[member.rank], json.dumps(value))
            store.wait(keys, timedelta(seconds=member.timeout_s))
            return [json.loads(store.get(key)) for key in keys]
        except dist.DistNetworkError as error:
            raise PeerLost(f"{here}: the process that holds the store ended. Next: read its own error") from error
        except RuntimeError as error:
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not late:
                raise
            raise CollectiveTimeout(
                f"{here}: rank(s) {', '.join(map(str, late))} of it did not come within {member.timeout_s:g} s. Next: "
                f"find why they did not start, or did not call init_process_group or new_group for this group",
                late,
            ) from error

    return exchange


def nccl_group(member: Member, options: Any) -> ProcessGroup:
    """An NCCL group that torch.distributed does not list. options: ProcessGroupNCCL.Options, or None."""
    if not dist.is_nccl_available():
        raise CommError(f"group {member.name!r}: the backend asks for nccl, which this build of torch does not have")
    from torch.distributed import ProcessGroupNCCL

    if options is None:
        options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=member.timeout_s)
    options.global_ranks_in_group = list(member.global_ranks)
    options.group_name = distributed_c10d.GroupName(member.name)
    store = dist.PrefixStore("nccl", member.store)
    backend = ProcessGroupNCCL(store, member.rank, member.world_size, options)
    return _unlisted(member, torch.device("cuda"), _BACKENDS.NCCL, backend)


def _unlisted(member: Member, device: torch.device, kind: ProcessGroup.BackendType, backend: Any) -> ProcessGroup:
    group = ProcessGroup(member.store, member.rank, member.world_size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    group._set_group_name(distributed_c10d.GroupName(member.name))
    group._set_group_desc("lockstep")
    return group


def plain_transport(member: Member, machines: Sequence[str]) -> TorchTransport:
    """Gloo between the ranks of a group that torch.distributed does not list, and that needs no listed one to split.

    Its connections are made when they are first needed: it costs under a millisecond where another transport carries
    everything. With all ranks on one machine only loopback listens.
    machines: rank -> machine, equal for ranks that share one.
    """

    def part(name: str, ranks: Sequence[int]) -> TorchTransport:
        of_part = member._replace(
            store=dist.PrefixStore(name, member.store),
            rank=list(ranks).index(member.rank),
            world_size=len(ranks),
            global_ranks=tuple(member.global_ranks[rank] for rank in ranks),
            name=f"{member.name}/{name}",
        )
        return plain_transport(of_part, [machines[rank] for rank in ranks])

    on_loopback = len(set(machines)) == 1 and not os.environ.get("GLOO_SOCKET_IFNAME")
    group = _unlisted(member, _CPU, _BACKENDS.GLOO, _gloo(member, on_loopback))
    return TorchTransport(group, _CPU, member.timeout_s, owned=True, global_ranks=member.global_ranks, make_part=part)


def _gloo(member: Member, on_loopback: bool) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - the stub has other names
    if on_loopback:
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
    else:
        options._devices = [ProcessGroupGloo.create_default_device(lazy_init=True)]
    options._timeout = timedelta(seconds=member.timeout_s)
    options.global_ranks_in_group = list(member.global_ranks)
    options.group_name = member.name
    return ProcessGroupGloo(dist.PrefixStore("gloo", member.store), member.rank, member.world_size, options)
