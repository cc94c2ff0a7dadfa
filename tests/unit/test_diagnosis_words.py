"""What findings say in the same words, whatever their kind: the step, and the advice that fits the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_sights import FIRST, REDUCE, PaperRank, found_in, running, waiting_for_rank_1, world


@pytest.mark.parametrize(
    ("end", "head"),
    [
        (lambda one: one.is_at("data.py:31 load_batch", unmoved_s=60), "HANG: nothing has moved for 60.0 s in step 4."),
        (lambda one: one.is_at("save.py:3 f", activity="checkpoint"), "waiting for rank 1 for 60.0 s in step 4;"),
        (lambda one: one.raises("ValueError", "label 7", "train.py:31"), "RAISED in step 4."),
        (lambda one: one.finishes(), "FINISHED too early, in step 4."),
        (lambda one: vars(one).update(is_gone=True, how="was killed by SIGKILL", age_s=2.0), "GONE in step 4."),
        (lambda one: vars(one).update(is_stopped=True, age_s=9.0), "STOPPED in step 4."),
    ],
)
def test_every_finding_has_the_step_that_its_culprit_has_not_ended(
    end: Callable[[PaperRank], object], head: str
) -> None:
    """The others have called their optimizers, and wait in what comes after that."""
    ranks = waiting_for_rank_1(3, 60)
    ranks[0].step += 1
    ranks[2].step += 1
    end(ranks[1])
    finding = found_in(ranks)
    assert head in finding.text
    assert finding.done == 3


@pytest.mark.parametrize(("steps", "fix"), [(0, "give it the same shape on every rank"), (3, "make the same calls on")])
def test_a_call_that_was_left_out_is_not_told_to_have_the_shape_of_the_next(steps: int, fix: str) -> None:
    """Where both ranks have been at both lines before; else each may have its own."""
    ranks = world(2)
    for _ in range(steps):
        for one in ranks:
            one.call("all_reduce float32 [4] sum", "train.py:7 main")
            one.call("all_reduce float32 [9] sum", "train.py:8 main")
            one.step += 1
    ranks[0].waits(ranks[0].call("all_reduce float32 [4] sum", "train.py:7 main"), 3)
    ranks[1].waits(ranks[1].call("all_reduce float32 [9] sum", "train.py:8 main"), 3)
    assert f"Likely fix: {fix}" in found_in(ranks).text


def test_a_line_of_many_calls_is_not_told_to_change_the_one_that_differs() -> None:
    """Of a trainer, which one rank leaves early: the line that users know of has started all."""
    ranks = world(2)
    for _ in range(3):
        for one in ranks:
            one.call("all_gather int64 [1]", "train.py:9 main")
            one.calls("train.py:9 main")
    ranks[0].waits(ranks[0].call("all_gather int64 [1]", "train.py:9 main"), 3)
    ranks[1].waits(ranks[1].call("all_gather float32 [1]", "train.py:9 main"), 3)
    text = found_in(ranks).text
    assert "they differ in dtype" in text
    assert "Likely fix: that line makes many calls: look for one that a rank leaves out" in text


_HEAD = "lockstep: HANG: nothing has moved for 12.4 s in step 4.  Culprits: ranks 1,3,5"
_LAST = "issued last: all_reduce float32 [4] sum #5 of group world, train.py:41 train_step"
_WAIT = "  ranks 0,2,4,6,7 wait in all_reduce float32 [4] sum #6 of group world, train.py:40 train_step, for 12.4 s"
_WAIT_STACK = "  stack of ranks 0,2,4,6,7: train.py:40 train_step < train.py:9 main"
_WHY = "Why it matters: every rank must issue the same collectives in the same order."
_END = "Likely fix: see what ranks 1,3,5 are stuck in, or which condition led there.", "Evidence: .lockstep/r7"


@pytest.mark.parametrize(
    ("places", "lines"),
    [
        (
            [("data.py:31 load",)] * 3,
            [
                "  ranks 1,3,5 are not there: at data.py:31 load, unmoved for 12.2 s",
                f"    {_LAST}",
                _WAIT,
                "  stack of ranks 1,3,5: data.py:31 load < train.py:9 main",
                _WAIT_STACK,
                _WHY,
            ],
        ),
        (
            [("data.py:31 load",), ("data.py:44 read",), ("data.py:31 load",)],
            [
                "  ranks 1,5 are not there: at data.py:31 load, unmoved for 12.2 s",
                "  rank 3 is not there: at data.py:44 read, unmoved for 12.3 s",
                f"  each of them {_LAST}",
                _WAIT,
                "  stack of rank 3: data.py:44 read < train.py:9 main",
                "  stack of ranks 1,5: data.py:31 load < train.py:9 main",
                _WAIT_STACK,
                _WHY,
            ],
        ),
        (
            [("data.py:31 load",), ("data.py:44 read",), ("eval.py:6 judge",)],
            [
                "  rank 1 is not there: at data.py:31 load, unmoved for 12.4 s",
                "  rank 3 is not there: at data.py:44 read, unmoved for 12.3 s",
                "  rank 5 is not there: at eval.py:6 judge, unmoved for 12.2 s",
                f"  each of them {_LAST}",
                _WAIT,
                "  stack of rank 1: data.py:31 load < train.py:9 main",
                "  stack of rank 3: data.py:44 read < train.py:9 main",
                "  stack of rank 5: eval.py:6 judge < train.py:9 main",
                _WAIT_STACK,  # for which what is true of every hang makes room
            ],
        ),
    ],
    ids=["at one place", "at two", "at three"],
)
def test_of_several_culprits_all_places_and_stacks_are_shown(places: list[tuple[str, ...]], lines: list[str]) -> None:
    ranks = running(8)
    for one in ranks:
        if one.rank in (1, 3, 5):
            one.is_at(*places[one.rank // 2], unmoved_s=12.4 - one.rank // 2 / 10)
        else:
            one.waits(one.call(REDUCE, FIRST))
    assert found_in(ranks).text.splitlines() == [_HEAD, *lines, *_END]
