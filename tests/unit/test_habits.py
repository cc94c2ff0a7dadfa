"""Who has left its habit: of ranks that wait for each other, the one that made another call than always before."""

from __future__ import annotations

from collections import Counter

import pytest
from rank_sights import REDUCE, PaperRank, found_in, world

from lockstep.observe.scene import channel, message_text, read_message

PING, PONG = "pair.py:10 play", "pair.py:11 play"


def pair_without_steps(rounds: int, fault: str) -> list[PaperRank]:
    """Rank 0 sends and receives, rank 1 receives and sends; then one of them makes another call than always."""
    ranks = world(2)
    for turn in range(rounds + 1):
        for one, other in zip(ranks, reversed(ranks), strict=True):
            texts = [message_text(kind, f"float32 [{turn + 2}]", other.rank, 0) for kind in ("send", "recv")]
            calls = list(zip(texts if one.rank == 0 else texts[::-1], (PING, PONG), strict=True))
            if turn < rounds:
                for text, site in calls:
                    one.message(text, site)
            elif fault == "end" and one.rank == 0:
                one.waits(one.message(texts[1], "pair.py:20 finish"))
            else:
                one.waits(one.message(*calls[one.rank == 0 and fault == "no send"]), 12.4)
    for one in ranks:
        numbers = Counter[str]()
        for record in one.records:
            said = read_message(record.text)
            assert said is not None
            key = channel("world", said.is_send, 1 - one.rank, 0)
            one.records[record.number] = record._replace(seq=numbers[key])
            numbers[key] += 1
        one.status_fields["messages"] = dict(numbers)
    return ranks


def test_who_leaves_out_a_send_is_named_by_its_habit_where_no_steps_are_counted() -> None:
    finding = found_in(pair_without_steps(3, "no send"))
    assert (finding.kind, finding.culprits) == ("cycle", (0,)), finding.text
    said = " ".join(finding.text.split())
    assert f"rank 0 made recv float32 [5] from rank 1 tag 0 at {PONG}, where it made send " in said
    assert f" to rank 1 tag 0 at {PING} before" in said
    assert "look for a condition, peer or tag that differs on rank 0" in finding.text


@pytest.mark.parametrize(("rounds", "fault"), [(1, "no send"), (3, "end"), (6, "end")])
def test_nobody_is_named_by_a_habit_that_nobody_knows(rounds: int, fault: str) -> None:
    """Too short a one; or a line that was never reached before: maybe it is the other that should be there too."""
    finding = found_in(pair_without_steps(rounds, fault))
    assert finding.culprits == (0, 1), finding.text


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("guilty", [0, 1])
def test_who_skips_a_call_of_two_ranks_before_all_meet_is_named(guilty: int, is_counted: bool) -> None:
    ranks = world(4)
    for turn in range(4):
        for one in ranks:
            if one.rank < 2 and (turn < 3 or one.rank != guilty):
                one.group("1 [0, 1]", (0, 1))
                number = one.call(REDUCE, "train.py:5 f", "1 [0, 1]")
                if turn == 3:
                    one.waits(number, 2.6)
                    continue
            number = one.call(REDUCE, "train.py:7 f")
            one.step += is_counted and turn < 3
            if turn == 3:
                one.waits(number, 2.6)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("cycle", (guilty,)), finding.text
    said = " ".join(finding.text.split())
    made = f"{REDUCE} of group world at train.py:7 f, where it made {REDUCE} of group 1 [0, 1] at train.py:5 f before"
    assert f"rank {guilty} made {made}" in said
    assert f"rank {1 - guilty} waits in {REDUCE} #3 of group 1 [0, 1], train.py:5 f" in said
    assert "different order" not in said


STAGE = "pipe.py:30 main"


def pipeline(step: int, others: int) -> list[PaperRank]:
    """Two stages of four microbatches, all calls of one line; in that step rank 1 wants so many."""
    ranks = world(2)
    numbers = [Counter[str](), Counter[str]()]
    for now in range(step + 1):
        for one in ranks:
            kinds = [("send", "recv"), ("recv", "send")][one.rank]
            calls = [kinds[0]] * 4 + [kinds[1]] * 4
            if now == step:
                calls = [kinds[0]] * others if one.rank == 1 else calls[:5]
            for kind in calls:
                number = one.message(message_text(kind, "float32 [6, 16]", 1 - one.rank, 0), STAGE)
                key = channel("world", kind == "send", 1 - one.rank, 0)
                one.records[number] = one.records[number]._replace(seq=numbers[one.rank][key])
                numbers[one.rank][key] += 1
            one.step += now < step
    for one in ranks:
        one.waits(len(one.records) - 1, 3.0)
        one.status_fields["messages"] = dict(numbers[one.rank])
    return ranks


@pytest.mark.parametrize("step", [0, 3])
def test_a_pipeline_with_another_number_of_microbatches(step: int) -> None:
    """In the first step nobody can tell who is right: the two numbers are told."""
    finding = found_in(pipeline(step, 5))
    assert finding.kind == "cycle", finding.text
    assert finding.culprits == ((1,) if step else (0, 1)), finding.text
    said = " ".join(finding.text.split())
    told = f"not sent by rank 0: it is the 5th in step {step + 1}, rank 0 sent 4, the last at {STAGE}"
    assert told in said, finding.text
