"""Ranks that wait for each other in a circle: what proves it, and what does not."""

from __future__ import annotations

import pytest
from rank_sights import PaperRank, diagnosed, found_in, receivers, running, world

from lockstep.observe.scene import message_text


def test_who_only_waits_for_a_circle_is_not_of_it() -> None:
    ranks = world(4)
    for rank, peer in ((0, 1), (1, 2), (2, 1), (3, 0)):
        ranks[rank].waits(ranks[rank].message(message_text("recv", "int64 [1]", peer, 0)), 2.6)
    assert found_in(ranks).culprits == (1, 2)


def test_a_circle_that_could_still_open_is_no_proof() -> None:
    """The main thread of rank 1 is elsewhere, or has only just come, or moves; from any rank is no circle either."""
    for change in ("elsewhere", "new", "moving", "any"):
        ranks = receivers(2)
        if change == "elsewhere":
            ranks[1].is_at("model.py:3 compute", unmoved_s=2.6)
        elif change == "new":
            ranks[1].open_s = 1.0
        elif change == "moving":
            ranks[1].status_fields["unmoved_s"] = 0.1
        else:
            ranks[1].records[0] = ranks[1].records[0]._replace(text="recv float32 [4] from rank any tag 0")
        assert diagnosed(ranks) is None, change


def in_calls(*kinds: str) -> list[PaperRank]:
    """Two ranks that have been in calls of two groups for a quarter of a second: neither has made the other's."""
    ranks = running(2)
    for one, kind in zip(ranks, kinds, strict=True):
        one.group("data", [0, 1])
        one.group("model", [0, 1])
        one.waits(one.call(f"{kind} float32 [4] sum", group=("data", "model")[one.rank]), 0.4, unmoved_s=0.25)
        one.status_fields["is_in_call"] = True
    return ranks


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier"])
def test_who_stands_in_the_calls_themselves_is_told_at_once(kind: str) -> None:
    """What groups in another order lead to: nothing has to be waited for, and the limit is of no concern."""
    ranks = in_calls(kind, "all_reduce")
    ranks[1].age_s = 0.25  # a look ago, when the other one stood there already
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("cycle", (0, 1)), finding.text
    assert "groups in different order, or a call left out" in finding.text


@pytest.mark.parametrize(
    "change",
    [
        "it has returned, and is waited for in another line, or not at all",
        "it was not there a look ago",
        "it was there only after the other one was last heard",
        "it is elsewhere",
        "another thread has one under way",
        "another thread has begun one",
        "it is through once its own part is",
        "it came a moment ago",
    ],
)
def test_a_call_that_may_yet_return_is_no_proof(change: str) -> None:
    ranks = in_calls("broadcast" if "through" in change else "all_reduce", "all_reduce")
    first, second = ranks
    if "returned" in change:
        first.status_fields["is_in_call"] = False
    elif "look ago" in change:
        first.status_fields["unmoved_s"] = 0.0
    elif "last heard" in change:
        second.age_s = 0.5
    elif "elsewhere" in change:
        first.status_fields["stack"] = ("train.py:9 main", "model.py:3 compute")
    elif "under way" in change:
        first.open.add(0)
    elif "has begun" in change:
        first.call(group="side", site="load.py:3 load")
    elif "came" in change:
        second.call("all_reduce float32 [4] sum", group="data")
    assert diagnosed(ranks) is None
