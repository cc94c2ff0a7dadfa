"""Carries out the collectives of one rank of a group on several hosts, one at a time.

Every collective is a row of stages, one for each block of its data:

    up        the ranks of each host bring their block together at the leader, their first rank
    across    the leaders exchange what they have
    down      the leader tells its host whether all is well, and gives it the result

The next block goes up while one is between the hosts. Blocks also bound the memory that this needs.

What goes wrong is told before anybody stops: a leader whose host has failed still sends its message, with the failure
in its first word, and a leader that hears of a failure tells its host. A leader that cannot do so closes its
connections, which the other leaders notice. After a failure nothing can be begun any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import final

from lockstep.comm.hosts.links import HostStage, Links
from lockstep.comm.hosts.mail import Fault
from lockstep.comm.hosts.moving import BarrierStage, BroadcastStage, GatherStage, halves
from lockstep.comm.hosts.summing import AllReduceStage, ReduceScatterStage
from lockstep.comm.op import CommOp, describe
from lockstep.comm.operands import pieces, writing_to
from lockstep.errors import CommError, TransportClosed

BLOCK_BYTES = 4 << 20

_STAGES: dict[str, Callable[[Links, CommOp, int, int, int], HostStage]] = {
    "broadcast": BroadcastStage,
    "reduce": ReduceScatterStage,
    "all_reduce": AllReduceStage,
    "all_gather": GatherStage,
    "reduce_scatter": ReduceScatterStage,
}


@final
class HostCollectives:
    """Every method blocks."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._failure: Fault | None = None

    def execute(self, op: CommOp) -> None:
        """Do what `op` says; of a gather, scatter or all_to_all the part within this host.  Raises: CommError."""
        if self._failure is not None:
            text = f"an earlier operation of this group failed: {self._failure.text}"
            raise self._failure._replace(text=text).error(self._place(op), self.links.rank)
        try:
            with writing_to(op.outputs):
                if op.kind in ("gather", "scatter", "all_to_all"):
                    part, _ = halves(op, self.links.here)
                    if part is not None:
                        self._on_host(lambda: self.links.within(part, 0), op)
                else:
                    self._drive(stages_of(self.links, op), op)
        except CommError as error:
            self._failure = Fault.again(error, self.links.rank, self._place(op))
            if self.links.is_closing():
                raise self._closed(op) from error
            raise
        except BaseException as error:  # only this rank knows: the others notice that it has left
            self._failure = Fault(
                "CommError", f"interrupted by {type(error).__name__}: {error}", speaker=self.links.rank
            )
            self.hang_up()
            self.links.local.close()
            raise

    def hang_up(self) -> None:
        """Let the other leaders notice that this one does not answer any more."""
        if self.links.leaders is not None:
            self.links.leaders.close()

    # ------------------------------------------------------------------ stages

    def _drive(self, stages: Iterator[HostStage], op: CommOp) -> None:
        """Every block up, across and down; each goes up before the one in front of it comes down."""
        crossing: HostStage | None = None
        for stage in stages:
            self._launch(stage, op)
            if crossing is not None:
                self._land(crossing, op, behind=stage)
            crossing = stage
            if stage.fault is not None:
                break
        if crossing is not None:
            self._land(crossing, op)

    def _launch(self, stage: HostStage, op: CommOp) -> None:
        if self.links.is_closing():
            raise self._closed(op)
        try:
            self._on_host(stage.up, op)
        except CommError as error:
            if self.links.leaders is None:
                raise
            stage.fault = Fault.again(error, self.links.rank, self._place(op))
            stage.cause = error
        if self.links.leaders is not None:
            stage.depart()

    def _land(self, stage: HostStage, op: CommOp, behind: HostStage | None = None) -> None:
        """The end of a block. `behind`: the next one, under way already."""
        links = self.links
        if links.leaders is None:
            fault = self._on_host(lambda: links.listen(op), op)
            if fault is not None:
                raise fault.error(self._place(op), links.rank)
            self._on_host(stage.down, op)
            return
        fault = self._arrive(stage)
        if fault is not None:
            with contextlib.suppress(CommError):  # whoever cannot be told notices by itself what is wrong on its host
                links.tell(fault, op)
            if stage.cause is not None and fault.speaker == links.rank:
                raise stage.cause
            raise fault.error(self._place(op), links.rank)
        try:
            self._on_host(lambda: links.tell(None, op), op)
            self._on_host(stage.down, op)
        except CommError:
            if behind is None or behind.cause is None:
                self.hang_up()  # no message of this leader says that its host has failed
                raise
            self._arrive(behind)  # one does, and what failed there came first
            raise behind.cause from None

    def _arrive(self, stage: HostStage) -> Fault | None:
        """What the leaders say. Where they cannot talk any more, this one hangs up."""
        try:
            return stage.arrive()
        except RuntimeError as error:  # also a kernel that cannot combine this dtype, on every leader
            self.hang_up()
            part = "the group of the hosts' first ranks"
            return stage.fault or Fault.of(error, self.links.rank, part, self.links.hosts)

    def _on_host(self, step: Callable[[], Fault | None], op: CommOp) -> Fault | None:
        """A step among the ranks of this host, whose errors name ranks of the whole group."""
        links = self.links
        try:
            return step()
        except CommError as error:
            here = [[rank] for rank in links.here]
            fault = Fault.of(error, links.rank, "the group of this host's ranks", here)
            raise fault.error(self._place(op), links.rank) from error

    def _closed(self, op: CommOp) -> TransportClosed:
        return TransportClosed(f"{self._place(op)}: this communicator was closed on this rank")

    def _place(self, op: CommOp) -> str:
        return f"{describe(op)} on rank {self.links.rank} of {self.links.world_size}"


def stages_of(links: Links, op: CommOp) -> Iterator[HostStage]:
    """The stages of `op`, one for each block of its data; none where it has no data. Equal on all ranks."""
    if op.kind == "barrier":
        yield BarrierStage(links, op)
        return
    if op.kind == "all_gather":
        lengths = [row.numel() for row in pieces(op.outputs, links.world_size)]
    elif op.kind == "reduce_scatter":
        lengths = [row.numel() for row in pieces(op.inputs, links.world_size)]
    else:
        lengths = [(op.inputs or op.outputs)[0].numel()]
    size = max(tensor.element_size() for tensor in (*op.inputs[:1], *op.outputs[:1]))
    beside = sum(length > 0 for length in lengths) * (max(links.sums_of) if op.reduce else 1)
    width = max(1, BLOCK_BYTES // (size * max(1, beside)))
    longest = max(lengths)
    for number, start in enumerate(range(0, longest, width)):
        yield _STAGES[op.kind](links, op, number % 2, start, min(start + width, longest))
