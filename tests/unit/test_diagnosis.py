"""What is said of ranks that are out of step, case by case; and where nothing may be said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rank_sights import (
    FIRST,
    REDUCE,
    SECOND,
    SITE,
    Build,
    PaperRank,
    diagnosed,
    found_in,
    rank_1,
    receivers,
    running,
    waiting_for_rank_1,
    world,
)

from lockstep.observe.scene import FROM_CPP, Limits, message_text, read_message
from lockstep.observe.wording import Finding, names

GOLDEN = Path(__file__).parents[1] / "golden" / "diagnosis.txt"
EXTRA = "train.py:50 log_loss"


def with_step(size: int, odd: Sequence[str], after: int = 2, steps: int = 3) -> list[PaperRank]:
    """After `steps` whole steps, rank 1 issues `odd` in the place of the usual two; all go on."""
    ranks = running(size, steps)
    for one in ranks:
        one.calls(*(odd if one.rank == 1 else (FIRST, SECOND)))
    for _ in range(after):
        for one in ranks:
            one.calls(FIRST, SECOND)
    return ranks


def both_in(first: str, second: str, size: int = 2, age_s: float = 0.6) -> list[PaperRank]:
    """After three steps all call `first`, but rank 1 `second`."""
    ranks = running(size)
    for one in ranks:
        one.waits(one.call(second if one.rank == 1 else first, FIRST), age_s)
    return ranks


def killed(one: PaperRank) -> None:
    one.is_gone, one.age_s = True, 1.3


def stopped(one: PaperRank) -> None:
    one.age_s = 3.4


def stopped_half_way() -> list[PaperRank]:
    """All have come to the same operation, whose data then moves no more."""
    ranks = both_in(REDUCE, REDUCE, 3, 4.0)
    stopped(ranks[1])
    return ranks


def stopped_half_way_further_on() -> list[PaperRank]:
    """Rank 0 lacks rank 2, which is in an operation of two with rank 1."""
    ranks = running(3)
    for one in (ranks[0], ranks[2]):
        one.group("ends", [0, 2])
    ranks[0].waits(ranks[0].call(REDUCE, FIRST, "ends"), 4.0)
    for one in ranks[1:]:
        one.group("pair", [1, 2])
        one.waits(one.call(REDUCE, SECOND, "pair"), 4.0)
    stopped(ranks[1])
    return ranks


def stopped_half_way_of_a_message() -> list[PaperRank]:
    ranks = running(3)
    ranks[0].waits(ranks[0].message("recv float32 [4] from rank 1 tag 0"), 4.0)
    ranks[1].waits(ranks[1].message("send float32 [4] to rank 0 tag 0"), 4.0)
    stopped(ranks[1])
    return ranks


def groups_in_other_order() -> list[PaperRank]:
    ranks = world(2)
    for one in ranks:
        one.group("data", [0, 1])
        one.group("model", [0, 1])
        one.waits(one.call(group=("data", "model")[one.rank], site=f"train.py:{50 + one.rank} f"), 2.6)
    return ranks


def tags_that_differ() -> list[PaperRank]:
    ranks = world(2)
    ranks[0].waits(ranks[0].message("send float32 [4] to rank 1 tag 7", "pipe.py:3 push"), 3)
    ranks[1].waits(ranks[1].message("recv float32 [4] from rank 0 tag 8", "pipe.py:9 pull"), 3)
    return ranks


def raised_first() -> list[PaperRank]:
    """Rank 1 raised, and rank 2 because of it."""
    ranks = waiting_for_rank_1(4, 0.4)
    ranks[1].raises("ValueError", "batch 17 is empty", "data.py:31")
    ranks[2].raises("PeerLost", "connection closed by peer", "train.py:40", is_consequence=True)
    return ranks


def without_steps(*left_out: int) -> list[PaperRank]:
    """Rank 1 takes no optimizer step in these."""
    ranks = running(2)
    for step in range(6):
        for one in ranks:
            one.calls(FIRST, SECOND)
            one.step -= one.rank == 1 and step in left_out
    return ranks


def never_steps() -> list[PaperRank]:
    """Rank 1 takes no optimizer step any more, and stays in step 2 for good."""
    ranks = running(2)
    for _ in range(4):
        for one in ranks:
            one.calls(FIRST, SECOND)
            one.step -= one.rank
    return ranks


def left_the_ring() -> list[PaperRank]:
    ranks = with_step(2, [SECOND], after=8)
    for one in ranks:
        one.kept = 8
    return ranks


def unreadable() -> list[PaperRank]:
    ranks = with_step(3, [SECOND])
    for one in ranks:
        one.is_readable = False
    return ranks


def sub_group() -> list[PaperRank]:
    """Ranks 2 and 4 of five reduce among themselves, and differ in the shape."""
    ranks = running(5)
    for rank in (2, 4):
        ranks[rank].group("model", [2, 4])
        ranks[rank].waits(ranks[rank].call(f"all_reduce float32 [{10 * rank}] sum", EXTRA, "model"), 0.8)
    return ranks


def chain() -> list[PaperRank]:
    """Rank 0 waits for rank 1, rank 1 for rank 2 in another group, and rank 2 sleeps."""
    ranks = world(3)
    for one in ranks:
        one.call(site="a.py:1 begin")
    ranks[0].waits(ranks[0].call(group="world", site="a.py:1 f"), 15)
    ranks[1].group("pair", [1, 2])
    ranks[1].waits(ranks[1].call(group="pair", site="b.py:2 g"), 14)
    ranks[2].is_at("c.py:3 h", unmoved_s=20)
    return ranks


# name: (ranks, kind, culprits, is it certain)
CASES: dict[str, tuple[Build, str, tuple[int, ...], bool]] = {
    "skipped, 2 ranks": (lambda: with_step(2, [FIRST]), "mismatch", (1,), True),
    "skipped, 3 ranks": (lambda: with_step(3, [SECOND]), "mismatch", (1,), True),
    "skipped all of a step": (lambda: with_step(2, []), "mismatch", (1,), True),
    "extra, 2 ranks": (lambda: with_step(2, [FIRST, SECOND, EXTRA]), "mismatch", (1,), True),
    "extra in the middle, 5 ranks": (lambda: with_step(5, [FIRST, EXTRA, SECOND]), "mismatch", (1,), True),
    "kind, blocked": (lambda: both_in(REDUCE, "broadcast float32 [4] root=0"), "mismatch", (1,), True),
    "dtype": (lambda: both_in(REDUCE, "all_reduce int32 [4] sum", 3), "mismatch", (1,), True),
    "shape": (lambda: both_in(REDUCE, "all_reduce float32 [2, 2] sum", 3), "mismatch", (1,), True),
    "reduction": (lambda: both_in(REDUCE, "all_reduce float32 [4] max"), "mismatch", (1,), True),
    "root": (lambda: both_in("broadcast int64 [3] root=0", "broadcast int64 [3] root=1"), "mismatch", (0, 1), True),
    "out of the ring": (left_the_ring, "mismatch", (0, 1), True),
    "records of other machines": (unreadable, "mismatch", (1,), True),
    "sub-group": (sub_group, "mismatch", (2, 4), True),
    "steps": (lambda: without_steps(1), "steps", (1,), False),
    "two steps": (lambda: without_steps(1, 3), "steps", (1,), False),
    "steps in a row": (lambda: without_steps(1, 2), "steps", (1,), False),
    "no more steps": (never_steps, "steps", (1,), False),
    "raised": (raised_first, "raised", (1,), True),
    "killed": (lambda: rank_1(killed), "gone", (1,), True),
    "finished": (lambda: rank_1(PaperRank.finishes, size=2), "finished", (1,), True),
    "groups in other order": (groups_in_other_order, "cycle", (0, 1), True),
    "recv and recv": (lambda: receivers(2), "cycle", (0, 1), True),
    "three receivers": (lambda: receivers(3), "cycle", (0, 1, 2), True),
    "tags": (tags_that_differ, "cycle", (0, 1), True),
    "stopped": (lambda: rank_1(stopped, 4.0), "stopped", (1,), False),
    "stopped, half way": (stopped_half_way, "stopped", (1,), False),
    "stopped, half way, further on": (stopped_half_way_further_on, "stopped", (1,), False),
    "stopped, half way of a message": (stopped_half_way_of_a_message, "stopped", (1,), False),
    "hang": (lambda: waiting_for_rank_1(4), "hang", (1,), False),
    "hang behind another": (chain, "hang", (2,), False),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_told_from_the_others(name: str) -> None:
    build, kind, culprits, is_certain = CASES[name]
    finding = found_in(build())
    assert (finding.kind, finding.culprits, finding.is_certain) == (kind, culprits, is_certain), finding.text


def test_the_words_are_those_on_file(request: pytest.FixtureRequest) -> None:
    """`pytest tests/unit/test_diagnosis.py --rewrite-golden` writes it anew; then look at the diff."""
    text = "\n\n".join(f"# {name}\n{found_in(build()).text}" for name, (build, *_) in CASES.items()) + "\n"
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_issue_asks_for_this_sentence() -> None:
    """Five equal all_reduces, of which rank 1 skips one, and nothing raises."""
    ranks = with_step(2, [FIRST])
    text = found_in(ranks).text
    assert "step 4: rank 0 issued 2 collectives in group world, rank 1 issued 1" in text
    assert f"rank 1 skipped {REDUCE} at {SECOND}" in text


@pytest.mark.parametrize("have_ended_it", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_without_synchronisation_is_said_as_such(size: int, culprit: int, have_ended_it: bool) -> None:
    """Seen by the collectives, while the others are in that step, or by the facts, when they have ended it."""
    ranks = world(size)
    for one in ranks:
        told: dict[str, object] = {"0": [1, 0, SITE]}
        one.status_fields["facts"] = {f"sync world/{size}": told}
        one.calls(FIRST)
        if one.rank == culprit:
            told["1"] = [0, 1, SITE]
            one.step += 1
        one.call(REDUCE, FIRST)
        one.step += have_ended_it
    finding = found_in(ranks)
    assert finding.text.startswith("lockstep: NO_SYNC on some ranks only, in step 2")
    assert finding.culprits == (culprit,)
    assert f"rank {culprit} ran 1 backward in no_sync()" in finding.text
    assert "Likely fix: decide by the number of the micro-batch alone" in finding.text


def test_micro_batches_in_no_sync_are_not_taken_for_a_missing_synchronisation() -> None:
    ranks = with_step(2, [FIRST], steps=0)
    for one in ranks:
        one.status_fields["facts"] = {"sync world/2": {"0": [1, 3 + one.rank, SITE]}}
    finding = found_in(ranks)
    assert finding.text.startswith("lockstep: MISMATCH")
    assert "no_sync" not in finding.text


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (f"{REDUCE} by tree", f"{REDUCE} by ring", "algorithm"),
        (REDUCE, f"{REDUCE} by ring", "algorithm"),
        ("barrier", "barrier by dissemination", "algorithm"),
        ("all_gather float32 2 x [4]", "all_gather float32 by ring 2 x [4]", "algorithm"),
        (f"{REDUCE} by ring", "all_reduce float32 [4] max by ring", "reduction"),
        ("broadcast int64 [3] root=0 by tree", "broadcast int64 [3] root=1 by tree", "root"),
    ],
)
def test_another_algorithm_is_told_from_another_reduction(first: str, second: str, what: str) -> None:
    text = found_in(both_in(first, second)).text
    assert f"they differ in {what}\n" in text
    advice = {"algorithm": "pass the same algorithm=", "reduction": "use one reduction", "root": "name the same root"}
    assert f"Likely fix: {advice[what]}" in text


def test_a_mismatch_does_not_wait_for_the_last_rank() -> None:
    """Two of three differ, and the third is long in coming: both are named."""
    ranks = running(3)
    ranks[0].waits(ranks[0].call(REDUCE, FIRST), 0.5)
    ranks[1].waits(ranks[1].call("barrier", FIRST), 0.5)
    assert diagnosed(ranks) is None  # the third may yet decide
    for one in ranks[:2]:
        one.open_s = 1.1
    assert found_in(ranks).culprits == (1,)  # it never did that before


def test_two_of_four_do_not_outvote_the_others() -> None:
    ranks = world(4)
    for one in ranks:
        one.waits(one.call("barrier" if one.rank % 2 else REDUCE, FIRST), 1)
    assert found_in(ranks).culprits == (0, 1, 2, 3)


def test_an_operation_of_no_rank_is_laid_to_no_rank_by_two() -> None:
    """The first collective of all: nothing says which of two is the usual one."""
    ranks = world(2)
    for one in ranks:
        one.waits(one.call(("barrier", REDUCE)[one.rank], FIRST), 1)
    assert found_in(ranks).culprits == (0, 1)


def test_a_text_that_the_record_cuts_is_still_compared() -> None:
    """The digest is of the whole text, the record keeps the beginning."""
    ranks = running(2)
    for one in ranks:
        number = one.call(REDUCE + " " * one.rank, FIRST)
        one.records[number] = one.records[number]._replace(text=REDUCE)
    assert "no room for" in found_in(ranks).text


def test_the_earlier_of_two_failures_is_told() -> None:
    """What rank 2 raised is a consequence; alone it is told too, but not at once."""
    ranks = waiting_for_rank_1(3, 0.4)
    ranks[2].raises("PeerLost", "connection closed by peer", "train.py:40", is_consequence=True)
    assert diagnosed(ranks) is None
    ranks[0].open_s = 3.1
    assert found_in(ranks).culprits == (2,)


def test_two_that_raised_are_both_quoted() -> None:
    ranks = waiting_for_rank_1(4, 0.4)
    ranks[1].raises("ValueError", "batch 17 is empty", "data.py:31")
    ranks[3].open.clear()
    ranks[3].records.pop()
    ranks[3].folds["world"].count -= 1
    ranks[3].raises("KeyError", "'labels'", "data.py:33")
    text = found_in(ranks).text
    assert "rank 1 raised at data.py:31:\n    ValueError: batch 17 is empty" in text
    assert "rank 3 raised at data.py:33:\n    KeyError: 'labels'" in text
    assert "ranks 0,2 wait in" in text


def test_a_message_to_a_rank_that_has_finished() -> None:
    ranks = world(3)
    ranks[0].waits(ranks[0].message("recv float32 [4] from rank 2 tag 0", "pipe.py:9 pull"), 2.6)
    ranks[2].finishes()
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("finished", (2,))
    assert "pipe.py:9 pull" in finding.text


def test_the_killed_one_is_told_after_its_own_record() -> None:
    """Its last status does not say that it has done its part, its record does: the operation may end."""
    ranks = rank_1(killed, 1.5)
    ranks[1].call(REDUCE, FIRST)
    ranks[1].folds["world"].count -= 1
    assert diagnosed(ranks) is None


def test_a_killed_one_that_nobody_misses_is_no_finding() -> None:
    ranks = running(3)
    ranks[1].is_gone, ranks[1].age_s = True, 20
    assert diagnosed(ranks) is None


def test_a_transport_that_stands_still_is_not_laid_to_a_rank() -> None:
    ranks = running(3)
    for one in ranks:
        one.waits(one.call(), 31)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("transport", ())
    ranks[2].is_at(SITE, unmoved_s=0.2)  # one still carries data
    assert diagnosed(ranks) is None


@pytest.mark.parametrize("late", [(1,), (0, 2), (0, 1, 2)])
def test_whose_gpu_has_not_come_to_the_collective_is_blamed_for_it(late: tuple[int, ...]) -> None:
    """All have begun it, and wait; the GPU of some is still at what it was given before."""
    ranks = running(3)
    for one in ranks:
        one.waits(one.call(), 31)
        last = one.records[-1]
        one.status_fields["queued"] = {last.group: last.seq + (one.rank not in late)}
    finding = found_in(ranks)
    if len(late) == 3:
        assert finding.kind == "transport"
        return
    assert (finding.kind, finding.culprits) == ("hang", late), finding.text
    who = "rank 1 waits" if late == (1,) else "ranks 0,2 wait"
    assert f"\n  {who} for a GPU that is at what it was given before: at" in finding.text
    assert "CUDA_LAUNCH_BLOCKING=1" in finding.text
    for one in ranks:
        one.waits(one.records[-1].number, 29)  # it may be long work
    assert diagnosed(ranks) is None


@pytest.mark.parametrize("guilty", [0, 2])
def test_who_began_more_than_in_other_steps_is_blamed_and_not_the_transport(guilty: int) -> None:
    """As by a forward in another thread: of what C++ has started there is nothing else that tells it apart."""
    ranks = world(3)
    for _ in range(3):
        for one in ranks:
            one.calls(FIRST, FIRST, text=FROM_CPP)
    for one in ranks:
        for _ in range(3 if one.rank == guilty else 1):
            one.waits(one.call(FROM_CPP, FIRST), 12.5)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("hang", (guilty,)), finding.text
    began = f"rank {guilty} began 3 collectives of group world in step 4, 2 in the step before"
    assert f"\n  {began}\n" in finding.text
    assert f"Likely fix: look for a call that rank {guilty} alone makes, in another thread perhaps." in finding.text


def test_all_silent_but_one_may_be_that_one() -> None:
    ranks = waiting_for_rank_1(3, 5)
    for one in ranks[1:]:
        one.age_s = 4
        one.status_fields["unmoved_s"] = 0.0
    ranks[2].open.clear()
    ranks[2].records.pop()
    ranks[2].folds["world"].count -= 1
    finding = found_in(ranks)
    assert finding.culprits == (1, 2)
    assert "this host is cut off" in finding.text


def test_who_is_known_to_be_stopped_is_named_at_once() -> None:
    ranks = waiting_for_rank_1(3, 2.1)
    ranks[1].age_s, ranks[1].is_stopped = 1.2, True
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits, finding.is_certain) == ("stopped", (1,), False)
    assert "stopped by a signal" in finding.text
    assert "Likely fix: `kill -CONT 4711`." in finding.text
    ranks[1].host = "node-7"
    assert "Likely fix: on node-7: `kill -CONT 4711`." in found_in(ranks).text
    ranks[1].is_stopped = False  # silent for a moment
    assert diagnosed(ranks) is None


def test_a_slow_step_lengthens_the_patience() -> None:
    ranks = waiting_for_rank_1(3, 12.4)
    for one in ranks:
        one.status_fields["step_s"] = 2.4
    assert found_in(ranks).kind == "hang"
    ranks[0].status_fields["step_s"] = 2.6
    assert diagnosed(ranks) is None


def test_the_same_finding_has_one_key_later_on() -> None:
    early, late = waiting_for_rank_1(3, 11), waiting_for_rank_1(3, 50)
    assert found_in(early).key == found_in(late).key
    assert found_in(with_step(3, [FIRST])).key == found_in(with_step(3, [FIRST], after=20)).key


# ------------------------------------------------------------------ words


@pytest.mark.parametrize("peer", [0, 17, None])
@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_message_is_read_back(kind: str, peer: int | None) -> None:
    found = read_message(message_text(kind, "float32 [3, 5]", peer, 4))
    assert found == (kind == "send", peer, 4)
    assert read_message("all_reduce float32 [4] sum") is None


def test_names_of_ranks() -> None:
    assert names([3]) == "rank 3"
    assert names([2, 0]) == "ranks 0,2"
    assert names([5, 1, 2, 3, 4, 9, 10]) == "ranks 1-5,9,10"


def test_a_thousand_ranks_and_a_long_text_stay_within_the_block() -> None:
    ranks = world(40)
    for one in ranks:
        one.waits(one.call("all_reduce float32 " + "[4, 4, 4]" * 9 + f" {one.rank}", f"{'x' * 50}.py:{one.rank} f"), 2)
    finding = found_in(ranks, Limits(evidence="/" + "y" * 200))
    assert len(finding.text.splitlines()) <= 12


def test_a_message_of_many_lines_is_one_line() -> None:
    ranks = waiting_for_rank_1(2, 0.4)
    ranks[1].raises("RuntimeError", "first\nsecond\n" * 20, "data.py:31")
    assert isinstance(found_in(ranks), Finding)
