"""Is what a report seals what was proved? Coverage and replicas, against all that can be wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled_worlds import World
from reported_runs import SECOND, add_notes, append_attempt, coverage_note, full_run

from lockstep.observe.profile.notes import Note
from lockstep.observe.profile.run_record import RankRecord, Run, Start
from lockstep.observe.report.document import document_of
from lockstep.observe.report.proofs import coverage_of, replicas_of
from lockstep.observe.report.source import RunReader, Source
from lockstep.observe.tally import tally_of


def source_of(*notes: list[tuple[str, int, dict[str, Any]]], attempt: str = "a/0") -> Source:
    """Ranks that have said this."""
    ranks = {}
    for rank, said in enumerate(notes):
        start = Start(rank, len(notes), attempt, 1, "h", 10**18, 0)
        kept = tuple(Note(kind, at_us, attempt, fields) for kind, at_us, fields in said)
        ranks[rank] = RankRecord(rank, (start,), (), kept)
    return Source(Path("run"), Run(Path("run"), ranks), None, ())


def epoch_of(*ids: list[int], length: int, **about: Any) -> dict[str, Any]:
    """The only epoch, from what each rank used."""
    found = coverage_of(source_of(*([coverage_note(0, used, length, **about)] for used in ids)))
    assert found is not None
    return found["epochs"][0]


@given(st.integers(1, 300), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_is_sealed_and_every_other_case_is_not(length: int, size: int, draw: Any) -> None:
    order = list(range(length))
    draw.shuffle(order)
    shares = [order[rank::size] for rank in range(size)]
    epoch = epoch_of(*shares, length=length)
    assert (epoch["sealed"], epoch["twice"], epoch["missing"], epoch["examples"]) == (True, 0, 0, "")
    assert epoch["digest"] == tally_of(list(range(length))).digest().hex()
    uses = [0.0] * length
    for _, first, last, times in epoch["cells"]:
        for sample in range(first, last + 1):
            uses[sample] += times
    assert uses == pytest.approx([1.0] * length, abs=0.001 * size)
    rank = draw.randrange(size)
    if shares[rank]:
        shares[rank][0] = draw.choice([*range(shares[rank][0]), *range(shares[rank][0] + 1, length), -1])
        assert not epoch_of(*shares, length=length)["sealed"]


def test_how_many_are_missing_and_used_twice_is_said_as_far_as_it_is_known() -> None:
    epoch = epoch_of(list(range(50)), list(range(50)), length=100)
    assert (epoch["sealed"], epoch["twice"], epoch["missing"]) == (False, 50, 50)
    assert "too often among 0 to" in epoch["examples"]
    assert "missing among 50 to" in epoch["examples"]
    assert not epoch["running"]


def test_padding_of_the_sampler_is_taken_into_account() -> None:
    again = tally_of([0]).digest().hex()
    assert epoch_of([0, 1, 2], [3, 4, 0], length=5, again=again, repeated=1)["sealed"]
    assert not epoch_of([0, 1, 2], [3, 4, 1], length=5, again=again, repeated=1)["sealed"]
    left = tally_of([4]).digest().hex()
    assert epoch_of([0, 1], [2, 3], length=5, left=left, dropped=1)["sealed"]
    assert epoch_of([0, 1], [2, 2], length=5, left=left, dropped=1)["missing"] == 1


def test_what_the_ranks_have_put_together_holds() -> None:
    total = {"samples": 10, "digest": "ab", "verdict": "exact", "words": "all 10 samples once"}
    epoch = epoch_of([1], [2], length=10, total=total)  # the other eight before a restart
    assert (epoch["sealed"], epoch["samples"], epoch["digest"]) == (True, 10, "ab")
    wrong = epoch_of([1], [2], length=10, total={**total, "verdict": "no", "words": "2 samples missing"})
    assert not wrong["sealed"]
    assert wrong["examples"].startswith("2 samples missing")


def total(samples: int, length: int) -> dict[str, Any]:
    """As the ranks have it when they put together what they know."""
    verdict = "exact" if samples == length else f"{samples} of {length} samples so far"
    return {"total": {"samples": samples, "digest": "ab", "verdict": verdict, "words": ""}, "repeated": 0, "dropped": 0}


def starts_of(*starts: list[list[tuple[str, int, dict[str, Any]]]]) -> Source:
    """Start by start what each rank has said."""
    ranks = {}
    for rank in range(max(map(len, starts))):
        own = [(f"a/{n}", start[rank]) for n, start in enumerate(starts) if rank < len(start)]
        begun = tuple(Start(rank, 2, name, 1, "h", 10**18, 0) for name, _ in own)
        notes = tuple(Note(kind, at_us, name, fields) for name, said in own for kind, at_us, fields in said)
        ranks[rank] = RankRecord(rank, begun, (), notes)
    return Source(Path("run"), Run(Path("run"), ranks), None, ())


def test_grid_has_what_the_starts_before_had_used_when_the_last_one_went_on() -> None:
    """Of 100 samples two ranks use 40, save, use 20 more and die; from there two go on to 80, and one to the end."""
    first = [
        [coverage_note(0, range(20), 100, **total(40, 100)), coverage_note(0, range(30), 100, **total(60, 100))],
        [
            coverage_note(0, range(30, 50), 100, **total(40, 100)),
            coverage_note(0, range(30, 60), 100, **total(60, 100)),
        ],
    ]
    second = [[coverage_note(0, ids, 100, **total(80, 100))] for ids in (range(20, 30), range(50, 80))]
    third = [[coverage_note(0, range(80, 100), 100, **total(100, 100))]]
    found = coverage_of(starts_of(first, second, third))
    assert found is not None
    (epoch,) = found["epochs"]
    assert (epoch["sealed"], epoch["earlier"], epoch["missing"]) == (True, 0, 0)
    uses = [[0.0] * 100, [0.0] * 100]
    for rank, begin, last, times in epoch["cells"]:
        uses[rank][begin : last + 1] = [times] * (last + 1 - begin)
    assert [sum(each) for each in uses] == pytest.approx([50, 50], abs=0.01)
    assert [sum(each) for each in zip(*uses, strict=True)] == pytest.approx([1.0] * 100)
    half = coverage_of(starts_of(first[:1], second))
    assert half is not None
    assert half["epochs"][0]["earlier"] == 20, "what rank 1 has used is not known"


def test_epoch_that_goes_on_is_no_fault() -> None:
    source = source_of([coverage_note(3, list(range(40)), 100)])
    found = coverage_of(source)
    assert found is not None
    assert found["epochs"][0]["running"]
    document = document_of(source, "running", 0)
    assert not [card for card in document["cards"] if "Epoch" in card["title"]]
    later = document_of(source_of([coverage_note(3, list(range(40)), 100), coverage_note(4, [1], 100)]), "running", 0)
    assert [card["title"] for card in later["cards"] if "Epoch" in card["title"]] == [
        "Epoch 3 did not use each sample once"
    ]


def test_pass_that_was_left_early_or_went_on_is_no_fault() -> None:
    both = {"earlier": 0, "left_early": False}
    rank_0, rank_1 = list(range(20)), list(range(50, 70))
    for about, is_off in (({"left_early": True}, False), ({"earlier": 60}, False), ({"earlier": 59}, True)):
        notes = [[coverage_note(0, ids, 100, **(both | about)), coverage_note(1, [], 100)] for ids in (rank_0, rank_1)]
        document = document_of(source_of(*notes), "finished", 0)
        epoch = document["coverage"]["epochs"][0]
        assert (epoch["sealed"], epoch["earlier"]) == (False, about.get("earlier", 0))
        assert any("Epoch 0" in card["title"] for card in document["cards"]) == is_off
    left = {"left_early": True, "earlier": 0}
    assert epoch_of([1, 2, 2], [2], length=4, **left)["twice"] > 0  # and this stays one
    assert epoch_of([0, 1], [2, 3], length=4, **left)["sealed"]


def test_last_start_that_did_an_epoch_counts(tmp_path: Path) -> None:
    World(work_us=lambda rank, step: 1000, world_size=1, steps=4).run(tmp_path)
    add_notes(tmp_path, 0, coverage_note(0, [0, 1, 2, 2], 9))
    later = World(work_us=lambda rank, step: 1000, world_size=1, steps=6).run(tmp_path / "later").folder
    add_notes(later, 0, coverage_note(0, list(range(9)), 9))
    append_attempt(tmp_path, 0, later, "a/10")
    found = coverage_of(RunReader(tmp_path).read())
    assert found is not None
    assert found["epochs"][0]["sealed"]


def test_many_epochs_of_many_ranks_are_bounded() -> None:
    notes = [[coverage_note(e, list(range(rank, 640, 64)), 640) for e in range(30)] for rank in range(64)]
    found = coverage_of(source_of(*notes))
    assert found is not None
    assert [epoch["epoch"] for epoch in found["epochs"]] == list(range(30))
    assert all(epoch["sealed"] for epoch in found["epochs"])
    assert len(found["epochs"][-1]["cells"]) in range(1, 2001)
    assert sum(len(epoch["cells"]) for epoch in found["epochs"]) <= 6000


def replica_notes(*equal: bool) -> list[tuple[str, int, dict[str, Any]]]:
    return [
        ("replicas", SECOND, {"step": 10 * n, "equal": is_equal, "digest": f"{n}", "what": "parameters"})
        for n, is_equal in enumerate(equal, 1)
    ]


def test_replicas_are_sealed_up_to_the_first_difference() -> None:
    found = replicas_of(source_of(replica_notes(True, True, False, True), replica_notes(True, True, True, True)))
    assert found is not None
    assert found["checks"] == [[10, True], [20, True], [30, False], [40, True]]
    assert (found["sealed_until"], found["count"], found["digest"]) == (20, 4, "4")
    never = replicas_of(source_of(replica_notes(False)))
    assert never is not None
    assert never["sealed_until"] is None
    assert replicas_of(source_of([])) is None
    assert coverage_of(source_of([])) is None


def test_drift_is_a_card_with_its_step() -> None:
    cards = document_of(source_of(replica_notes(True, False)), "failed", 0)["cards"]
    drift = next(card for card in cards if "differ at step" in card["title"])
    assert (drift["severity"], drift["step"], drift["text"]) == ("error", 20, "after step 10 they were equal")
    assert not [card for card in cards if card["severity"] == "good"]


def test_cells_of_a_real_shape(tmp_path: Path) -> None:
    document = document_of(RunReader(full_run(tmp_path, world_size=3, steps=12)).read(), "finished", 0)
    first, second = document["coverage"]["epochs"]
    assert first["sealed"]
    assert not second["sealed"]
    assert second["twice"] >= 1


def test_an_epoch_that_a_killed_rank_did_not_come_to_tell_is_open_and_not_broken() -> None:
    """Three ranks begin, two tell epoch 0 and all tell epoch 1: of epoch 0 nobody knows what the third one read."""
    early = [coverage_note(0, range(rank, 9, 3), 9) for rank in range(3)]
    late = [coverage_note(1, range(rank, 9, 3), 9) for rank in range(3)]
    found = coverage_of(source_of([early[0], late[0]], [early[1], late[1]], [late[2]]))
    assert found is not None
    states = {epoch["epoch"]: (epoch["running"], epoch["sealed"]) for epoch in found["epochs"]}
    assert states == {0: (True, False), 1: (False, True)}
