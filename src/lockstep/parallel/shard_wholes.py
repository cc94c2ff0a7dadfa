"""Which units are whole at which time: placed, gathered ahead of their need, given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from lockstep.comm.communicator import Communicator
from lockstep.parallel.shard_group import ShardGroup, ShardState
from lockstep.parallel.shard_pass import ShardOp, ShardPass
from lockstep.parallel.shard_unit import ShardUnit


@final
class ShardWholes:
    """The whole parameters of all units under one root.

    Collective: all but what says otherwise, on every rank of `comm`, in the same order.
    """

    def __init__(self, units: Sequence[ShardUnit], groups: Sequence[ShardGroup], comm: Communicator) -> None:
        self.sharing = True  # whether ranks of one host may have one copy of the whole parameters
        self._units = units
        self._groups = groups
        self._comm = comm

    # ------------------------------------------------------------------ around a pass

    def place(self) -> None:
        """Parameters may have changed since the last pass: what is whole is gathered again, unless made so by hand."""
        for unit in self._units:
            if not unit.made_by_hand:
                unit.forget_parts()
            self._place(unit)
            if not unit.made_by_hand:
                unit.reshard()
            unit.made_by_hand = False

    def _place(self, unit: ShardUnit) -> None:
        unit.check()
        for group in unit.groups:
            group.place(self.sharing, unit.parts)

    def publish(self, groups: Sequence[ShardGroup]) -> None:
        """Bring the copies that all ranks see up to date."""
        if any(group.is_copied for group in groups):
            for group in groups:
                group.publish()
            self._comm.barrier(label="shard.written")

    def keep_parts(self, of_this_pass: bool) -> None:
        """Whether what is gathered from now on leaves its part for a backward that follows. Not collective."""
        for unit in self._units:
            for group in unit.groups:
                if group.kept_part is not None:
                    group.kept_part.keeps = of_this_pass and unit.parts is not None

    # ------------------------------------------------------------------ in a pass

    def gather(self, current: ShardPass, group: ShardGroup, keep: bool) -> bool:
        """Run the operation of `current` that makes `group` whole; whether it is on its way for this rank."""
        was_sharded = group.state is ShardState.SHARDED
        for_others = group.launch()
        current.begun()
        for_others.wait()
        if was_sharded and not keep:
            group.reshard()
        return was_sharded and keep

    def gather_ahead(self, current: ShardPass, depth: int) -> None:
        """Begin to gather what comes next, until `depth` groups are on their way."""
        gathered = (group for group in self._groups if group.unsharded is not None and group.unsharded.needs_gather)
        for _ in range(depth - sum(group.state is ShardState.GATHERING for group in gathered)):
            following = current.following
            if following is None or following.verb != "gather":
                break
            if self._groups[following.group].state is not ShardState.SHARDED:
                break  # in use: it will be needed again only after it has been given back
            current.run_ahead()

    def give_back(self, op: ShardOp) -> None:
        """What was gathered ahead was passed without use. Not collective."""
        group = self._groups[op.group]
        if group.state is ShardState.GATHERING:
            group.reshard()

    def end_pass(self, failed: bool, in_forward: bool = False) -> None:
        """A backward is through, or a step `failed` on some rank. Not collective, but on all ranks.

        in_forward: the backward was inside a forward, which takes gradients and is not through.
        """
        for unit in self._units:
            unit.complete.clear()
            unit.forget_parts()
            if failed or (unit.reshard_after_backward and not in_forward):
                unit.reshard()

    # ------------------------------------------------------------------ outside of any pass

    def make_now(self, unit: ShardUnit) -> None:
        """Begin to make the parameters of `unit` whole."""
        unit.forget_parts()
        self._place(unit)
        if any(group.is_shared for group in unit.groups):
            self._comm.barrier(label="shard.read")
        self.publish(unit.groups)
        for group in unit.groups:
            group.launch().wait()
        unit.made_by_hand = True
