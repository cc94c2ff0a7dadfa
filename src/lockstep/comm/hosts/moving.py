"""Collectives that move data as it is, on several hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor

from lockstep.comm.hosts.links import HostStage, Links
from lockstep.comm.hosts.mail import Fault, Letters
from lockstep.comm.op import CommOp
from lockstep.comm.operands import as_bytes, pieces


@final
class BarrierStage(HostStage):
    """Nobody goes on before the leader's word, which it has from all leaders, which have it from all ranks."""

    def up(self) -> None:
        if self.links.leaders is not None:
            self.mail = Letters.shared(self.links.leaders, self.links.buffer, 0, 0)
        self.links.within(self.part("barrier", (), ()), -1)

    def down(self) -> None:
        """The word was all."""


@final
class BroadcastStage(HostStage):
    """On the root's host the root gives its block to all, so also to the leader."""

    def __init__(self, links: Links, op: CommOp, slot: int, start: int, stop: int) -> None:
        super().__init__(links, op)
        self.root = op.partner
        self.source = next(host for host, ranks in enumerate(links.hosts) if op.peer in ranks)
        self.block = op.outputs[0].view(-1)[start:stop]
        self.given = op.inputs[0].view(-1)[start:stop] if links.rank == op.peer else None
        if links.leaders is not None:
            self.mail = Letters.spread(links.leaders, links.buffer, slot, self.block.nbytes, self.source)

    def up(self) -> None:
        if self.links.host == self.source:
            given = () if self.given is None else (self.given,)
            self.links.within(self.part("broadcast", given, (self.block,), self.links.here.index(self.root)), -1)

    def depart(self) -> None:
        if self.links.host == self.source:
            self.mail.outgoing(0).copy_(as_bytes(self.block))
        super().depart()

    def arrive(self) -> Fault | None:
        fault = super().arrive()
        if fault is None and self.links.host != self.source:
            as_bytes(self.block).copy_(self.mail.incoming(self.source))
        return fault

    def down(self) -> None:
        if self.links.host != self.source:
            given = (self.block,) if self.links.leaders is not None else ()
            self.links.within(self.part("broadcast", given, (self.block,), 0), 1)


@final
class GatherStage(HostStage):
    """all_gather: the ranks of a host exchange among themselves what they have; the leader brings what others have."""

    def __init__(self, links: Links, op: CommOp, slot: int, start: int, stop: int) -> None:
        super().__init__(links, op)
        self.given = op.inputs[0].view(-1)[start:stop]
        rows = pieces(op.outputs, links.world_size)
        self.blocks = [row[start:stop] for row in rows]
        self.runs = _joined(op.outputs, rows, start, stop, links.here)
        if links.leaders is not None:
            longest = max(sum(self.blocks[rank].nbytes for rank in ranks) for ranks in links.hosts)
            self.mail = Letters.shared(links.leaders, links.buffer, slot, longest)

    def up(self) -> None:
        self.links.within(self.part("all_gather", (self.given,), [self.blocks[rank] for rank in self.links.here]), -1)

    def depart(self) -> None:
        for block, place in self._places(self.links.host, self.mail.outgoing(0)):
            place.copy_(block)
        super().depart()

    def arrive(self) -> Fault | None:
        fault = super().arrive()
        for host in range(len(self.links.hosts)):
            if fault is None and host != self.links.host:
                for block, place in self._places(host, self.mail.incoming(host)):
                    block.copy_(place)
        return fault

    def down(self) -> None:
        for run in self.runs:
            given = (run,) if self.links.leaders is not None else ()
            self.links.within(self.part("broadcast", given, (run,), 0), 1)

    def _places(self, host: int, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The block of each rank of `host`, as bytes, and its place in the host's message."""
        start = 0
        for rank in self.links.hosts[host]:
            block = as_bytes(self.blocks[rank])
            yield block, message[start : start + block.numel()]
            start += block.numel()


def _joined(
    outputs: Sequence[Tensor], rows: Sequence[Tensor], start: int, stop: int, without: Sequence[int]
) -> list[Tensor]:
    """The blocks of all ranks but those of `without`; what lies side by side in one tensor is one run."""
    others = [rank for rank in range(len(rows)) if rank not in without and rows[rank][start:stop].numel()]
    if len(outputs) > 1 or start > 0 or stop < rows[0].numel():
        return [rows[rank][start:stop] for rank in others]
    runs: list[tuple[int, int]] = []
    for rank in others:
        if runs and runs[-1][1] == rank:
            runs[-1] = (runs[-1][0], rank + 1)
        else:
            runs.append((rank, rank + 1))
    return [outputs[0].view(-1)[first * stop : last * stop] for first, last in runs]


def halves(op: CommOp, here: Sequence[int]) -> tuple[CommOp | None, CommOp]:
    """A gather, scatter or all_to_all as two: among the ranks of this host (None: nothing), and among all ranks with
    nothing in it for those of the same host.
    """
    empty = (op.inputs or op.outputs)[0].new_empty(0)
    sides = {"inputs": op.inputs, "outputs": op.outputs}
    apart = {name: tuple(empty if i in here else t for i, t in enumerate(side)) for name, side in sides.items()}
    together = {name: tuple(t for i, t in enumerate(side) if i in here) for name, side in sides.items()}
    if op.kind == "all_to_all":
        return op._replace(**together), op._replace(**apart)
    lists, own = ("outputs", "inputs") if op.kind == "gather" else ("inputs", "outputs")
    if op.peer not in here:
        return None, op
    within = op._replace(**{lists: together[lists], "peer": here.index(op.peer)})
    return within, op._replace(**{lists: apart[lists], own: (empty,)})
