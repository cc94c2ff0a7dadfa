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
from typing import Literal, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import all_gather_rows
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

# What a rank says in a round: 1 + 2 * group + (1 for reduce), or one of these; where a pass begins: _HELLO - kind
_END, _END_WITH_WASTE, _FAILED = 0, -1, -2
_HELLO = -10


class Outcome(NamedTuple):
    """What all ranks know after a pass."""

    failed: list[int]  # ranks that raised in it
    used: list[int]  # per item of the vector given to `end`: on how many ranks it was 1
    plan: tuple[ShardOp, ...]  # for the next pass of this kind


class _Early(NamedTuple):
    """An operation that was run ahead."""

    executed: int  # its place among what was run
    due: int  # its place in the plan, as it is needed


@final
class ShardPass:
    """One pass on one rank.

    run: executes an operation of this pass; its last argument says whether this rank will use the result. Returns
        whether that will be there when it is needed. After an error before `begun` it is called again.
    give_back: undoes a gather that was run ahead and that this rank has passed without need of it.
    units: per group, the number of its unit; what one unit needs is gathered at one time.
    width: length of the vector given to `end`, equal on all ranks.
    early: whether gathers are planned one reduction before they were needed last time.
    Collective: every rank of `comm` makes one, of the same kind, and ends it; needs may differ between ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        kind: PassKind,
        plan: Sequence[ShardOp],
        run: Callable[[ShardPass, ShardOp, bool], bool],
        give_back: Callable[[ShardOp], None],
        units: Sequence[int],
        width: int = 0,
        early: bool = True,
    ) -> None:
        self.kind = kind
        self._comm = comm
        self._given = tuple(plan)
        self._order = gather_early(plan, units) if early else tuple(range(len(plan)))  # places in `plan`
        self._plan = tuple(plan[place] for place in self._order)
        self._run = run
        self._give_back = give_back
        self._width = width
        self._cursor = 0
        self._executed: list[ShardOp] = []
        self._useful: list[bool] = []  # per executed operation, whether any rank had use for it
        self._wanted: list[bool] = []  # per executed operation, whether this rank had use for it
        self._early: dict[ShardOp, _Early] = {}  # run ahead and not asked for yet
        self._owed: ShardOp | None = None  # what runs; after an error in it, what the other ranks still wait for
        self._is_over = False  # the ranks turned out to do different things
        self._kinds = torch.full((1,), _HELLO - kind, dtype=torch.int32, device=comm.device)
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
        words = self._all_kinds.tolist()
        if any(word != _HELLO - self.kind for word in words):
            self._refuse(words)

    def _refuse(self, words: Sequence[int]) -> NoReturn:
        """Ranks do different things, and all know it: nothing more is said in this pass."""
        self._is_over = True
        said = "; ".join(f"rank {rank} {_meaning(word)}" for rank, word in enumerate(words))
        raise CollectiveMismatch(
            f"the ranks of a sharded model are not in step: {said}. Every rank has to call forward and backward "
            "equally often (for ranks with fewer batches there is model.join(batches))"
        )

    def need(self, op: ShardOp) -> None:
        """Return when `op` has been run for this rank: from the plan, or in rounds with the others."""
        if op in self._early:
            early = self._early.pop(op)
            self._wanted[early.executed] = True
            self._pass_by(early.due)
            return
        self.meet()
        if self._comm.world_size == 1:
            self._execute(op, True, True)
            return
        if op in self._plan[self._cursor :]:
            self._go_to(op)
            return
        self._run_out()
        while self._round(_code(op), op)[0] != op:
            pass

    def _go_to(self, op: ShardOp) -> None:
        """Run the plan up to `op`. What stands before it ahead of its own need is kept, the rest only others need."""
        target = self._plan.index(op, self._cursor)
        self._pass_by(self._order[target])
        while self._cursor < target:
            if self._order[self._cursor] > self._order[target]:
                self.run_ahead()
            else:
                self._step(wanted=None)
        self._step(wanted=op)

    @property
    def following(self) -> ShardOp | None:
        """The next operation of the plan."""
        return self._plan[self._cursor] if self._cursor < len(self._plan) else None

    def run_ahead(self) -> None:
        """Run the next operation of the plan before it is needed."""
        self.meet()
        op = self._plan[self._cursor]
        due = self._order[self._cursor]
        self._cursor += 1
        if self._execute(op, wanted=False, keep=True):
            self._early[op] = _Early(len(self._executed) - 1, due)

    def end(self, used: Sequence[int] | None = None, failed: bool = False) -> Outcome:
        """Run what the plan still has, serve the other ranks until all have ended, and say how it went.

        used: `width` numbers, 0 or 1, added over ranks, as they are when all have ended.
        """
        used = [0] * self._width if used is None else used
        if self._is_over:
            return Outcome([], list(used), self._given)
        if self._comm.world_size == 1:
            return Outcome([0] if failed else [], list(used), ())
        self.meet()
        if self._owed is not None:
            self._run(self, self._owed, False)
        self._run_out()
        code = _FAILED if failed else _END_WITH_WASTE if not all(self._wanted) else _END
        while True:
            ran, said = self._round(code, None, used)  # which what runs for others may change
            if ran is None:
                break
        codes = said[:, 0].tolist()
        failed_ranks = [rank for rank, word in enumerate(codes) if word == _FAILED]
        self._useful = [True] * len(self._executed)
        if any(word == _END_WITH_WASTE for word in codes):  # take out of the record what no rank had use for
            wanted = torch.tensor(self._wanted, dtype=torch.int32, device=self._comm.device)
            self._comm.all_reduce(wanted, "max", label="shard.waste")
            self._useful = [bool(useful) for useful in wanted.tolist()]
        return Outcome(failed_ranks, said[:, 1:].sum(0).tolist(), self._next_plan())

    # ------------------------------------------------------------------ parts of the above

    def _pass_by(self, due: int) -> None:
        """This rank has come to place `due` of the plan: give back what was to be needed before, and was not."""
        for op in [op for op, early in self._early.items() if early.due < due]:
            del self._early[op]
            self._give_back(op)

    def _step(self, wanted: ShardOp | None) -> None:
        op = self._plan[self._cursor]
        self._cursor += 1
        self._execute(op, op == wanted, op == wanted)

    def _run_out(self) -> None:
        while self._cursor < len(self._plan):
            self._step(wanted=None)

    def _execute(self, op: ShardOp, wanted: bool, keep: bool) -> bool:
        self._executed.append(op)
        self._wanted.append(wanted)
        self._owed = op
        ran = self._run(self, op, keep)
        self._owed = None
        return ran

    def begun(self) -> None:
        """What runs has begun as a whole: the other ranks do not wait for more of it."""
        self._owed = None

    def _round(
        self, code: int, mine: ShardOp | None, vector: Sequence[int] | None = None
    ) -> tuple[ShardOp | None, Tensor]:
        """All ranks say what they need; all run the first of it.

        Returns what was run, and what was said [W, 1 + width].
        """
        said = torch.tensor([code, *(vector or [0] * self._width)], dtype=torch.int32, device=self._comm.device)
        everything = all_gather_rows(self._comm, said, "shard.round")
        words = everything[:, 0].tolist()
        if min(words) <= _HELLO:
            self._refuse(words)
        needs = [word for word in words if word > 0]
        if not needs:
            return None, everything
        op = self._first(needs)
        self._execute(op, op == mine, op == mine)
        return op, everything

    def _first(self, codes: Sequence[int]) -> ShardOp:
        """Of what ranks need, what most probably others are going to need too: forward goes up, backward down."""
        ops = [_op(code) for code in codes]
        goes_up = self.kind in (PassKind.FORWARD, PassKind.EVALUATION)
        return min(ops, key=lambda op: (op.group if goes_up else -op.group, op.verb))

    def _next_plan(self) -> tuple[ShardOp, ...]:
        """What was of use, in the order in which it was needed: the plan's own, and then what came in rounds."""
        places = [*self._order, *range(len(self._order), len(self._executed))]
        ran = sorted(zip(places, self._executed, self._useful, strict=True))
        return tuple(op for _, op, useful in ran if useful)


def gather_early(ops: Sequence[ShardOp], units: Sequence[int]) -> tuple[int, ...]:
    """The places of `ops` with gathers one reduce earlier: they are under way while the unit before them computes.

    Needed is G2 R2 G1 R1, planned is G2 G1 R2 R1. One step, and one unit (`units`: of each group) where several are
    gathered and none reduced, frozen ones: never are more than two units whole at a time.
    """
    planned: list[int] = []
    early = -1  # the unit that was gathered before the reduce at the end of `planned`
    for place, op in enumerate(ops):
        if op.verb == "reduce":
            early = -1
        elif planned and ops[planned[-1]].verb == "reduce" and early in (-1, units[op.group]):
            early = units[op.group]
            planned.insert(len(planned) - 1, place)
            continue
        planned.append(place)
    return tuple(planned)


def _meaning(word: int) -> str:
    return f"begins {_WORDS[PassKind(_HELLO - word)]}" if word <= _HELLO else "is in the middle of a pass"


def _code(op: ShardOp) -> int:
    return 1 + 2 * op.group + (op.verb == "reduce")


def _op(code: int) -> ShardOp:
    group, is_reduce = divmod(code - 1, 2)
    return ShardOp("reduce" if is_reduce else "gather", group)
