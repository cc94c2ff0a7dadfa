"""Reductions of ranks on several hosts, in the order of `tree_reduce` over all of them, wherever they are.

A host brings the sums of the subtrees that lie on it (`reduction.owned_subtrees`): one sum for a host whose ranks are
neighbours and a power of two, every rank's own tensor where neighbours are on different hosts.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from lockstep.comm.hosts.links import HostStage, Links
from lockstep.comm.hosts.mail import Fault, Letters
from lockstep.comm.op import CommOp, Reduction
from lockstep.comm.operands import as_bytes, pieces
from lockstep.comm.reduction import join_subtrees, tree_reduce
from lockstep.comm.transport import Transport

AT_ONCE_BYTES = 256 << 10  # up to here, what all leaders send to all costs less than a second exchange would
_SHARES = 2  # a slot beside those of the two blocks that may be under way


class ReducingStage(HostStage, abc.ABC):
    """The sums of this host's subtrees over `source`, and their way to those hosts that need the whole sum.

    `spans[host]`: the part of the block whose reduction that host gets. None: all get all.
    """

    def __init__(
        self, links: Links, op: CommOp, slot: int, source: Tensor, spans: Sequence[tuple[int, int]] | None
    ) -> None:
        super().__init__(links, op)
        self.reduce: Reduction = op.reduction
        self.slot = slot
        self.source = source
        self.spans = spans
        self.mine = (0, source.numel()) if spans is None else spans[links.host]
        self.sums: list[Tensor] = []  # of this host's subtrees, on the leader
        if links.leaders is not None:
            self._prepare(links.leaders)

    def _prepare(self, leaders: Transport) -> None:
        links, size, sums_of = self.links, self.source.element_size(), self.links.sums_of
        count = sums_of[links.host]
        if self.spans is None:
            self.mail = Letters.shared(leaders, links.buffer, self.slot, max(sums_of) * self.source.nbytes)
            room = self.mail.outgoing(0)[: count * self.source.nbytes]
        else:
            sent = [count * (stop - start) * size for start, stop in self.spans]
            got = [sums * (self.mine[1] - self.mine[0]) * size for sums in sums_of]
            self.mail = Letters.addressed(leaders, links.buffer, self.slot, sent, got)
            room = links.buffer(f"sums {self.slot}", count * self.source.nbytes)
        self.sums = list(room.view(self.source.dtype).view(count, self.source.numel()).unbind())

    def up(self) -> None:
        """Fill `sums` on the leader."""
        links = self.links
        alone: Reduction = "sum" if self.reduce == "mean" else self.reduce
        own = [part for part in links.subtrees if part.owner == links.host]
        if len(own) == 1:  # the tree of this host's transport is the subtree
            step = self.part("reduce", (self.source,), self.sums, 0)._replace(reduce=alone)
            links.within(step, -1)
            return
        raw: list[Tensor] = []
        if links.leaders is not None:
            raw = [torch.empty(0)] * len(links.here)
            spare = links.buffer(f"raw {self.slot}", len(links.here) * self.source.nbytes).view(self.source.dtype)
            rows = spare.view(len(links.here), self.source.numel()).unbind()
            for part, target in zip(own, self.sums, strict=True):
                for rank in range(part.start, part.stop):
                    index = links.here.index(rank)
                    raw[index] = target if part.stop - part.start == 1 else rows[index]
        links.within(self.part("gather", (self.source,), raw, 0), -1)
        for part, target in zip(own, self.sums, strict=False):  # no sums but on the leader
            if part.stop - part.start > 1:
                first = links.here.index(part.start)  # a subtree's ranks are neighbours on their host too
                target.copy_(tree_reduce(raw[first : first + part.stop - part.start], alone))

    def depart(self) -> None:
        if self.spans is not None:
            for host, (start, stop) in enumerate(self.spans):
                if host != self.links.host and start < stop:
                    rows = self.mail.outgoing(host).view(self.source.dtype).view(len(self.sums), stop - start)
                    for row, own in zip(rows, self.sums, strict=True):
                        row.copy_(own[start:stop])
        super().depart()

    def join(self, out: Tensor) -> None:
        """The whole reduction of this host's span, into `out`."""
        start, stop = self.mine
        if start == stop:
            return
        rows: list[Iterator[Tensor]] = []
        for host, count in enumerate(self.links.sums_of):
            if host == self.links.host:
                rows.append(iter([own[start:stop] for own in self.sums]))
            else:
                came = self.mail.incoming(host)[: count * (stop - start) * self.source.element_size()]
                rows.append(iter(came.view(self.source.dtype).view(count, stop - start).unbind()))
        sums = [next(rows[part.owner]) for part in self.links.subtrees]
        join_subtrees(self.links.subtrees, sums, self.reduce, out)


@final
class AllReduceStage(ReducingStage):
    """Small, or two hosts: every leader gets all sums. Else each reduces its share, and then they exchange those."""

    def __init__(self, links: Links, op: CommOp, slot: int, start: int, stop: int) -> None:
        self.block = op.outputs[0].view(-1)[start:stop]
        hosts, count = len(links.hosts), stop - start
        at_once = hosts * max(links.sums_of) <= max(links.sums_of) + 1  # as many bytes as with shares
        at_once = at_once or hosts * max(links.sums_of) * self.block.nbytes <= AT_ONCE_BYTES
        share = -(-count // hosts)
        spans = [(min(h * share, count), min((h + 1) * share, count)) for h in range(hosts)]
        super().__init__(links, op, slot, self.block, None if at_once else spans)

    def arrive(self) -> Fault | None:
        fault = super().arrive()
        if fault is not None:
            return fault
        if self.spans is None:
            self.join(self.block)
            return None
        assert self.links.leaders is not None
        nbytes = [(stop - start) * self.block.element_size() for start, stop in self.spans]
        mail = Letters.shared(self.links.leaders, self.links.buffer, _SHARES, nbytes[0])
        self.join(mail.outgoing(0)[: nbytes[self.links.host]].view(self.block.dtype))
        mail.send(None, self.op)
        fault = mail.wait(self.links.left_s(), self.op)
        for host, (start, stop) in enumerate(self.spans):
            as_bytes(self.block[start:stop]).copy_(mail.incoming(host)[: nbytes[host]])
        return fault

    def down(self) -> None:
        given = (self.block,) if self.links.leaders is not None else ()
        self.links.within(self.part("broadcast", given, (self.block,), 0), 1)


@final
class ReduceScatterStage(ReducingStage):
    """Each host gets the reductions for its own ranks. A reduce is one where all ranks but the root get nothing."""

    def __init__(self, links: Links, op: CommOp, slot: int, start: int, stop: int) -> None:
        order = [rank for ranks in links.hosts for rank in ranks]
        if op.kind == "reduce":
            given = op.inputs[0].view(-1)
            blocks = [given[start:stop] if rank == op.peer else given[:0] for rank in order]
        else:
            rows = pieces(op.inputs, links.world_size)
            blocks = [rows[rank][start:stop] for rank in order]
        filled = [block for block in blocks if block.numel()]
        dtype = op.outputs[0].dtype if op.outputs else op.inputs[0].dtype  # a wider one than that of the elements
        if len(filled) == 1:
            source = filled[0].to(dtype)
        else:
            room = links.buffer(f"packed {slot}", sum(map(Tensor.numel, filled)) * dtype.itemsize, on_host=True)
            source = torch.cat(filled, out=room.view(dtype))
        spans: list[tuple[int, int]] = []
        for ranks in links.hosts:
            first = spans[-1][1] if spans else 0
            here = blocks[sum(map(len, links.hosts[: len(spans)])) :][: len(ranks)]
            spans.append((first, first + sum(block.numel() for block in here)))
        before = sum(map(len, links.hosts[: links.host]))
        self.sizes = [block.numel() for block in blocks[before : before + len(links.here)]]
        self.target = op.outputs[0].view(-1)[start:stop] if op.outputs else source[:0]
        super().__init__(links, op, slot, source, spans)

    def arrive(self) -> Fault | None:
        fault = super().arrive()
        if fault is None:
            nbytes = sum(self.sizes) * self.source.element_size()
            self.result = self.links.buffer(f"result {self.slot}", nbytes, on_host=True).view(self.source.dtype)
            self.join(self.result)
        return fault

    def down(self) -> None:
        if sum(self.sizes):
            given = self.result.split(self.sizes) if self.links.leaders is not None else ()
            self.links.within(self.part("scatter", given, (self.target,), 0), 1)
