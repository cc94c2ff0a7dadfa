"""Ranks on several hosts: within a host through its own transport, between hosts through one leader for each.

Reductions are bit-equal to `reduction.tree_reduce` over all ranks in rank order, wherever the ranks are. See
`comm/hosts/`: `collectives` is the way of an operation, `links` what a rank talks through, `mail` what leaders send.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast, final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.engine import Engine, EngineWork, Patience
from lockstep.comm.hosts.collectives import HostCollectives
from lockstep.comm.hosts.links import Links
from lockstep.comm.hosts.moving import halves
from lockstep.comm.op import AllWork, CommOp, Work, describe
from lockstep.comm.operands import check_on_cpu
from lockstep.comm.transport import Transport, without_traceback
from lockstep.errors import CollectiveTimeout, CommError, SharedMemoryUnavailable, TransportClosed

T = TypeVar("T")

_LOOK_S = 0.001


def hosts_of(machines: Sequence[str | int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each machine, in order; `machines[rank]` is where a rank runs. Machines in order of first ranks."""
    ranks: dict[str | int, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


@final
class HierarchicalTransport(Transport):
    """The operations of one group of ranks on several hosts.

    All messages go through `wide`, also between ranks of one host: a receive from any rank may meet a sender on either
    side, and a sender cannot know whether its receive is one. So a message within a host costs what one between hosts
    costs. A gather, scatter or all_to_all goes through `wide` for ranks of other hosts and through `local` for those of
    its own, with no leader between.
    Memory: on the leader of a host up to 64 MiB, on other ranks 8 MiB, kept between operations.
    """

    def __init__(
        self, wide: Transport, local: Transport, leaders: Transport | None, hosts: Sequence[Sequence[int]]
    ) -> None:
        """wide: all ranks. local: the ranks of this host, in the same order. leaders: the first rank of each host; None
        on all others. hosts: as `hosts_of` returns them. All three are closed with this one.
        """
        self.name = f"{local.name}+{wide.name}"
        self.stand_where(wide)
        self.beneath = wide
        patience = Patience()
        self._links = Links(self.rank, hosts, local, leaders, patience)
        collectives = HostCollectives(self._links)
        self._engine = Engine(collectives.execute, patience, self.timeout_s, f"lockstep-hosts-{self.rank}")
        self._children: weakref.WeakSet[Transport] = weakref.WeakSet()
        self._closed = False
        weakref.finalize(self, self._engine.close).atexit = False  # one that was forgotten leaves no thread behind

    @classmethod
    def over(
        cls, wide: Transport, machines: Sequence[str | int], make_local: Callable[[Transport], Transport]
    ) -> HierarchicalTransport:
        """A transport over the ranks of `wide`, which run on `machines[rank]`; it takes `wide` over.

        make_local: makes the transport of one host's ranks, and gets a plain one of exactly these ranks to arrange it
        with. What it returns is used, and the plain one closed unless it is that.
        Collective: every rank of `wide`, with the same `machines`.
        Raises: SharedMemoryUnavailable, on every rank alike, where `make_local` raises on one; `wide` stays as it was.
        """
        hosts = hosts_of(machines)
        plain = wide.split(hosts)
        assert plain is not None

        def local() -> Transport:
            made = make_local(plain)
            if made is not plain:
                plain.close()
            return made

        try:
            here = _agreed(wide, local)
        except CommError:
            plain.close()
            raise
        return cls(wide, here, wide.split([[ranks[0] for ranks in hosts]]), hosts)

    def submit(self, op: CommOp) -> Work:
        if self._closed:
            raise TransportClosed(f"{describe(op)}: this communicator was closed on rank {self.rank}")
        if op.algorithm is not None:
            return op.algorithm.start(op)
        if op.kind in ("send", "recv", "batch_send_recv"):
            return self.beneath.submit(op)
        check_on_cpu(op)
        within = HostsWork(self._engine.submit(op, owner=self), self)
        if op.kind not in ("gather", "scatter", "all_to_all"):
            return within
        _, between = halves(op, self._links.here)
        return AllWork([within, self.beneath.submit(between)])

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._links.local.empty(numel, dtype)

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        """On one host: a part of its own transport. Else again one of this class, also with one rank on each host: so
        its sums are those of the tree.
        """
        self.submit(CommOp(-1, "barrier", label="split", async_op=False)).wait()  # `local` is at rest from here on
        links = self._links
        host_of = {rank: host for host, ranks in enumerate(links.hosts) for rank in ranks}
        hosts = [hosts_of([host_of[rank] for rank in group]) for group in groups]
        across = [index for index, places in enumerate(hosts) if len(places) > 1]
        wide = self.beneath.split([groups[index] for index in across])
        leaders = self.beneath.split([[groups[index][ranks[0]] for ranks in hosts[index]] for index in across])
        here = [[links.here.index(rank) for rank in group if rank in links.here] for group in groups]

        local = partial(links.local.split, [group for group in here if group])
        if wide is None:
            child = local()
        else:
            try:
                part = _agreed(wide, local)
            except CommError:
                for made in (wide, leaders):
                    if made is not None:
                        made.close()
                raise
            assert part is not None
            mine = next(index for index, group in enumerate(groups) if self.rank in group)
            child = HierarchicalTransport(wide, part, leaders, hosts[mine])
        if child is not None:
            self._children.add(child)
        return child

    def abort(self, error: CommError) -> None:
        if self._closed or self._engine.patience.aborted is not None:
            return
        self._engine.patience.aborted = without_traceback(error)
        for whole in (*self._children, self.beneath):
            whole.abort(error)
        for part in (self._links.local, self._links.leaders):
            if part is not None:
                part.abort(CommError(f"aborted: {error}"))  # its ranks are counted otherwise than those of `error`

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for child in tuple(self._children):
            child.close()
        self._links.close()  # ends what the engine is in
        self._engine.close()
        self.beneath.close()


@final
class HostsWork(Work):
    """An operation in the engine, whose waits end in time also while the engine is inside another transport's."""

    def __init__(self, work: EngineWork, owner: HierarchicalTransport) -> None:
        self._work = work
        self._owner = owner  # its end closes the engine, which must not happen inside of a wait
        self._error: CollectiveTimeout | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._error is not None:
            raise self._error
        op = self._work.op
        if op is not None and op.async_op and timeout_s is not None:  # a thread is at it
            deadline = time.monotonic() + timeout_s
            while not self._work.is_done():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._error = CollectiveTimeout(
                        f"{describe(op)} on rank {self._owner.rank}: not every rank came within {timeout_s:g} s. "
                        f"Next: look where the other ranks are (log, stack); wait longer if they are only slow"
                    )
                    raise self._error
                time.sleep(min(left_s, _LOOK_S))
        self._work.wait(timeout_s)

    def is_done(self) -> bool:
        return self._work.is_done()


def _agreed(wide: Transport, make: Callable[[], T]) -> T:
    """What `make` returns, where it returns on every rank.

    Collective: every rank of `wide`.  Raises: SharedMemoryUnavailable, on every rank alike, where one could not.
    """
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - of whatever kind: the others must not wait for this rank
        failure = error
    try:
        mine = "" if failure is None else f"rank {wide.rank}: {failure}"
        told = Communicator(wide).all_gather_object(mine, label="hosts")
        if any(told):
            raise SharedMemoryUnavailable(next(text for text in told if text)) from failure
    except CommError:
        if isinstance(made, Transport):
            made.close()
        raise
    return cast(T, made)
