"""Which optimizer counts the steps of a program: the same on every rank, whatever else a rank trains for itself."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_steps import StepCounter, TorchSteps, mark_averaged


class Optimizer:
    """Can be referred to weakly, like torch's."""

    param_groups: Sequence[Any] = ()


class Param:
    """Can, too."""


SHARED = frozenset("ABC")  # the parameters of the others are a rank's own, as far as one can see


def counted(story: str, operations: int = 1) -> list[int]:
    """What each step of the story counts: a letter per optimizer, a blank where the rank communicates.

    A bar where a backward begins, if nobody has seen parameters that ranks share.
    """
    optimizers = {name: Optimizer() for name in story if name not in " |"}
    names = {id(optimizer): name for name, optimizer in optimizers.items()}
    counter = StepCounter(lambda optimizer: names[id(optimizer)] in SHARED)
    counts, started, begun = [], 0, None
    for name in story:
        if name == " ":
            started += operations
        elif name == "|":
            begun = started
        else:
            counts.append(counter.stepped(optimizers[name], started, begun=begun))
    return counts


@pytest.mark.parametrize(
    ("story", "counts"),
    [
        (" A A A", [1, 1, 1]),
        (" AB AB AB", [1, 0, 1, 0, 1, 0]),  # one per kind of parameter, or a GAN's two
        (" sA sA sA", [0, 1, 0, 1, 0, 1]),  # one rank's own side model, before the shared one
        (" As As As", [1, 0, 1, 0, 1, 0]),
        ("sss A A", [0, 0, 0, 1, 1]),  # trained alone before, without a word to the others
        ("s s s A A", [0, 2, 1, 1, 1]),  # and while others ask for something: the shared one takes over
        (" x x x", [0, 2, 1]),  # gradients averaged by the program's own calls
        (" xy xy xy", [0, 0, 2, 0, 1, 0]),
        ("| x| x| x", [1, 1, 1]),  # these calls are seen to come between a backward and its step
        (" |x |x |x", [0, 2, 1]),  # what was asked for before the backward may be anything
        (" |x| x| x", [0, 2, 1]),
        ("| xy| xy", [1, 0, 1, 0]),
        ("|x|x|x", [0, 0, 0]),
        (" A A B B B", [1, 1, 0, 2, 1]),  # a second phase of training
        (" A B A B B A", [1, 0, 1, 0, 2, 0]),
        (" A A x x x x x", [1, 1, 0, 0, 0, 4, 1]),  # whose gradients are averaged by the program's own calls
        (" x x y y y", [0, 2, 0, 2, 1]),
        (" A s s A s s A", [1, 0, 0, 1, 0, 0, 1]),
        (" A A BBBB", [1, 1, 0, 0, 0, 0]),  # one rank goes on with its copy of the model, alone
        ("xxxx", [0, 0, 0, 0]),
    ],
)
def test_steps_are_counted_once(story: str, counts: Sequence[int]) -> None:
    assert counted(story) == counts


def test_a_side_model_changes_no_count() -> None:
    main = [1, 1, 1, 1]
    for story in (" sA sA sA sA", " As As As As", " sAs A sA A", "s s A A A sA", " AsAsAsA"):
        counts = counted(story)
        steps = [count for name, count in zip(story.replace(" ", ""), counts, strict=True) if name == "A"]
        assert steps == main, story


@pytest.mark.parametrize("is_kept", [True, False])
def test_whether_a_rank_still_has_the_leader_changes_no_count(is_kept: bool) -> None:
    """One rank's collector may come between two phases of training, and that of another later."""
    counter = StepCounter(lambda optimizer: True)
    first, second = Optimizer(), Optimizer()
    kept = [first] if is_kept else []
    assert counter.stepped(first, 1) == 1
    del first
    gc.collect()
    assert counter.stepped(second, 1) == 0  # one rank goes on with its copy of the model, alone
    assert [counter.stepped(second, operations) for operations in (2, 3, 4)] == [0, 2, 1]
    assert len(kept) == is_kept


def test_an_optimizer_that_is_made_anew_for_each_step_counts_them_all() -> None:
    """As by who gives it another learning rate so."""
    counter = StepCounter(lambda optimizer: True)
    param, counts = Param(), []
    for operations in range(1, 6):
        optimizer = Optimizer()
        optimizer.param_groups = [{"params": [param, Param()]}]
        counts.append(counter.stepped(optimizer, operations))
        del optimizer
    assert counts == [1, 0, 2, 0, 2]


def test_an_optimizer_within_another_counts_for_both() -> None:
    """As that of a ZeroRedundancyOptimizer, whose step sends something after the inner one."""
    counter = StepCounter(lambda optimizer: True)
    inner, outer = Optimizer(), Optimizer()
    inner.param_groups = outer.param_groups = [{"params": [Param()]}]
    assert [counter.stepped(one, at) for at, one in enumerate((inner, outer) * 3, 1)] == [1, 0] * 3


def test_a_model_that_is_averaged_unseen_counts_for_its_own_optimizer_alone() -> None:
    """Whatever else of ours is alive in the process, of an earlier training say, or waits to be collected."""
    counter = StepCounter(lambda optimizer: True)
    first, ours, alone, param = Optimizer(), Optimizer(), Optimizer(), Param()
    assert counter.stepped(first, 1) == 1
    ours.param_groups, alone.param_groups = [{"params": [param]}], [{"params": [Param()]}]
    mark_averaged([param])
    assert [counter.stepped(one, 1) for one in (alone, alone, ours, alone, ours, alone, ours)] == [0, 0, 0, 0, 2, 0, 1]


def test_without_other_ranks_nothing_is_waited_for() -> None:
    counter = StepCounter(lambda optimizer: True, is_alone=True)
    first, second = Optimizer(), Optimizer()
    assert [counter.stepped(one, 0) for one in (first, first, second, second)] == [1, 1, 0, 2]


def test_what_was_asked_for_before_another_phase_of_training_says_nothing_of_its_first_optimizer() -> None:
    """Its own model may be one that this rank trains for itself."""
    recorder = SimpleNamespace(started=0, take_up=list, clock=SimpleNamespace(owner=0))
    found = [SimpleNamespace(is_message=False)]
    ends = SimpleNamespace(operations=0)
    guard = SimpleNamespace(
        recorder=recorder, world_size=2, step_ends=ends, step_done=list, records=lambda since, until: found
    )
    steps = TorchSteps(cast("Any", guard), cast("Any", SimpleNamespace(listed={}, followed={})))
    BACKWARDS.once.remove(steps._backward_begins)
    first, second = Optimizer(), Optimizer()
    steps._backward_begins()
    BACKWARDS.once.remove(steps._backward_begins)
    recorder.started = 1
    assert steps.stepped(first, ())
    del first
    gc.collect()
    steps._backward_begins()  # as it was asked to be called
    assert steps._backward_begins not in BACKWARDS.once  # which would call it with every backward
    recorder.started = 2
    assert not steps.stepped(second, ())
