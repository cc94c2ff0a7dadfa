"""Who waited for whom, what if, and the verdict, on runs whose truth is known."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profiled_worlds import World

from lockstep.observe.profile.replay import plays_of, what_ifs
from lockstep.observe.profile.run_record import Op, Run, read_run
from lockstep.observe.profile.verdict import judge
from lockstep.observe.profile.waits import compare, waits_of

_WARM = 2


def run_of(world: World) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        return world.run(Path(folder))


@given(
    st.integers(2, 5).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
    st.lists(st.integers(0, 10**9), min_size=5, max_size=5),
    st.integers(5, 30),
)
@example((2, 1), [0] * 5, 1200)  # of which some are left out
@settings(max_examples=30, deadline=None)
def test_late_rank_is_named_with_its_sum_whatever_the_clocks_say(
    who: tuple[int, int], ahead: list[int], steps: int
) -> None:
    size, late = who
    world = World(
        work_us=lambda rank, step: 1000,
        data_us=lambda rank, step: 20_000 if rank == late else 0,
        world_size=size,
        steps=steps,
        ahead_us=ahead,
    )
    verdict = judge(run_of(world))
    lost_s = 0.020 * (steps - _WARM)
    assert {(pair.rank, pair.last) for pair in verdict.waits.pairs} == {(r, late) for r in range(size) if r != late}
    for pair in verdict.waits.pairs:
        assert pair.waited_s == pytest.approx(lost_s)
        assert pair.site == "train.py:0"
    assert verdict.waits.caused_s[late] == pytest.approx(lost_s * (size - 1))
    assert verdict.waits.real_s == pytest.approx(3 * 500e-6 * (steps - _WARM))
    straggler = verdict.advice[0]
    assert (straggler.kind, straggler.rank) == ("straggler", late)
    assert "20.0 ms in data, the others 0.0 ms" in straggler.text
    assert [advice.kind for advice in verdict.advice] == ["straggler"]


@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.integers(0, 2000),
    st.lists(st.integers(0, 5000), min_size=16, max_size=16),
    st.lists(st.integers(0, 10**6), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_replay_of_what_was_is_what_was(
    size: int, collectives: int, moves_us: int, work: list[int], ahead: list[int]
) -> None:
    world = World(
        work_us=lambda rank, step: work[(3 * rank + step) % 16],
        world_size=size,
        collectives=collectives,
        moves_us=moves_us,
        steps=12,
        ahead_us=ahead,
    )
    run = run_of(world)
    answers = {answer.name: answer for answer in what_ifs(plays_of(run))}
    steady = [line.wall_us for line in run.ranks[0].steady]
    assert answers["as recorded"].step_ms == pytest.approx(sum(steady) / len(steady) / 1e3, abs=0.02)
    saved = answers["as recorded"].step_ms - answers["communication for nothing"].step_ms
    assert saved == pytest.approx(collectives * moves_us / 1e3, abs=0.02)
    half = answers["as recorded"].step_ms - answers["network twice as fast"].step_ms
    assert half == pytest.approx(collectives * moves_us / 2e3, abs=0.02)


def test_without_the_slowest_rank_and_without_the_loader() -> None:
    world = World(
        work_us=lambda rank, step: 3000 if rank == 2 else 1000,
        data_us=lambda rank, step: 4000,
        world_size=3,
        collectives=2,
    )
    answers = {answer.name: answer for answer in what_ifs(plays_of(run_of(world)))}
    assert answers["as recorded"].step_ms == pytest.approx(4 + 2 * 3 + 2 * 0.5)
    faster = answers["rank 2 as fast as the others"]  # 6 of its 10 ms of work, the data included
    assert faster.step_ms == pytest.approx(4 + 2 * 1 + 2 * 0.5, rel=0.15)
    assert faster.speed_up == pytest.approx(11 / faster.step_ms)
    assert answers["data always there"].step_ms == pytest.approx(2 * 3 + 2 * 0.5)


def op(began_us: int, waited_us: int, entered_us: int = 0) -> Op:
    return Op("a", "world", 1, "barrier", "a.py:1", "", 0, entered_us, began_us + waited_us, began_us, waited_us)


def test_collective_that_a_thread_did_not_stand_in_tells_nothing() -> None:
    assert compare({0: op(5, 100), 1: op(-1, 0)}) is None
    assert compare({0: op(5, 100)}) is None
    found = compare({0: op(5, 100), 1: op(9, 85), 2: op(0, 700)})
    assert found is not None
    assert (found.last, found.real_us, dict(found.waited_us)) == (1, 85, {0: 0, 1: 0, 2: 615})


def test_killed_rank_does_not_spoil_the_others(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000 + 500 * rank, steps=20).run(tmp_path)
    path = tmp_path / "rank-1.jsonl"
    path.write_text(path.read_text()[:2000])
    run = read_run(tmp_path)
    cut = len(run.ranks[1].lines)
    assert 3 < cut < 20
    assert waits_of(run).waited_s[0] == pytest.approx(0.0005 * 3 * (cut - _WARM))


def test_run_that_went_on_with_fewer_ranks_is_judged_by_those(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000, world_size=3, steps=10).run(tmp_path)
    for rank in (0, 1):
        path = tmp_path / f"rank-{rank}.jsonl"
        world = World(work_us=lambda rank, step: 1000 + 2000 * rank, steps=20, ahead_us=[10**9] * 2)
        later = world.run(tmp_path / "later").folder
        text = (later / f"rank-{rank}.jsonl").read_text().replace('"a/0"', '"a/1"')
        path.write_text(path.read_text() + text)
        for left in later.iterdir():
            left.unlink()
    run = read_run(tmp_path)
    verdict = judge(run)
    assert run.world_size == 2
    assert [share.rank for share in verdict.shares] == [0, 1]
    assert verdict.what_ifs
    assert verdict.advice[0].rank == 1


CASES = {
    "communication": World(work_us=lambda rank, step: 100, moves_us=1000),
    "bubbles": World(work_us=lambda rank, step: 5000 if (rank + step) % 2 else 1000, collectives=4),
    "data": World(work_us=lambda rank, step: 1000, data_us=lambda rank, step: 2000, moves_us=50),
    "small buckets": World(work_us=lambda rank, step: 20, moves_us=100, collectives=20, elements=64),
    "": World(work_us=lambda rank, step: 5000, data_us=lambda rank, step: 100, moves_us=200),
}


@pytest.mark.parametrize("kind", CASES)
def test_verdict(kind: str) -> None:
    verdict = judge(run_of(CASES[kind]))
    kinds = [advice.kind for advice in verdict.advice]
    assert kind in kinds if kind else not kinds
    assert "straggler" not in kinds
    for advice in verdict.advice:
        assert 0 < advice.share <= 1
        assert advice.lever


def test_rates_and_mfu() -> None:
    world = World(work_us=lambda rank, step: 3000, moves_us=1000, collectives=1, tokens=400)
    verdict = judge(run_of(world), peak_flops=1e9, flops_per_token=5000)
    assert verdict.step_ms == pytest.approx(4.0)
    assert [share.tokens_per_s for share in verdict.shares] == pytest.approx([100_000, 100_000])
    assert [share.samples_per_s for share in verdict.shares] == pytest.approx([2000, 2000])
    assert verdict.mfu == pytest.approx(5000 * 100_000 / 2e9)
    assert judge(run_of(world)).mfu is None
    assert verdict.imbalance == pytest.approx(1.0)
    assert verdict.overlap == 0.0


def test_run_of_one_rank_has_a_verdict() -> None:
    verdict = judge(run_of(World(work_us=lambda rank, step: 1000, world_size=1)))
    assert len(verdict.shares) == 1
    assert not verdict.waits.pairs
    assert "straggler" not in [advice.kind for advice in verdict.advice]
