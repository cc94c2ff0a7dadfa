"""What one rank of a group on several hosts talks through, and the way of one block of data through it."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.engine import Patience
from lockstep.comm.hosts.mail import WORD_BYTES, Fault, Letters, read_word, write_word
from lockstep.comm.local_exchange import exchange
from lockstep.comm.op import CommOp, Kind
from lockstep.comm.reduction import owned_subtrees
from lockstep.comm.transport import Transport
from lockstep.errors import CommError

_MARGIN = 0.1  # of the limit, at most one second: a host gives up on its own ranks before others give up on the host
_FAREWELL_S = 5.0  # how long a leader that has failed waits for the other leaders to read its word


@final
class Links:
    """What one rank has to talk through: its host's transport, and the other leaders' where it is a leader itself."""

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], local: Transport, leaders: Transport | None, patience: Patience
    ) -> None:
        self.rank = rank
        self.hosts = hosts  # the ranks of each host, in order; hosts in the order of their first ranks
        self.host = next(host for host, ranks in enumerate(hosts) if rank in ranks)
        self.here = hosts[self.host]
        self.world_size = sum(map(len, hosts))
        owners = [next(host for host, ranks in enumerate(hosts) if r in ranks) for r in range(self.world_size)]
        self.subtrees = owned_subtrees(owners)
        self.sums_of = [sum(part.owner == host for part in self.subtrees) for host in range(len(hosts))]
        self.local = local
        self.leaders = leaders
        self._patience = patience
        self._buffers: dict[str, Tensor] = {}
        self._word = torch.zeros(WORD_BYTES, dtype=torch.uint8)

    def is_closing(self) -> bool:
        """Whether this rank is leaving."""
        return self._patience.closing

    def close(self) -> None:
        """Leave both; what is under way in them fails."""
        self._patience.closing = True
        if self.leaders is not None:
            self.leaders.close()
        self.local.close()

    def left_s(self, margins: int = 0) -> float:
        """Seconds that the operation under way may still take, and so many margins more."""
        if self._patience.is_over():
            return 0.0
        margin_s = min(1.0, _MARGIN * self._patience.seconds)
        return max(0.0, self._patience.deadline - time.monotonic() + margins * margin_s)

    def within(self, op: CommOp, margins: int) -> None:
        """Carry out `op` among the ranks of this host."""
        if len(self.here) == 1:
            exchange([op])
            return
        self.local.submit(op._replace(async_op=False)).wait(self.left_s(margins))

    def tell(self, fault: Fault | None, op: CommOp) -> None:
        """The leader's word to the ranks of its host."""
        write_word(self._word, fault, op)
        self.within(CommOp(op.seq, "broadcast", (self._word,), (self._word,), 0, label=op.label), 1)

    def listen(self, op: CommOp) -> Fault | None:
        """What the leader of this host tells the others."""
        self.within(CommOp(op.seq, "broadcast", (), (self._word,), 0, label=op.label), 1)
        return read_word(self._word)

    def buffer(self, name: str, nbytes: int, on_host: bool = False) -> Tensor:
        """Memory [nbytes] kept under this name for the next time. on_host: where the host's transport moves it best."""
        found = self._buffers.get(name)
        if found is None or found.numel() < nbytes:
            with torch.inference_mode(False):  # else no later operation could write to it
                make: Callable[..., Tensor] = self.local.empty if on_host else torch.empty
                found = self._buffers[name] = make(nbytes, dtype=torch.uint8)
        return found[:nbytes]


class HostStage(abc.ABC):
    """One block of one collective. `up` and `down` are called on every rank, `depart` and `arrive` on leaders."""

    mail: Letters

    def __init__(self, links: Links, op: CommOp) -> None:
        self.links = links
        self.op = op
        self.fault: Fault | None = None  # of the way up, on the leader
        self.cause: CommError | None = None  # the same as what the leader raises

    @abc.abstractmethod
    def up(self) -> None:
        """This host's part of the block to the leader."""

    def depart(self) -> None:
        """Start the exchange between hosts; after a fault only its word counts."""
        self.mail.send(self.fault, self.op)

    def arrive(self) -> Fault | None:
        """End the exchange; what a host reports in place of its part."""
        left_s = self.links.left_s()
        return self.mail.wait(left_s if self.fault is None else min(left_s, _FAREWELL_S), self.op)

    @abc.abstractmethod
    def down(self) -> None:
        """The result from the leader to this host's ranks, after the leader's word that all is well."""

    def part(self, kind: Kind, inputs: Sequence[Tensor], outputs: Sequence[Tensor], peer: int | None = None) -> CommOp:
        """One step of this operation among the ranks of this host."""
        return self.op._replace(kind=kind, inputs=tuple(inputs), outputs=tuple(outputs), peer=peer, reduce=None)
