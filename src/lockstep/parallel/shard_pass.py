"""The ranks of a sharded model in step: all run the same operations in the same order, whatever they need themselves.

A pass is one forward or one backward of the whole model. What was run in the last pass of its kind is the plan of the
next: a rank that comes to an operation of the plan first runs all that stand before it, also those it has no use for (a
unit that only other ranks used). So ranks whose needs are as planned exchange nothing but parameters and gradients.

Where a rank needs what the plan does not have (any more), all ranks meet in rounds once they are through with the plan:
each says what it needs next or that it has ended; all run the first of that, until all have ended. A rank that raised
says so there. No flag, no graph walk, and nobody waits for an operation that another rank will never call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE
from lockstep.errors import CollectiveMismatch

Verb = Literal["gather", "reduce"]


class ShardOp(NamedTuple):
    """Gather the parameters of a group, or reduce its gradients."""

    verb: Verb
    group: int


class PassKind(enum.IntEnum):
    """What a rank is about to do."""

    FORWARD = 1
    EVALUATION = 2
    BACKWARD = 3
    LOCAL_BACKWARD = 4


_WORDS = {
    PassKind.FORWARD: "a forward with gradients",
    PassKind.EVALUATION: "a forward without gradients",
    PassKind.BACKWARD: "a backward",
    PassKind.LOCAL_BACKWARD: "a backward without gradient synchronisation",
}

# What a rank says in a round: 1 + 2 * group + (1 for reduce), or one of these
_END, _END_WITH_WASTE, _FAILED = 0, -1, -2


class Outcome(NamedTuple):
    """What all ranks know after a pass."""

    failed: list[int]  # ranks that raised in it
    used: list[int]  # per item of the vector given to `end`: on how many ranks it was 1
    plan: tuple[ShardOp, ...]  # for the next pass of this kind


@final
class ShardPass:
    """One pass on one rank.

    run: executes an operation; its second argument says whether this rank will use the result.
    width: length of the vector given to `end`, equal on all ranks.
    Collective: every rank of `comm` makes one, of the same kind, and ends it; needs may differ between ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        kind: PassKind,
        plan: Sequence[ShardOp],
        run: Callable[[ShardOp, bool], None],
        width: int = 0,
    ) -> None:
        self.kind = kind
        self._comm = comm
        self._plan = tuple(plan)
        self._run = run
        self._width = width
        self._cursor = 0
        self._executed: list[ShardOp] = []
        self._wanted: list[bool] = []  # per executed operation, whether this rank had use for it
        self._early: dict[ShardOp, int] = {}  # prefetched and not asked for yet -> place in `_executed`
        self._kinds = torch.full((1,), int(kind), dtype=torch.int32, device=comm.device)
        self._all_kinds = torch.empty(comm.world_size, dtype=torch.int32, device=comm.device)
        self._hello = DONE
        self._met = comm.world_size == 1
        if not self._met:
            self._hello = comm.all_gather_into_tensor(self._all_kinds, self._kinds, async_op=True, label="shard.begin")

    def meet(self) -> None:
        """Return when all ranks have begun this pass.  Raises: CollectiveMismatch where they do different things."""
        if self._met:
            return
        self._hello.wait()
        self._met = True
        kinds = [PassKind(kind) for kind in self._all_kinds.tolist()]
        if len(set(kinds)) > 1:
            said = "; ".join(f"rank {rank} begins {_WORDS[kind]}" for rank, kind in enumerate(kinds))
            raise CollectiveMismatch(
                f"the ranks of a sharded model are not in step: {said}. Every rank has to call forward and backward "
                "equally often (for ranks with fewer batches there is model.join(batches))"
            )

    def need(self, op: ShardOp) -> None:
        """Return when `op` has been run for this rank: from the plan, or in rounds with the others."""
        if op in self._early:
            self._wanted[self._early.pop(op)] = True
            return
        self.meet()
        if self._comm.world_size == 1:
            self._execute(op, True, True)
            return
        if op in self._plan[self._cursor :]:
            while self._step(wanted=op) != op:
                pass
            return
        self._run_out()
        while self._round(_code(op), op)[0] != op:
            pass

    @property
    def following(self) -> ShardOp | None:
        """The next operation of the plan."""
        return self._plan[self._cursor] if self._cursor < len(self._plan) else None

    def run_ahead(self) -> None:
        """Run the next operation of the plan before it is needed."""
        self.meet()
        op = self._plan[self._cursor]
        self._cursor += 1
        self._early[op] = len(self._executed)
        self._execute(op, wanted=False, keep=True)

    def end(self, used: Sequence[int] | None = None, failed: bool = False) -> Outcome:
        """Run what the plan still has, serve the other ranks until all have ended, and say how it went.

        used: `width` numbers, 0 or 1, added over ranks.
        """
        vector = list(used or [0] * self._width)
        if self._comm.world_size == 1:
            return Outcome([0] if failed else [], vector, ())
        self.meet()
        self._run_out()
        code = _FAILED if failed else _END_WITH_WASTE if not all(self._wanted) else _END
        while True:
            ran, said = self._round(code, None, vector)
            if ran is None:
                break
        codes = said[:, 0].tolist()
        failed_ranks = [rank for rank, word in enumerate(codes) if word == _FAILED]
        if any(word == _END_WITH_WASTE for word in codes):
            self._drop_waste()
        return Outcome(failed_ranks, said[:, 1:].sum(0).tolist(), self._next_plan())

    # ------------------------------------------------------------------ parts of the above

    def _step(self, wanted: ShardOp | None) -> ShardOp:
        op = self._plan[self._cursor]
        self._cursor += 1
        self._execute(op, op == wanted, op == wanted)
        return op

    def _run_out(self) -> None:
        while self._cursor < len(self._plan):
            self._step(wanted=None)

    def _execute(self, op: ShardOp, wanted: bool, keep: bool) -> None:
        self._executed.append(op)
        self._wanted.append(wanted)
        self._run(op, keep)

    def _round(
        self, code: int, mine: ShardOp | None, vector: Sequence[int] | None = None
    ) -> tuple[ShardOp | None, Tensor]:
        """All ranks say what they need; all run the first of it.

        Returns what was run, and what was said [W, 1 + width].
        """
        said = torch.tensor([code, *(vector or [0] * self._width)], dtype=torch.int32, device=self._comm.device)
        everything = torch.empty(self._comm.world_size * said.numel(), dtype=said.dtype, device=said.device)
        self._comm.all_gather_into_tensor(everything, said, label="shard.round")
        everything = everything.view(self._comm.world_size, -1)
        needs = [word for word in everything[:, 0].tolist() if word > 0]
        if not needs:
            return None, everything
        op = _op(min(needs))
        self._execute(op, op == mine, op == mine)
        return op, everything

    def _drop_waste(self) -> None:
        """Take out of the record what no rank had use for."""
        wanted = torch.tensor(self._wanted, dtype=torch.int32, device=self._comm.device)
        self._comm.all_reduce(wanted, "max", label="shard.waste")
        self._executed = [op for op, useful in zip(self._executed, wanted.tolist(), strict=True) if useful]

    def _next_plan(self) -> tuple[ShardOp, ...]:
        executed = tuple(self._executed)
        return executed if executed == self._plan else gather_early(executed)


def gather_early(ops: Sequence[ShardOp]) -> tuple[ShardOp, ...]:
    """`ops` with each gather one reduce earlier: so it is under way while the unit before it still computes.

    Recorded is G2 R2 G1 R1, each gather where it was needed; planned is G2 G1 R2 R1. One step, so that never more than
    two units are whole at a time.
    """
    planned: list[ShardOp] = []
    for op in ops:
        if op.verb == "gather" and planned and planned[-1].verb == "reduce":
            planned.insert(len(planned) - 1, op)
        else:
            planned.append(op)
    return tuple(planned)


def _code(op: ShardOp) -> int:
    return 1 + 2 * op.group + (op.verb == "reduce")


def _op(code: int) -> ShardOp:
    group, is_reduce = divmod(code - 1, 2)
    return ShardOp("reduce" if is_reduce else "gather", group)
