"""Ranks that need different things run the same operations in the same order, and each what it needs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CollectiveMismatch
from lockstep.parallel.shard_pass import Outcome, PassKind, ShardOp, ShardPass, gather_early
from lockstep.testing.worlds import run_threads


def ops(text: str) -> tuple[ShardOp, ...]:
    """`G2 R2`: gather group 2, reduce group 2."""
    return tuple(ShardOp("gather" if word[0] == "G" else "reduce", int(word[1:])) for word in text.split())


def words(found: Sequence[ShardOp]) -> str:
    return " ".join(f"{op.verb[0].upper()}{op.group}" for op in found)


def early(text: str, units: Sequence[int] = range(9)) -> str:
    given = ops(text)
    return words([given[place] for place in gather_early(given, units)])


@pytest.mark.parametrize(
    ("needed", "planned"),
    [
        ("", ""),
        ("G0 G1 G2", "G0 G1 G2"),
        ("R2 R1 R0", "R2 R1 R0"),
        ("G2 R2 G1 R1 G0 R0", "G2 G1 R2 G0 R1 R0"),
        ("R0 G2 R2 R3 G1 R1", "G2 R0 R2 G1 R3 R1"),
        ("G2 R2 G2 R2", "G2 G2 R2 R2"),
        ("G3 R3 G2 G1 G0 R0", "G3 G2 R3 G1 G0 R0"),  # frozen: each waits for the one before it
    ],
)
def test_gathers_come_one_reduce_earlier(needed: str, planned: str) -> None:
    assert early(needed) == planned


def test_all_groups_of_one_unit_come_early() -> None:
    units = [0, 1, 1, 2]
    assert early("G3 R3 G2 G1 R2 R1 G0 R0", units) == "G3 G2 G1 R3 R2 G0 R1 R0"
    assert early("G3 R3 G2 G1 G0 R0", units) == "G3 G2 G1 R3 G0 R0"


class Counter(TransportLayer):
    """Counts the rounds."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.rounds = 0

    def submit(self, op: CommOp) -> Work:
        self.rounds += op.label == "shard.round"
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Counter:
        return Counter(inner)


class Went(NamedTuple):
    """One pass on one rank."""

    ran: str
    kept: str
    outcome: Outcome
    rounds: int
    idle: int  # how many groups at most were there and not needed


class Rank:
    """Goes through passes; in every operation the ranks tell each other which one they are at."""

    def __init__(self, comm: Communicator) -> None:
        self.counter = Counter(comm.transport)
        self.comm = Communicator(self.counter)
        self.plan: tuple[ShardOp, ...] = ()

    def go(
        self,
        needs: str,
        kind: PassKind = PassKind.BACKWARD,
        *,
        ahead: int = 0,
        used: Sequence[int] = (),
        fails: bool = False,
    ) -> Went:
        """`ahead`: how many gathers of the plan to run before the first need."""
        ran: list[ShardOp] = []
        kept: list[ShardOp] = []
        whole: set[int] = set()  # groups that this rank has now
        self.counter.rounds = 0

        def run(_: ShardPass, op: ShardOp, keep: bool) -> bool:
            assert set(self.comm.all_gather_object(words([op]))) == {words([op])}  # all ranks are at the same one
            ran.append(op)
            if not keep or (op.verb == "gather" and op.group in whole):
                return False
            kept.append(op)
            whole.update([op.group] if op.verb == "gather" else [])
            return True

        current = ShardPass(self.comm, kind, self.plan, run, lambda op: whole.remove(op.group), range(9), len(used))
        for _ in range(ahead):
            current.run_ahead()
        idle = 0
        for op in ops(needs):
            if op.verb == "reduce":
                whole.discard(op.group)  # given back before its gradients are reduced
            current.need(op)
            assert op.group in whole or op.verb == "reduce"
            idle = max(idle, len(whole - {op.group}))
        outcome = current.end(used, failed=fails)
        self.plan = outcome.plan
        return Went(words(ran), words(kept), outcome, self.counter.rounds, idle)


def idle_pass(comm: Communicator, kind: PassKind, plan: Sequence[ShardOp] = ()) -> ShardPass:
    """One whose operations do nothing."""
    return ShardPass(comm, kind, plan, lambda _, op, keep: keep, lambda op: None, range(9))


def test_the_first_pass_is_in_rounds_and_the_second_is_not() -> None:
    def body(comm: Communicator) -> list[Went]:
        rank = Rank(comm)
        return [rank.go("G2 R2 G1 R1") for _ in range(3)]

    for passes in run_threads(3, body):
        assert [went.ran for went in passes] == ["G2 R2 G1 R1", "G2 G1 R2 R1", "G2 G1 R2 R1"]
        assert [went.rounds for went in passes] == [5, 1, 1]


@pytest.mark.parametrize("user", [0, 1])
def test_a_unit_that_one_rank_uses_has_its_place_in_the_plan(user: int) -> None:
    def body(comm: Communicator) -> list[Went]:
        rank = Rank(comm)
        return [rank.go("G2 R2 G1 R1 G0 R0" if comm.rank == user else "G2 R2 G0 R0") for _ in range(4)]

    for passes in run_threads(2, body):
        assert [went.ran for went in passes] == ["G2 R2 G1 R1 G0 R0"] + ["G2 G1 R2 G0 R1 R0"] * 3
        assert [went.rounds for went in passes] == [7, 1, 1, 1]


def test_a_forward_goes_up_and_a_backward_down() -> None:
    """Where ranks need different units, the one that others come to later waits."""

    def body(comm: Communicator, kind: PassKind) -> str:
        return Rank(comm).go("G1" if comm.rank else "G2", kind).ran

    assert run_threads(2, body, PassKind.FORWARD) == ["G1 G2"] * 2
    assert run_threads(2, body, PassKind.EVALUATION) == ["G1 G2"] * 2
    assert run_threads(2, body, PassKind.BACKWARD) == ["G2 G1"] * 2


def test_what_nobody_needs_any_more_leaves_the_plan() -> None:
    def body(comm: Communicator) -> list[str]:
        rank = Rank(comm)
        return [
            words(rank.go(needs).outcome.plan) for needs in ("G2 R2 G1 R1", "G2 R2", "G2 R2", "G1 R1", "G2 R2 G1 R1")
        ]

    for plans in run_threads(2, body):
        assert plans == ["G2 R2 G1 R1", "G2 R2", "G2 R2", "G1 R1", "G2 R2 G1 R1"]


def test_what_was_run_ahead_is_not_run_again() -> None:
    def body(comm: Communicator) -> tuple[str, str, str]:
        rank = Rank(comm)
        rank.go("G0 G1 G2", PassKind.FORWARD)
        went = rank.go("G0 G1", PassKind.FORWARD, ahead=2)
        return went.ran, went.kept, words(went.outcome.plan)

    assert run_threads(2, body) == [("G0 G1 G2", "G0 G1", "G0 G1")] * 2


def test_what_was_run_ahead_in_vain_is_given_back_when_the_rank_has_passed_it() -> None:
    """Rank 1 runs every second unit only; the others are gathered early for rank 0's sake."""

    def body(comm: Communicator) -> list[int]:
        rank = Rank(comm)
        everything = " ".join(f"G{group} R{group}" for group in range(8, 0, -1))
        half = " ".join(f"G{group} R{group}" for group in range(8, 0, -2))
        return [rank.go(half if comm.rank else everything).idle for _ in range(3)]

    assert run_threads(2, body) == [[0, 1, 1]] * 2


def test_a_forward_gives_back_what_it_gathered_ahead_in_vain() -> None:
    def body(comm: Communicator) -> tuple[str, int]:
        rank = Rank(comm)
        rank.go("G0 G1 G2 G3", PassKind.FORWARD)
        went = rank.go("G2 G3" if comm.rank else "G0 G1 G2 G3", PassKind.FORWARD, ahead=3)
        return went.ran, went.idle

    assert run_threads(2, body) == [("G0 G1 G2 G3", 3), ("G0 G1 G2 G3", 1)]


def test_all_ranks_learn_who_failed_and_what_was_used() -> None:
    def body(comm: Communicator) -> list[Any]:
        rank = Rank(comm)
        rank.go("G1 R1 G0 R0", used=[1, 1])
        failed = rank.go("G1" if comm.rank == 1 else "G1 R1 G0 R0", used=[comm.rank, 1], fails=comm.rank == 1)
        again = rank.go("G1 R1 G0 R0", used=[1, 0])
        return [failed.ran, failed.outcome[:2], again.outcome[:2]]

    for found in run_threads(3, body):
        assert found == ["G1 G0 R1 R0", ([1], [3, 3]), ([], [3, 0])]


def test_ranks_that_do_different_things_all_learn_it_and_can_go_on() -> None:
    """Nothing is said after that, and the plan stays what it was."""

    def body(comm: Communicator) -> tuple[str, bool, str]:
        rank = Rank(comm)
        for _ in range(2):
            rank.go("G1 R1 G0 R0")
        differs = comm.rank == 2
        kind = PassKind.FORWARD if differs else PassKind.BACKWARD
        current = idle_pass(rank.comm, kind, () if differs else rank.plan)
        with pytest.raises(CollectiveMismatch) as raised:
            current.need(ops("G1")[0])
        plan = current.end(failed=True).plan
        return str(raised.value), plan == (() if differs else rank.plan), rank.go("G1 R1 G0 R0").ran

    for message, stays, after in run_threads(3, body, timeout_s=10):
        assert "rank 1 begins a backward; rank 2 begins a forward with gradients." in message
        assert stays
        assert after == "G1 G0 R1 R0"


def test_a_rank_that_begins_anew_in_the_middle_of_a_pass() -> None:
    """What it says is not taken for an operation that it needs."""

    def body(comm: Communicator) -> str:
        current = idle_pass(comm, PassKind.FORWARD)
        current.meet()
        if comm.rank == 1:
            current = idle_pass(comm, PassKind.FORWARD)
        with pytest.raises(CollectiveMismatch) as raised:
            current.need(ops("G0")[0])
        return str(raised.value)

    for message in run_threads(2, body, timeout_s=10):
        assert "rank 0 is in the middle of a pass; rank 1 begins a forward with gradients" in message


def test_a_gather_of_what_is_in_use_is_not_there_later() -> None:
    """The plan has the second gather of a group before its first one has been given back."""

    def body(comm: Communicator) -> str:
        rank = Rank(comm)
        rank.plan = ops("G2 R3 G2 R2")
        return rank.go("G2 R3 R2 G2 R2").ran

    assert run_threads(2, body) == ["G2 G2 R3 R2 G2 R2"] * 2


@pytest.mark.parametrize("seed", range(12))
def test_any_needs_of_any_rank(seed: int) -> None:
    """All run the same operations, and each has what it needs when it needs it (`Rank` looks)."""

    def body(comm: Communicator) -> list[Went]:
        draw = random.Random(seed)  # equal on all ranks
        rank = Rank(comm)
        passes: list[Went] = []
        for _ in range(draw.randrange(2, 6)):
            needs = []
            for _ in range(comm.world_size):
                groups = [group for group in range(5) for _ in range(draw.choice((0, 1, 1, 2)))]
                draw.shuffle(groups)
                needs.append(" ".join(f"G{group} R{group}" for group in groups))
            passes += [rank.go(needs[comm.rank]) for _ in range(draw.choice((1, 3)))]
        return passes

    by_rank = run_threads(2 + seed % 3, body)
    assert len({tuple((went.ran, went.outcome.plan) for went in passes) for passes in by_rank}) == 1
