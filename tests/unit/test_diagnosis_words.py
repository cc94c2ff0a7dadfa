"""What findings say in the same words, whatever their kind: the step, and the advice that fits the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_sights import PaperRank, found_in, waiting_for_rank_1, world


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
