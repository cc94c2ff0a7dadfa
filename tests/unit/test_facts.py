"""What a rank tells of its training: how much of it is kept, and when it explains itself."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.observe.facts import DETAILS, Facts, Rows, details_of, differ, pack
from lockstep.observe.status import Sight, Status

FOLD = [5, 17, 0, 0]


def status_of(facts: Facts, rank: int = 0) -> Status:
    return Status.from_json(Status(rank, 2, 4711, "b", facts=facts.said()).to_json())


def compared(*all_facts: Facts) -> None:
    """Each sees the others, as guards do."""
    for _ in range(2):
        sights = {rank: Sight(status_of(facts, rank), 0.0, False) for rank, facts in enumerate(all_facts)}
        for rank, facts in enumerate(all_facts):
            facts.compare(sights, rank)


def rows(*words: str) -> Callable[[], Rows]:
    return lambda: [[word] for word in words]


def test_a_fact_is_told_under_its_topic_and_the_last_one_counts() -> None:
    facts = Facts()
    facts.tell("sync world/2", 3, [1, 0, "t.py:1"])
    facts.tell("sync world/2", 3, [2, 0, "t.py:1"])

    assert facts.said() == {"sync world/2": {"3": [2, 0, "t.py:1"]}}


def test_of_many_steps_the_newest_and_some_older_ones_are_kept() -> None:
    facts = Facts()
    for step in range(1000):
        facts.tell("replica world", step, step)

    kept = [int(step) for step in facts.said()["replica world"]]

    assert kept[-8:] == list(range(992, 1000))
    assert all(step % 16 == 0 for step in kept[:-8])
    assert len(kept) <= 8 + 16
    assert facts.said()["replica world"][str(kept[0])] == kept[0]


def test_of_many_models_those_told_last_are_kept_and_what_is_disputed() -> None:
    """A program may make one after the other: all of them would leave no room for anything else."""
    facts = Facts()
    facts.tell("caught", "caught", [3, "t.py:9", "an error"])
    for number in range(1000):
        facts.tell(f"model world/2/{number}", "wrapped", [number], rows(str(number)))
        facts.tell("sync world/2/0", number, [1, 0, ""])
        if number == 7:
            facts.show("model world/2/7", "wrapped")

    said = facts.said()

    assert {"caught", "sync world/2/0", "model world/2/7", "model world/2/999"} < said.keys()
    assert "model world/2/6" not in said
    assert len(said) <= 300
    assert len(facts._details) <= 300
    assert details_of(status_of(facts), "model world/2/7", "wrapped") == [["7"]]


def test_ranks_that_forget_keep_steps_in_common() -> None:
    """They are not equally far: the older steps that are kept are the same ones all the same."""
    one, two = Facts(), Facts()
    for step in range(500):
        one.tell("replica world", step, FOLD)
    for step in range(460):
        two.tell("replica world", step, FOLD)

    common = one.said()["replica world"].keys() & two.said()["replica world"].keys()

    assert len(common) >= 8


def test_what_is_shown_while_facts_are_compared_does_no_harm() -> None:
    """The rank's own thread shows and hides facts while its guard's compares those of all ranks."""
    one, two = Facts(), Facts()

    class Interrupted(str):
        """A topic; whoever compares its name is interrupted by the other thread."""

        def __eq__(self, other: object) -> bool:
            if self is not other:
                one.show("gradients", 4)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    topic = Interrupted("replica world")
    for facts, digest in ((one, "d1"), (two, "d2")):
        facts.tell(topic, 3, ["same"], rows("c"))
        facts.tell("gradients", 4, ["same"], rows("c"))
        facts.tell("model world/2", "wrapped", [digest, "t.py:1"], rows(digest))
    one.show(topic, 3)
    assert one.said()[DETAILS].keys() == {"replica world|3"}
    compared(one, two)

    assert details_of(status_of(one), "model world/2", "wrapped") == [["d1"]]


def test_nothing_is_explained_while_all_agree() -> None:
    one, two = Facts(), Facts()
    for facts in (one, two):
        facts.tell("model world/2", "wrapped", ["d1", "t.py:1"], rows("a"))
    compared(one, two)

    assert not one.is_disputed
    assert details_of(status_of(one), "model world/2", "wrapped") is None


def test_both_sides_explain_what_differs() -> None:
    one, two, silent = Facts(), Facts(), Facts()
    one.tell("model world/2", "wrapped", ["d1", "t.py:1"], rows("a", "b"))
    two.tell("model world/2", "wrapped", ["d2", "t.py:1"], rows("c"))
    compared(one, two, silent)

    assert one.is_disputed
    assert details_of(status_of(one), "model world/2", "wrapped") == [["a"], ["b"]]
    assert details_of(status_of(two), "model world/2", "wrapped") == [["c"]]
    assert not silent.is_disputed
    assert set(one.sights) == {0, 1, 2}


def test_details_are_asked_for_once() -> None:
    asked: list[int] = []

    def explain() -> Rows:
        asked.append(1)
        return [["a"]]

    one, two = Facts(), Facts()
    one.tell("model world/2", "wrapped", ["d1"], explain)
    two.tell("model world/2", "wrapped", ["d2"], rows("c"))
    for _ in range(3):
        compared(one, two)

    assert asked == [1]


def test_only_the_first_disputed_key_of_a_topic_is_explained() -> None:
    one, two = Facts(), Facts()
    for step in (4, 5):
        one.tell("replica world", step, [[5, step], "ddp"], rows("a"))
        two.tell("replica world", step, [[5, -step], "ddp"], rows("b"))
    compared(one, two)

    assert list(one.said()[DETAILS]) == ["replica world|4"]


def test_what_is_shown_outlives_forgetting_until_it_is_hidden() -> None:
    facts = Facts()
    facts.tell("model world/2", "wrapped", ["d1"], rows("a"))
    facts.show("model world/2", "wrapped")
    facts.show("model world/2", "never told")
    for step in range(100):
        facts.tell("model world/2", step, ["d1"], rows("z"))

    assert details_of(status_of(facts), "model world/2", "wrapped") == [["a"]]
    assert facts.said()["model world/2"]["wrapped"] == ["d1"]
    facts.hide("model world/2")
    assert DETAILS not in facts.said()


@pytest.mark.parametrize(
    ("topic", "mine", "theirs", "is_other"),
    [
        ("data world/0", {"batches": 3}, {"batches": 3}, False),
        ("data world/0", {"batches": 3}, {"batches": 4}, True),
        ("replica world", [FOLD, "ddp"], [FOLD, "hand"], False),  # only what is folded counts
        ("replica world", [FOLD, "ddp"], [[5, 18, 0, 0], "ddp"], True),
        ("replica world", [FOLD, "ddp"], [[6, 18, 0, 0], "ddp"], False),  # other things: nothing to compare
    ],
)
def test_values_contradict_each_other_or_not(topic: str, mine: Any, theirs: Any, is_other: bool) -> None:
    assert differ(topic, mine, theirs) is is_other


def test_details_that_do_not_fit_lose_their_end() -> None:
    letters = random.Random(7)
    many = [["".join(letters.choices(string.ascii_letters, k=40))] for _ in range(2000)]
    facts = Facts()
    facts.tell("model world/2", "wrapped", ["d1"], lambda: many)
    facts.tell("replica world", 1, [FOLD], lambda: many)
    facts.show("model world/2", "wrapped")
    facts.show("replica world", 1)

    status = status_of(facts)
    first = details_of(status, "model world/2", "wrapped")
    second = details_of(status, "replica world", "1")

    assert first == many[: len(first or ())]
    assert second == many[: len(second or ())]
    assert sum(map(len, facts.said()[DETAILS].values())) <= 24_100
    assert len(json.dumps(facts.said())) < 26_000


@pytest.mark.parametrize("room", [0, 10, 100, 10_000])
def test_what_is_packed_fits_or_is_empty(room: int) -> None:
    packed = pack([["x" * 7, number] for number in range(999)], room)
    empty = pack([], room)

    assert len(packed) <= max(room, len(empty))


def test_what_is_said_is_as_others_read_it_and_made_once() -> None:
    facts = Facts()
    facts.tell("save", "a.pt", (3, "t.py:9"), rows("a"))
    said = facts.said()
    assert said == {"save": {"a.pt": [3, "t.py:9"]}} == status_of(facts).facts
    assert facts.said() is said
    for change in (
        lambda: facts.tell("save", "a.pt", [4, "t.py:9"]),
        lambda: facts.show("save", "a.pt"),
        lambda: facts.hide("save"),
    ):
        before = facts.said()
        change()
        assert facts.said() is not before
    assert said == {"save": {"a.pt": [3, "t.py:9"]}}, "what was said stays as it was"
    assert status_of(facts).facts is status_of(facts).facts, "it is read once"
