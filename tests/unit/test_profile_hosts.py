"""Ranks of several machines: what is said of them is what a run that was made so has, though no two clocks agree.

The truth is worked out by hand, or is that of the same run on one clock, which `test_profile_truth.py` holds to hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_ranks import STEPS, Act, backward, forward, optimizer, recorded, stand, start, wait

from lockstep.observe.profile.run_record import RankRecord, Run
from lockstep.observe.profile.verdict import Verdict, judge

Waited = dict[tuple[int, int], float]  # (who, for whom): milliseconds in a step


def on_machines(run: Run) -> Run:
    """The same run; every second rank is on another machine, whose clocks are seconds ahead."""

    def moved(rank: int, record: RankRecord) -> RankRecord:
        starts = [
            replace(one, host="ab"[rank % 2], clock_ns=one.clock_ns + (rank % 2) * 10**10, time_ns=one.time_ns + rank)
            for one in record.starts
        ]
        return replace(record, starts=tuple(starts))

    return replace(run, ranks={rank: moved(rank, record) for rank, record in run.ranks.items()})


def told(verdict: Verdict) -> tuple[list[tuple[float, ...]], Waited]:
    """(of each rank step, exposed, waited and hidden milliseconds; who waited for whom)."""
    shares = [(one.step_ms, one.phases_ms["exposed"], one.waited_ms, one.hidden_ms) for one in verdict.shares]
    return shares, {(one.rank, one.last): 1e3 * one.waited_s / (STEPS - 2) for one in verdict.waits.pairs}


def check(run: Run, shares: Sequence[tuple[float, ...]], waited: Waited) -> None:
    for each in (run, on_machines(run)):
        found, pairs = told(judge(each))
        assert found == [pytest.approx(share, rel=0.01) for share in shares]
        assert pairs == pytest.approx(waited, rel=0.01)


def test_another_rank_is_late_in_each_collective(tmp_path: Path) -> None:
    """Rank 0 comes to the first at 4, rank 2 to the second at 12; they have moved at 6 and at 15."""
    work = [(4000, 1000), (1000, 2000), (2000, 6000)]
    ranks = [[forward(f), stand("a", 2000), backward(b), stand("b", 3000), optimizer(500)] for f, b in work]
    check(
        recorded(tmp_path, *ranks),
        [(15.5, 10.0, 5.0, 0.0), (15.5, 12.0, 7.0, 0.0), (15.5, 7.0, 2.0, 0.0)],
        {(1, 0): 3.0, (2, 0): 2.0, (0, 2): 5.0, (1, 2): 4.0},
    )


def test_collectives_behind_work_of_a_late_rank(tmp_path: Path) -> None:
    """Rank 1 starts at 9, the data is there at 13; rank 0 has stood since 7, rank 1 since 10, and rank 2 asks at 14."""
    ranks = [
        [forward(2000), start("g", 4000), backward(5000), wait("g"), optimizer(2000)],
        [forward(9000), start("g", 4000), backward(1000), wait("g"), optimizer(2000)],
        [forward(3000), start("g", 4000), backward(11_000), wait("g"), optimizer(1000)],
    ]
    check(
        recorded(tmp_path, *ranks),
        [(15.0, 6.0, 2.0, 5.0), (15.0, 3.0, 0.0, 1.0), (15.0, 0.0, 0.0, 10.0)],
        {(0, 1): 2.0},
    )


def test_groups_of_some_ranks(tmp_path: Path) -> None:
    """Rank 2 comes last to the one pair, at 4, and rank 3 to the other, at 3.5; rank 2 to all, at 7."""
    work = [(1000, 1000), (3000, 1000), (4000, 2000), (3500, 1000)]
    ranks = [
        [forward(f), stand("pair", 1000, rank % 2, rank % 2 + 2), backward(b), stand("all", 2000)]
        for rank, (f, b) in enumerate(work)
    ]
    check(
        recorded(tmp_path, *ranks),
        [(9.0, 7.0, 4.0, 0.0), (9.0, 5.0, 2.0, 0.0), (9.0, 3.0, 0.0, 0.0), (9.0, 4.5, 1.5, 0.0)],
        {(0, 2): 4.0, (1, 3): 0.5, (1, 2): 1.5, (3, 2): 1.5},
    )


def stands(rng: random.Random, _: int, moves: Sequence[int]) -> list[Act]:
    return [act for n, us in enumerate(moves) for act in (backward(rng.randint(100, 6000)), stand(f"b{n}", us))]


def buckets(rng: random.Random, _: int, moves: Sequence[int]) -> list[Act]:
    acts = [act for n, us in enumerate(moves) for act in (backward(rng.randint(100, 6000)), start(f"b{n}", us))]
    return [*acts, backward(rng.randint(0, 9000)), *(wait(f"b{n}") for n in range(len(moves)))]


def both(rng: random.Random, _: int, moves: Sequence[int]) -> list[Act]:
    """What is under way is not asked for before the next ones have ended."""
    kinds: list[Callable[[str, int], Act]] = [start, stand]
    acts = [act for n, us in enumerate(moves) for act in (backward(rng.randint(100, 6000)), kinds[n % 2](f"b{n}", us))]
    return [*acts, *(wait(f"b{n}") for n in range(0, len(moves), 2))]


def paired(rng: random.Random, rank: int, moves: Sequence[int]) -> list[Act]:
    """Every second one is of the ranks of one machine."""
    acts: list[Act] = []
    for n, us in enumerate(moves):
        acts.append(backward(rng.randint(100, 6000)))
        acts.append(start(f"b{n}", us, rank % 2, rank % 2 + 2) if n % 2 else start(f"b{n}", us))
    return [*acts, backward(rng.randint(0, 4000)), *(wait(f"b{n}") for n in range(len(moves)))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", [stands, buckets, both, paired])
def test_machines_change_nothing(
    tmp_path: Path, way: Callable[[random.Random, int, Sequence[int]], list[Act]], seed: int
) -> None:
    """Also of what would be if: as recorded is the recorded step, and so on."""
    rng = random.Random(10 * seed)
    size = 4 if way is paired else rng.randint(2, 4)
    moves = [rng.choice([300, 1000, 3000, 8000]) for _ in range(rng.randint(2, 4))]
    ranks = [[forward(rng.randint(500, 5000)), *way(rng, rank, moves), optimizer(300)] for rank in range(size)]
    run = recorded(tmp_path, *ranks, is_one_link=bool(seed % 2))
    truth, found = judge(run), judge(on_machines(run))
    check(run, *told(truth))
    assert found.overlap == pytest.approx(truth.overlap, abs=0.01)
    known = {one.name: one.step_ms for one in truth.what_ifs}
    assert {one.name: one.step_ms for one in found.what_ifs} == pytest.approx(known, rel=0.01)
    assert known["as recorded"] == pytest.approx(max(share.step_ms for share in truth.shares), rel=0.01)
