"""What ranks tell of their training is read once, though it is looked at again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lockstep.observe import training_findings
from lockstep.observe.facts import Facts, Topic
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.status import RAISED, Sight, Status
from lockstep.observe.training_findings import Training
from lockstep.observe.wording import Finding


def scene_of(told: Sequence[Facts], step: int, **about: Any) -> Scene:
    sights = {
        rank: Sight(Status(rank, 2, 4710 + rank, "b", step=step, facts=one.said(), **about), 0.0, is_gone=False)
        for rank, one in enumerate(told)
    }
    return Scene(0, sights, lambda _: [], Limits())


def forbidden(scene: Scene, topic: Topic) -> Iterator[Finding]:
    raise AssertionError("read again")


def test_what_the_ranks_tell_is_read_again_once_one_of_them_tells_something_else() -> None:
    told, training = [Facts(), Facts()], Training()

    def load(number: int, *batches: int) -> None:
        for rank, count in enumerate(batches):
            value = {"batches": count, "before": None, "first": "", "rule": "", "order": None, "is_twice": False}
            told[rank].tell("data ddp/2/0", number, {**value, "site": "t.py:1", "joins": False, "begun": 1})

    load(0, 4, 4)
    assert training.notes(scene_of(told, 1)) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training_findings._CASES, "data", forbidden)
        assert training.notes(scene_of(told, 2)) == []
        assert training.find_training(scene_of(told, 3)) is None
        with pytest.raises(AssertionError, match="read again"):
            training.notes(scene_of(told, 3, state=RAISED))
    load(1, 5, 4)
    for step in (4, 5):
        (note,) = training.notes(scene_of(told, step))
        assert note.key.startswith("data:data ddp/2/0 the ranks have different numbers of batches")
    load(1, 4, 4)
    assert training.notes(scene_of(told, 5)) == []


def test_what_depends_on_how_far_the_ranks_are_is_read_every_time() -> None:
    """Gradients that are not finite are said once every rank has had its say."""
    told, training = [Facts(), Facts()], Training()
    told[0].tell("gradient", 3, ["the loss is not finite", ["'w' (1 NaN of 2 elements)"], "t.py:1"])
    assert training.notes(scene_of(told, 4)) == []
    assert [note.kind for note in training.notes(scene_of(told, 5))] == ["gradient"]


def test_one_look_that_asks_for_what_is_certain_and_what_is_not_reads_once() -> None:
    """What depends on how far the ranks are too, which is read at every look."""
    told, training, read = [Facts(), Facts()], Training(), list[int]()
    told[0].tell("gradient", 3, ["the loss is not finite", ["'w' (1 NaN of 2 elements)"], "t.py:1"])

    def counted(scene: Scene, topic: Topic) -> Iterator[Finding]:
        read.append(scene.status(0).step)
        yield from _gradient(scene, topic)

    _gradient = training_findings._CASES["gradient"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training_findings._CASES, "gradient", counted)
        for step in (5, 6):
            seen = scene_of(told, step)
            assert [note.kind for note in training.notes(seen)] == ["gradient"]
            assert training.find_training(seen) is None
    assert read == [5, 6]
