"""What-if answers against the same ranks with that really changed, on a clock that tests move: both are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from profiled_worlds import World
from scripted_ranks import Act, backward, data, forward, optimizer, recorded, stand, start, wait

from lockstep.observe.profile.run_record import Run
from lockstep.observe.profile.verdict import judge

Ranks = list[list[Act]]


@dataclass(frozen=True)
class Case:
    """Ranks by something that is changed, before and after."""

    answer: str
    ranks: Callable[[int], Ranks]
    before: int
    after: int
    is_one_link: bool = True
    later_us: Sequence[int] = ()  # before; after it as the network


def layers(count: int, backward_us: int, move_us: int) -> list[Act]:
    """A backward that starts a bucket after each layer, and waits for all in the end."""
    acts = [act for n in range(count) for act in (backward(backward_us), start(f"bucket {n}", move_us))]
    return [*acts, *(wait(f"bucket {n}") for n in range(count)), optimizer(500)]


CASES = {
    "late in forward": Case(
        "rank 1 as fast as the others",
        lambda more: [[forward(4000 + more * rank), *layers(3, 3000, 1000)] for rank in range(3)][:2],
        before=9000,
        after=0,
    ),
    "late in backward, whose buckets are hidden": Case(
        "rank 2 as fast as the others",
        lambda more: [[forward(4000), *layers(3, 3000 + more * (rank == 2), 2000)] for rank in range(3)],
        before=4000,
        after=0,
    ),
    "network that nothing hides": Case(
        "network twice as fast",
        lambda us: [[forward(4000), stand("a", us), stand("b", 2 * us)] for _ in range(2)],
        before=8000,
        after=4000,
    ),
    "network, buckets behind each other": Case(
        "network twice as fast",
        lambda us: [[forward(2000), *layers(4, 3000, us)] for _ in range(2)],
        before=8000,
        after=4000,
    ),
    "network, one rank late": Case(
        "network twice as fast",
        lambda us: [[forward(2000 + 5000 * rank), *layers(4, 3000, us)] for rank in range(2)],
        before=7000,
        after=3500,
    ),
    "data on all ranks": Case(
        "data always there",
        lambda us: [[data(us), forward(3000), *layers(2, 3000, 2000)] for _ in range(3)],
        before=9000,
        after=0,
    ),
    "data on one rank, which is not the slowest": Case(
        "data always there",
        lambda us: [[data(us), forward(3000), stand("g", 1000)], [data(0), forward(7000), stand("g", 1000)]],
        before=5000,
        after=0,
    ),
    "one rank late before the collective, one after it": Case(
        "network twice as fast",
        lambda us: [
            [data(9000), forward(1000), stand("g", us), optimizer(0)],
            [data(0), forward(1000), stand("g", us), optimizer(9000)],
        ],
        before=4000,
        after=2000,
    ),
}


def took_ms(run: Run) -> float:
    return max(sum(line.wall_us for line in record.steady) / len(record.steady) for record in run.ranks.values()) / 1e3


@pytest.mark.parametrize("name", CASES)
def test_answer_is_what_the_change_makes_of_it(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    before, after = (
        recorded(tmp_path / str(us), *case.ranks(us), is_one_link=case.is_one_link) for us in (case.before, case.after)
    )
    answers = {answer.name: answer for answer in judge(before).what_ifs}
    assert answers["as recorded"].step_ms == pytest.approx(took_ms(before), rel=0.001)
    assert took_ms(after) < 0.95 * took_ms(before)
    assert answers[case.answer].step_ms == pytest.approx(took_ms(after), rel=0.001)
    assert not answers[case.answer].is_least


@pytest.mark.parametrize(("every", "is_seen"), [(3, True), (1, False)])
def test_what_holds_a_collective_up_in_some_steps_is_no_matter_of_the_network(
    tmp_path: Path, *, every: int, is_seen: bool
) -> None:
    """A rank without a processor, say; what does so in each step cannot be told from a network that takes as long."""

    def world(us: int, held_us: int = 9000) -> Run:
        def held_up(step: int, number: int) -> int:
            return held_us * (number == 1 and step % every == 0)

        return World(work_us=lambda *_: 3000, moves_us=us, held_up_us=held_up).run(tmp_path / f"{us} {held_us}")

    before, after = world(2000), world(1000) if is_seen else world(1000, 4500)
    answers = {answer.name: answer.step_ms for answer in judge(before).what_ifs}
    assert answers["as recorded"] == pytest.approx(took_ms(before), rel=0.001)
    assert answers["network twice as fast"] == pytest.approx(took_ms(after), rel=0.001)
    assert answers["communication for nothing"] == pytest.approx(9.0, rel=0.001)


def test_ring_that_lets_ranks_go_at_different_times(tmp_path: Path) -> None:
    """Rank 1 has its last part later; with half the time for data, so it is half as much."""

    def ring(us: int) -> Run:
        acts = [forward(3000), stand("a", 5 * us), stand("b", 5 * us)]
        return recorded(tmp_path / str(us), acts, acts, later_us=[0, us])

    before, after = ring(2000), ring(1000)
    answers = {answer.name: answer.step_ms for answer in judge(before).what_ifs}
    assert answers["as recorded"] == pytest.approx(took_ms(before), rel=0.001)
    assert answers["network twice as fast"] == pytest.approx(took_ms(after), rel=0.001)
