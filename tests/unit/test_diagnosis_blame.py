"""Whose fault it is where the nearest evidence points elsewhere: to the transport, a waiting rank, the next line."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from rank_sights import FIRST, REDUCE, PaperRank, diagnosed, found_in, running, waiting_for_rank_1, world

from lockstep.observe.profile.phases import BACKWARD, DATA
from lockstep.observe.scene import FROM_CPP, channel, message_text, read_message
from lockstep.observe.wording import BEFORE

OTHER = "all_reduce float32 [9] max"


def asleep_after(start: str, to: int = 0) -> list[PaperRank]:
    """Rank 1 has started something that it has not waited for, and stands still elsewhere; the others wait for it."""
    ranks = world(3)
    for one in ranks:
        if start == "async" or one.rank == 1:
            one.open.add(one.call(OTHER, "train.py:3 f") if start == "async" else one.message(start, "train.py:3 f"))
        if one.rank == 1:
            one.is_at("train.py:6 f", unmoved_s=40)
            one.open_s = 40
        else:
            one.waits(one.call(REDUCE, "train.py:7 f"), 40)
    return ranks


@pytest.mark.parametrize("start", ["async", message_text("send", "float32 [4]", 0, 3)])
def test_who_stands_elsewhere_is_blamed_and_not_the_transport_nor_who_waits(start: str) -> None:
    """Not kept busy by a collective that all have come to, nor by a send to one that waits for it."""
    finding = found_in(asleep_after(start))
    assert (finding.kind, finding.culprits) == ("hang", (1,)), finding.text
    assert "rank 1 is not there: at train.py:6 f" in finding.text


RING = "pipe.py:3 pass_on"


def ring(fault: str, size: int, guilty: int, at: str = RING, is_counted: bool = True) -> list[PaperRank]:
    """All send to the next and receive from the one before, in one line; in the fourth round one does not as always.

    Whoever has all that it waits for goes on to a collective.
    """
    ranks, counts = world(size), [Counter[str]() for _ in range(size)]
    lacking: dict[int, list[tuple[int, int, str, int]]] = {}
    for turn in range(4):
        for one in ranks:
            odd = fault if (one.rank, turn) == (guilty, 3) else ""
            to, of = (one.rank + 1 + (odd == "peer")) % size, (one.rank - 1) % size
            texts = [message_text("send", "float32 [4]", to, 7 if odd == "tag of send" else 3)] * (odd != "no send")
            texts += [message_text("recv", "float32 [4]", of, 7 if odd == "tag of recv" else 3)] * (odd != "no recv")
            for text in texts + texts[-1:] * (odd == "one recv more"):
                number, said = one.message(text, RING), read_message(text)
                assert said is not None
                assert said.peer is not None
                mine = channel("world", said.is_send, said.peer, said.tag)
                one.records[number] = one.records[number]._replace(seq=counts[one.rank][mine])
                counts[one.rank][mine] += 1
                other = channel("world", not said.is_send, one.rank, said.tag)
                if turn == 3:
                    lacking.setdefault(one.rank, []).append((number, said.peer, other, counts[one.rank][mine]))
            if turn < 3:
                one.call(REDUCE, "pipe.py:9 average")
                one.step += is_counted
    for one in ranks:
        mine_open = lacking.get(one.rank, [])
        if any(counts[peer][other] < number_of for _, peer, other, number_of in mine_open):
            one.open.update(number for number, *_ in mine_open)
            one.is_at(at, unmoved_s=15)
            one.open_s = 15
        else:
            one.waits(one.call(REDUCE, "pipe.py:9 average"), 15)
        one.status_fields["messages"] = dict(counts[one.rank])
    return ranks


@pytest.mark.parametrize("at", [RING, "pipe.py:4 pass_on"])
@pytest.mark.parametrize(("size", "guilty"), [(2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("fault", ["tag of send", "tag of recv", "peer", "no send", "no recv", "one recv more"])
def test_who_sends_or_awaits_another_message_than_in_steps_before_is_named(
    fault: str, size: int, guilty: int, at: str
) -> None:
    """Waited for in the line that posts the messages, or in the next one."""
    if fault == "peer" and size == 2:
        fault = "tag of send"  # there is no other
    finding = found_in(ring(fault, size, guilty, at))
    assert finding.kind in ("hang", "cycle"), finding.text
    assert finding.culprits == (guilty,), finding.text
    assert "    not sent by" in finding.text or "    not asked for by" in finding.text, finding.text


@pytest.mark.parametrize(("age_s", "is_told"), [(9.9, False), (10.1, True)])
def test_what_no_look_can_prove_to_be_a_circle_is_told_once_the_limit_is_over(age_s: float, is_told: bool) -> None:
    ranks = ring("tag of send", 2, 0, "pipe.py:4 pass_on")
    for one in ranks:
        one.open_s = age_s
        one.is_at("pipe.py:4 pass_on", unmoved_s=age_s)
    assert (diagnosed(ranks) is not None) == is_told


@pytest.mark.parametrize(("age_s", "is_told"), [(10.1, False), (12.1, True)])
def test_what_the_next_look_may_prove_to_be_a_circle_is_waited_for(age_s: float, is_told: bool) -> None:
    ranks = running(2)
    for one in ranks:
        one.waits(one.message(message_text("recv", "float32 [4]", 1 - one.rank, 3)), age_s)
    ranks[1].age_s = 1.2  # it has not spoken for a moment
    assert (diagnosed(ranks) is not None) == is_told


@pytest.mark.parametrize("guilty", [0, 1])
def test_both_ends_are_named_where_no_steps_are_counted(guilty: int) -> None:
    finding = found_in(ring("tag of send", 2, guilty, "pipe.py:4 pass_on", is_counted=False))
    assert (finding.kind, finding.culprits) == ("hang", (0, 1)), finding.text
    assert f"not asked for by rank {1 - guilty}; its last: recv float32 [4] from rank {guilty} tag 3" in finding.text
    assert f"not sent by rank {guilty}; its last: send float32 [4] to rank {1 - guilty} tag 7" in finding.text


def test_a_receive_that_was_posted_early_is_no_fault_of_messages() -> None:
    """A rank that has posted its messages, and stands still elsewhere before it waits for them, is blamed as before."""
    finding = found_in(asleep_after(message_text("recv", "float32 [4]", 0, 3)))
    assert (finding.kind, finding.culprits) == ("hang", (1,)), finding.text
    assert "rank 1 is not there: at train.py:6 f" in finding.text


@pytest.mark.parametrize("guilty", [0, 1])
def test_of_two_the_one_that_stands_in_a_finally_is_blamed_with_its_error(guilty: int) -> None:
    ranks = running(2, 0)
    for one in ranks:
        one.calls(*[FIRST] * 3)
        one.waits(one.call("barrier" if one.rank == guilty else REDUCE, "train.py:50 main"), 1.5)
    assert found_in(ranks).culprits == (0, 1)
    told = "FileNotFoundError: shard-5, at data.py:4"
    ranks[guilty].status_fields["handling"] = told
    found = found_in(ranks)
    assert found.culprits == (guilty,), found.text
    assert f"\n  rank {guilty} was handling {told}\n" in found.text
    assert "Likely fix: see to that error; in a `finally` or an `except` " in found.text
    ranks[1 - guilty].status_fields["handling"] = told  # as both do who go on without an optional package
    assert "handling" not in (both := found_in(ranks)).text
    assert both.culprits == (0, 1)


def test_who_hangs_in_a_finally_is_quoted_with_its_error() -> None:
    ranks = waiting_for_rank_1()
    ranks[1].status_fields["handling"] = "KeyError: 'x', at data.py:4"
    assert "\n    it was handling KeyError: 'x', at data.py:4\n" in found_in(ranks).text


def test_of_two_orders_of_groups_that_of_most_is_right() -> None:
    """Rank 1 has left out a collective of ranks 0 to 3, and gone on to one of all five."""
    ranks = world(5)
    for one in ranks:
        members = (0, 1, 2, 3)
        if one.rank in members:
            one.group("few", members)
        waits_in_few = one.rank in members and one.rank != 1
        one.waits(one.call(group="few" if waits_in_few else "world", site=f"train.py:{7 + waits_in_few} f"), 2.6)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("cycle", (1,)), finding.text
    assert finding.text.splitlines()[0].endswith("rank 0 -> rank 1 -> rank 0.  Culprit: rank 1")


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", ["skipped", "alone issued"])
def test_of_equal_calls_the_one_that_was_left_out_or_put_in_is_named(fault: str, size: int, guilty: int) -> None:
    """By the lines that used to meet: what they say differs only later, where both are stuck."""
    lines = ["train.py:3 f", "train.py:5 f", "train.py:6 f"]
    ranks = world(size)
    for step in range(3):
        for one in ranks:
            odd = step == 2 and one.rank == guilty
            mine = {"skipped": lines[1:], "alone issued": ["train.py:2 f", *lines]}[fault] if odd else lines
            for line in mine:
                one.call(REDUCE, line)
            one.waits(one.call(OTHER, "train.py:8 f"), 0.6)
            if step < 2:
                one.open.clear()
                one.step += 1
    finding = found_in(ranks)
    assert finding.kind == "mismatch"
    assert guilty in finding.culprits
    line = 3 if fault == "skipped" else 2
    assert f"rank {guilty} {fault} {REDUCE} at train.py:{line} f" in finding.text, finding.text


@pytest.mark.parametrize("site", ["train.py:8 f", "train.py:8"])
@pytest.mark.parametrize(("fault", "size"), [("alone issued", 2), ("alone issued", 3), ("skipped", 3)])
def test_a_call_of_a_line_of_its_own_is_named_where_another_line_is_that_of_all(
    fault: str, size: int, site: str
) -> None:
    """As of a loss that rank 0 alone reduces for its log."""
    ranks, guilty = world(size), 1
    for _ in range(3):
        for one in ranks:
            one.call(FROM_CPP, "train.py:8 f")
            one.open.clear()
            one.step += 1
    for one in ranks:
        is_new = (one.rank == guilty) == (fault == "alone issued")
        one.waits(one.call(OTHER, "train.py:12 f") if is_new else one.call(FROM_CPP, site), 0.6)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("mismatch", (guilty,)), finding.text
    assert f"rank {guilty} {fault} {OTHER} at train.py:12 f" in finding.text, finding.text
    assert f"look for a condition that is {'true only' if fault == 'alone issued' else 'false'} on" in finding.text


@pytest.mark.parametrize("guilty", [0, 1])
def test_of_two_the_one_that_left_its_optimizer_out_is_named_though_ddp_once_sent_as_much(guilty: int) -> None:
    """As of ZeroRedundancyOptimizer, which sends what it has stepped. In the second step DDP rebuilds its buckets."""
    ranks = world(2)
    for step in range(7):
        for one in ranks:
            if step:
                one.call(OTHER, "train.py:16 f")
            for _ in range(3 if step == 1 else 1):
                one.call(FROM_CPP, "train.py:15 f")
            one.open.clear()
            one.step += step < 6 or one.rank != guilty
    for one in ranks:
        one.waits(one.call(*(FROM_CPP, "train.py:15 f") if one.rank == guilty else (OTHER, "train.py:16 f")), 0.6)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("mismatch", (guilty,)), finding.text


def test_two_threads_that_use_one_group_are_told_to_part() -> None:
    """As of an asynchronous save of a checkpoint in the group of the training: a thread of its own has no steps."""
    ranks = world(2)
    for _ in range(3):
        for one in ranks:
            one.call(FROM_CPP, "train.py:15 f")
            one.open.clear()
            one.step += 1
    for one, steps in zip(ranks, [(3, 0), (0, 3)], strict=True):
        for one.step in steps:
            one.waits(one.call(*(OTHER, "save.py:7 run") if one.step == 0 else (FROM_CPP, "train.py:15 f")), 0.6)
        one.step = 3
    finding = found_in(ranks)
    assert "MISMATCH in step 4, group world.  Culprits: ranks 0,1" in finding.text, finding.text
    assert "two threads use this group: give one its own" in finding.text


@pytest.mark.parametrize(("early", "size"), [((0, 2), 4), ((0, 3), 4), ((2,), 4)])
def test_all_that_have_finished_too_early_are_named(early: tuple[int, ...], size: int) -> None:
    ranks = running(size)
    for one in ranks:
        if one.rank in early:
            one.finishes()
        else:
            one.waits(one.call(REDUCE, FIRST), 1.5)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("finished", early), finding.text
    names = {(0, 2): "ranks 0,2", (0, 3): "ranks 0,3", (2,): "rank 2"}[early]
    assert f"\n  {names} finished normally after 6 collectives,\n" in finding.text
    assert f"Culprit{'s' * (len(early) > 1)}: {names}" in finding.text.partition("\n")[0]


def epochs(extra: int, guilty: int, fault_in: int) -> list[PaperRank]:
    """Two ranks with a call at the beginning of each epoch of five steps, of which one has too few or many of one."""
    ranks = world(2)
    for one in ranks:
        for epoch in range(fault_in + 1):
            one.call("broadcast int64 [9] root=0", "data.py:8 epoch")
            is_odd = one.rank == guilty and epoch == fault_in
            for step in range(5 + extra * is_odd):
                one.calls(*["train.py:9 main"] * (1 + (epoch == 0 and step < 2)), text=FROM_CPP)
        if (one.rank == guilty) == (extra > 0):  # it is still in its epoch
            one.step -= 1
            one.waits(one.records[-1].number, 0.6)
        else:
            one.waits(one.call("broadcast int64 [9] root=0", "data.py:8 epoch"), 0.6)
    return ranks


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("extra", [-1, 1])
@pytest.mark.parametrize(("fault_in", "is_known"), [(3, True), (2, True), (1, False), (0, False)])
def test_of_two_the_one_whose_epoch_is_not_as_long_as_before_is_named(
    fault_in: int, is_known: bool, extra: int, guilty: int
) -> None:
    """Until two were of one length nobody knows whether they all are: then no one rank is blamed."""
    finding = found_in(epochs(extra, guilty, fault_in))
    assert (finding.kind, finding.culprits) == ("mismatch", (guilty,) if is_known else (0, 1)), finding.text


def passes(*lengths: tuple[int, int | None], **about: Any) -> dict[str, Any]:
    """What a rank tells of passes of one loop: how many batches each has, and that before it had."""
    usual = {"first": "", "rule": "", "order": None, "is_twice": False, "site": "train.py:8 main", "joins": False}
    usual |= {"begun": 1}
    told = {
        str(number): {**usual, "batches": now, "before": before, **about}
        for number, (now, before) in enumerate(lengths)
    }
    return {"data world/2/ab.0": told}


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("extra", [-1, 1])
def test_of_two_the_one_whose_loader_is_not_as_long_as_in_the_epoch_before_is_named(extra: int, guilty: int) -> None:
    """In the second epoch: nothing else shows that epochs are of one length."""
    ranks = epochs(extra, guilty, 1)
    for one in ranks:
        now = 5 + extra * (one.rank == guilty)
        one.status_fields.update(facts=passes((5, None), (now, 5), (now, now)))  # another pass has begun meanwhile
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("mismatch", (guilty,)), finding.text
    counts = "; ".join(f"{f'{5 + extra} (5 before)' if rank == guilty else 5} on rank {rank}" for rank in range(2))
    assert f"batches in pass 2 of the loop at train.py:8 main: {counts}\n" in finding.text
    assert "Likely fix: give all ranks as many batches: DistributedSampler pads" in finding.text


@pytest.mark.parametrize("before", [3, None])
def test_of_two_with_other_lengths_neither_is_named_where_none_is_the_right_one(before: int | None) -> None:
    """Both are not as long as before, or may be of any length in each epoch."""
    ranks = epochs(1, 0, 1)
    for one in ranks:
        one.status_fields.update(facts=passes((3, None), (5 + (one.rank == 0), before)))
    finding = found_in(ranks)
    assert finding.culprits == (0, 1), finding.text
    known = " (3 before)" * (before == 3)
    assert f"pass 2 of the loop at train.py:8 main: 6{known} on rank 0; 5{known} on rank 1\n" in finding.text


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_that_left_out_other_numbers_of_batches_neither_is_blamed_for_ending_first(first: int) -> None:
    ranks = epochs(-1, first, 0)
    for one in ranks:
        one.status_fields.update(facts=passes((8, None), begun=3 + 2 * (one.rank == first)))
    finding = found_in(ranks)
    assert finding.culprits == (0, 1), finding.text
    each = "3 on rank 1; 5 on rank 0" if first == 0 else "3 on rank 0; 5 on rank 1"
    text = " ".join(finding.text.split())
    assert "batches in pass 1 of the loop at train.py:8 main: its first step ended with batch" in text
    assert all(part in text for part in each.split("; "))


@pytest.mark.parametrize(
    ("early", "about", "culprits"),
    [
        ((1,), {}, (1, 0)),  # they have left out other numbers of batches, and nobody knows which is right
        ((0,), {}, (0, 1)),
        ((1,), {"joins": True}, (1,)),
        ((1,), {"begun": 3}, (1,)),
        ((1, 3), {}, (1, 3, 0, 2)),
        ((1,), {"is_large": True}, (1,)),  # of four, three have begun with one batch
    ],
)
def test_who_ends_first_is_not_blamed_where_ranks_have_other_numbers_of_batches(
    early: tuple[int, ...], about: dict[str, Any], culprits: tuple[int, ...]
) -> None:
    ranks = running(4 if len(early) > 1 or about.pop("is_large", False) else 2)
    for one in ranks:
        facts = {"begun": 3 + 3 * (one.rank in early)} | about
        one.status_fields.update(facts=passes((8, None), **facts))
        one.finishes() if one.rank in early else one.waits(one.call(REDUCE, FIRST), 1.5)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("finished", culprits), finding.text
    head = "with other numbers of batches" if len(culprits) > len(early) else "too early"
    assert finding.text.startswith(f"lockstep: FINISHED {head}, in step 4.  Culprit")
    text = " ".join(finding.text.split())
    assert ("loop at train.py:8 main: its first step ended with batch" in text) is (not {"joins", "begun"} & {*about})


def test_of_two_the_one_that_has_fewer_batches_than_before_has_ended_too_early() -> None:
    ranks = running(2)
    for one in ranks:
        one.status_fields.update(facts=passes((5, None), (5 - one.rank, 5)))
    ranks[1].finishes()
    ranks[0].waits(ranks[0].call(REDUCE, FIRST), 1.5)
    finding = found_in(ranks)
    assert finding.culprits == (1,)
    assert "FINISHED too early, in step 4.  Culprit: rank 1 " in finding.text
    assert "batches in pass 2 of the loop at train.py:8 main: 5 on rank 0; 4 (5 before) on rank 1\n" in finding.text


@pytest.mark.parametrize("has_told", [True, False])
def test_first_to_call_what_ends_an_epoch_is_not_blamed_where_the_other_has_more_batches(has_told: bool) -> None:
    """Nobody has made that call before: it is unusual in that step, and yet nobody knows how long the epoch is."""
    ranks = world(2)
    for one in ranks:
        for _ in range(5 + one.rank):
            one.calls("train.py:9 main", text=FROM_CPP)
        one.status_fields.update(facts=passes((5 + one.rank, None)) if has_told else {})
    ranks[0].waits(ranks[0].call("all_reduce float32 [1] sum", "eval.py:8 score"), 0.6)
    ranks[1].step -= 1
    ranks[1].waits(ranks[1].records[-1].number, 0.6)
    assert found_in(ranks).culprits == ((0, 1) if has_told else (0,))


@pytest.mark.parametrize(
    "facts",
    [
        [passes((5, None), (5, 5)), passes((5, None), (5, 5))],
        [passes((5, None)), {}],
        [passes((5, None), (4, 5)), passes((5, None))],  # rank 1 has not come to its second one
        [passes((5, None)), {"data world/2/cd.0": passes((4, None))["data world/2/ab.0"]}],  # another loop
        [passes((5, None), joins=True), passes((4, None), joins=True)],
    ],
)
def test_lengths_that_explain_nothing_are_left_out(facts: list[dict[str, Any]]) -> None:
    ranks = epochs(-1, 1, 2)
    for one, told in zip(ranks, facts, strict=True):
        one.status_fields.update(facts=told)
    finding = found_in(ranks)
    assert finding.culprits == (1,)
    assert "batches in pass" not in finding.text


@pytest.mark.parametrize("guilty", [0, 1])
def test_of_two_the_one_that_called_its_model_twice_in_a_step_left_a_backward_out(guilty: int) -> None:
    ranks = epochs(-1, guilty, 0)
    for one in ranks:
        told = {"0": [1, 0, ""], **({"2": [2, 0, ""], "3": [1, 0, ""]} if one.rank == guilty else {})}
        one.status_fields.update(facts={"sync world/2/1": told})
    finding = found_in(ranks)
    assert finding.culprits == (guilty,), finding.text
    assert f"rank {guilty} called its model 2 times in step 3: was a backward left out?" in finding.text


def test_a_rank_that_waits_for_its_batch_is_said_to_do_that() -> None:
    ranks = waiting_for_rank_1()
    ranks[1].status_fields.update(phases=((DATA, 7),))
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits, finding.is_certain) == ("hang", (1,), False)
    assert finding.text.startswith("lockstep: HANG: no batch for 12.4 s in step 4.  Culprit: rank 1 ")
    assert "rank 1 is loading data: at data.py:31 load_batch, unmoved for 12.4 s" in finding.text
    assert "no deadlock" in finding.text
    ranks[1].status_fields.update(phases=((DATA, 7), (BACKWARD, 9)))
    assert "HANG: nothing has moved" in found_in(ranks).text


@pytest.mark.parametrize("guilty", [0, 1])
def test_of_two_of_whom_nothing_is_known_yet_the_call_that_one_has_beyond_the_other_is_said(guilty: int) -> None:
    ranks = world(2)
    for one in ranks:
        one.calls("train.py:5 f")
        one.calls("train.py:4 f", "train.py:5 f") if one.rank == guilty else one.calls("train.py:5 f")
        one.calls("train.py:5 f")
    found = found_in(ranks)
    assert (found.kind, found.culprits) == ("mismatch", (0, 1))
    assert f"\n  rank {guilty} alone issued {REDUCE} at train.py:4 f\n" in found.text


def test_who_made_a_call_too_many_is_not_excused_by_a_step_that_had_as_many() -> None:
    """Of two groups: rank 0 put in a call of the world, in which rank 1 will never come."""
    ranks = world(2)
    for one in ranks:
        for step in range(3):
            one.call(site="train.py:3 f", group="few")
            one.call(site="train.py:7 f")
            if step == 1:
                one.call(site="train.py:9 f")
            if step < 2:
                one.step += 1
    ranks[0].records[-1] = ranks[0].records[-1]._replace(site="train.py:6 f")
    ranks[0].waits(ranks[0].call(site="train.py:7 f"), 3.0)
    ranks[1].step += 1
    ranks[1].waits(ranks[1].call(site="train.py:3 f", group="few"), 3.0)
    found = found_in(ranks)
    assert (found.kind, found.culprits) == ("cycle", (0, 1)), found.text


def test_a_rank_that_has_not_come_to_its_messages_is_said_to_be_elsewhere() -> None:
    ranks = world(2)
    for one in ranks:
        for step in range(3):
            if step == 2 and one.rank == 0:
                one.is_at("train.py:4 f", unmoved_s=14.0)
                break
            number = one.message(f"recv float32 [4] from rank {1 - one.rank} tag 0", "train.py:6 f")
            if step == 2:
                one.waits(number, 12.4)
                break
            one.message(f"send float32 [4] to rank {1 - one.rank} tag 0", "train.py:6 f")
            one.calls("train.py:7 f")
    found = found_in(ranks)
    assert (found.kind, found.culprits) == ("hang", (0,))
    assert "\n  rank 0 is not there: at train.py:4 f, unmoved for 14.0 s\n" in found.text


def test_what_ended_a_thread_of_the_rank_that_is_missing_is_said() -> None:
    ranks = waiting_for_rank_1(3)
    assert "threads" not in found_in(ranks).text
    ranks[1].status_fields["facts"] = {BEFORE: {"thread": "one of its threads had ended: ValueError: label 7"}}
    found = found_in(ranks)
    assert found.culprits == (1,)
    assert "\n    one of its threads had ended: ValueError: label 7\n" in found.text
