"""What is said of the training from what ranks tell of it: each case, and its quiet neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from told_facts import SITE, Tell, found, is_quiet, noted, record, scene_of

from lockstep.observe.facts import Facts
from lockstep.observe.replica_diff import Entry, fold
from lockstep.observe.training_findings import Training

MODEL = [["parameter", "weight", [4, 2], "float32", True], ["parameter", "bias", [4], "float32", True]]


# ------------------------------------------------------------------ models


def wraps(odd: int, rows: Sequence[Any]) -> Tell:
    def tell(facts: Facts, rank: int) -> None:
        mine = rows if rank == odd else MODEL
        facts.tell("model world/3", "wrapped", [str(mine), f"train.py:{rank}"], lambda: mine)

    return tell


def test_another_model_is_named_by_its_first_parameter() -> None:
    wider = [["parameter", "weight", [5, 2], "float32", True], MODEL[1]]

    finding = found(wraps(1, wider))

    assert (finding.kind, finding.culprits, finding.is_certain) == ("model", (1,), True)
    assert "rank 1 has parameter 'weight' with shape [5, 2], rank 0 with shape [4, 2]" in finding.text
    assert "wrapped at train.py:0 (rank 0), train.py:1 (rank 1)" in finding.text
    assert "Culprit: rank 1 (host b, pid 4711)" in finding.text


def test_of_two_ranks_neither_is_the_culprit() -> None:
    assert found(wraps(1, MODEL[:1]), size=2).culprits == (0, 1)


def test_the_same_parameters_in_another_order_are_told_so() -> None:
    text = " ".join(found(wraps(2, MODEL[::-1])).text.split())

    assert "rank 2 has parameter 'bias' where rank 0 has parameter 'weight', the same ones but registered in" in text


def test_equal_models_are_quiet() -> None:
    assert is_quiet(wraps(1, MODEL))


def test_a_model_that_died_with_its_rank_is_still_said_to_differ() -> None:
    def tell(facts: Facts, rank: int) -> None:
        explain = None if rank == 1 else lambda: MODEL
        facts.tell("model world/3", "wrapped", ["other" if rank == 1 else "one", SITE], explain)

    assert is_quiet(tell)  # it may yet show its own
    assert "rank 1 has another model, which cannot be read" in found(tell, gone=[1]).text


def test_a_parameter_frozen_on_one_rank() -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("trained world/3", 4, [["head.bias"] if rank == 2 else [], True, SITE])

    finding = found(tell)
    assert finding.culprits == (2,)
    assert "rank 2 froze head.bias after wrapping" in finding.text
    assert "FROZEN on some ranks only, in step 5" in finding.text
    assert is_quiet(lambda facts, rank: facts.tell("trained world/3", 4, [["head.bias"], True, SITE]))


def test_where_ddp_looks_for_unused_ones_freezing_is_only_noted() -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("trained world/3", 4, [["bias"] if rank == 2 else [], False, SITE])

    assert [note.culprits for note in noted(tell)] == [(2,)]


def test_no_sync_on_one_rank() -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("sync world/3", 3, [0, 1, SITE] if rank == 1 else [1, 0, SITE])

    finding = found(tell)
    assert finding.culprits == (1,)
    assert "rank 1 ran 1 backward in no_sync() and 0 synchronised ones, at train.py:9 main" in finding.text
    assert is_quiet(lambda facts, _: facts.tell("sync world/3", 3, [1, 3, SITE]))


def test_what_a_rank_told_of_an_earlier_step_holds_until_it_tells_another() -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("sync world/3", 1, [1, 3, SITE])
        if rank == 1:
            facts.tell("sync world/3", 4, [0, 4, SITE])

    assert "in step 5" in found(tell, steps={0: 9, 1: 9, 2: 9}).text
    assert is_quiet(tell, steps={0: 4, 1: 9, 2: 4})  # they have not ended step 4 yet
    assert is_quiet(tell, steps={0: 9, 1: 9, 2: 9}, unheard=[0, 2])  # who may have told the same meanwhile
    assert "in step 5" in found(tell, steps={0: 9, 1: 9, 2: 9}, unheard=[2], gone=[2]).text


def test_a_rank_without_steps_of_the_optimizer() -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("sync world/3", 2, [1, 0, SITE])
        if rank == 0:
            facts.tell("sync world/3", 2, [8, 0, SITE])

    finding = found(tell, steps={0: 2, 1: 9, 2: 9})
    assert (finding.kind, finding.culprits) == ("replica", (0,))
    assert "rank 0 ran 8 synchronised backwards there, at train.py:9 main" in finding.text
    assert "ranks 1,2 went on to step 10" in finding.text


def test_many_backwards_in_each_step_are_none_too_many() -> None:
    """As of LBFGS, or of gradients that are accumulated without no_sync(). What rank 0 told is of a moment ago."""

    def tell(facts: Facts, rank: int) -> None:
        facts.tell("sync world/3", 2, [4, 0, SITE] if rank == 0 else [5, 0, SITE])

    assert is_quiet(tell, steps={0: 2, 1: 9, 2: 9})


def test_what_is_under_way_is_not_compared() -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("sync world/3", 2, [4, 1, SITE] if rank == 0 else [6, 1, SITE])

    assert is_quiet(tell, steps={0: 2, 1: 3, 2: 3})
    assert found(tell, steps={0: 3, 1: 3, 2: 3}).culprits == (0,)


# ------------------------------------------------------------------ replicas


def replicas(
    values: Mapping[int, Sequence[str]], *, kind: str = "ddp", gradients: str = "", what: str = "weight"
) -> Tell:
    """values: by rank, one after each step."""

    topic = f"replica {'hand ' * (kind == 'hand')}world/3/0"

    def tell(facts: Facts, rank: int) -> None:
        for step, value in enumerate(values[rank], 1):
            entries = [Entry("parameter 'weight'", value), Entry("parameter 'bias'", "same")]
            rows = [[e.what, e.value, e.holders, e.is_moving] for e in entries]
            facts.tell(topic, step, [fold(entries), kind, gradients, []], lambda rows=rows: rows)
        facts.tell(topic.replace("replica", "lines"), "now", {**LINES, **(LOADED if rank == 1 else {})})

    return tell


LINES = {key: f"{key} at {SITE}" for key in ("wrapped", "made", "step")}
LOADED = {"loaded": "load_state_dict() at train.py:30 main, in step 2"}


def test_a_replica_that_drifts_is_named_with_its_parameter_and_steps() -> None:
    finding = found(replicas({0: "aaa", 1: "aab", 2: "aaa"}))

    assert (finding.kind, finding.culprits, finding.is_certain) == ("replica", (1,), True)
    assert "REPLICAS differ after step 3, equal after step 2." in finding.text
    assert "parameter 'weight' is a on ranks 0, 2, b on rank 1" in finding.text
    assert "a bit flipped in its memory." in finding.text
    assert "rank 1: load_state_dict() at train.py:30 main, in step 2\n  ranks 0-2: step at train.py:9" in finding.text


def test_nobody_is_named_before_there_may_be_a_majority() -> None:
    three = replicas({0: "aaa", 1: "aab", 2: "aaa"})

    def two_have_told(facts: Facts, rank: int) -> None:
        if rank < 2:
            three(facts, rank)

    assert is_quiet(two_have_told)
    assert found(two_have_told, gone=[2]).culprits == (0, 1)
    assert found(two_have_told, size=2).culprits == (0, 1)  # of the third, on another machine, nothing is seen


def test_running_statistics_are_noted_with_all_ranks_that_keep_them() -> None:
    def tell(facts: Facts, rank: int) -> None:
        if rank < 2:
            entries = [Entry("buffer 'mean'", str(rank), is_moving=True)]
            facts.tell("replica world/3/0", 1, [fold(entries), "ddp", "", ["'mean'"]], list)

    assert is_quiet(tell)


def test_models_of_a_part_of_the_ranks_are_compared_among_them() -> None:
    def tell(facts: Facts, rank: int) -> None:
        if rank < 2:
            rows = [[*MODEL[0]], [*MODEL[1][:4], rank == 0]]
            facts.tell("model part/2/1", "wrapped", [str(rank), SITE], lambda: rows)

    assert found(tell, size=4).culprits == (0, 1)


def test_of_pieces_only_those_who_hold_them_are_named() -> None:
    def tell(facts: Facts, rank: int) -> None:
        pieces = [Entry("parameter 'weight'", "ab"[rank == 3], (rank % 2, rank % 2 + 2))]
        facts.tell("replica hand 0/4/0", 1, [fold(pieces), "pieces", "", []], lambda: pieces)

    finding = found(tell, size=4)
    assert finding.culprits == (1, 3)
    assert "parameter 'weight' is a on rank 1, b on rank 3" in finding.text


def test_what_all_ranks_loaded_explains_nothing() -> None:
    def tell(facts: Facts, rank: int) -> None:
        replicas({0: "aaa", 1: "aab", 2: "aaa"})(facts, rank)
        facts.tell("lines world/3/0", "now", {**LINES, **LOADED})

    assert "load_state_dict" not in found(tell).text


def test_where_no_line_is_known_to_have_written_it_the_one_that_made_its_optimizer_is_said() -> None:
    """As of the model of a GAN whose optimizer does not count the steps."""

    def tell(facts: Facts, rank: int) -> None:
        replicas({0: "aaa", 1: "aab", 2: "aaa"})(facts, rank)
        facts.tell("lines world/3/0", "now", {"made": f"optimizer made at {SITE}"})

    assert f"ranks 0-2: optimizer made at {SITE}\n" in found(tell).text


@pytest.mark.parametrize("good", [1, 84])
def test_a_step_far_from_the_last_good_one_can_be_narrowed_down(good: int) -> None:
    def tell(facts: Facts, rank: int) -> None:
        for step, value in ((good, "a"), (100, "ab"[rank == 1])):
            entry = Entry("parameter 'weight'", value)
            facts.tell("replica world/3/0", step, [fold([entry]), "ddp", "", []], lambda entry=entry: [entry])

    assert ("_EVERY=1 narrows that down to 16 steps or fewer." in " ".join(found(tell).text.split())) == (good == 1)


def test_replicas_that_differ_from_the_start_name_both_of_two() -> None:
    finding = found(replicas({0: "a", 1: "b"}), size=2)

    assert finding.culprits == (0, 1)
    assert "ranks 0,1: step at train.py:9 main" in finding.text
    assert "equal when they were wrapped" in finding.text


def test_equal_replicas_are_quiet() -> None:
    assert is_quiet(replicas({0: "abc", 1: "abc", 2: "abc"}))


def ends(
    counts: Sequence[int],
    backwards: Sequence[Mapping[int, int]],
    values: Sequence[str] = "ab",
    *,
    kind: str = "ddp",
    told: int = 2,
) -> Tell:
    """Of each rank: how many steps it took, how many synchronised backwards there were from which step on, its model.

    told: how many ranks have come to their end.
    """

    def tell(facts: Facts, rank: int) -> None:
        for step, number in backwards[rank].items():
            facts.tell("sync world/2/0", step, [number, 0, ""])
        entry = Entry("parameter 'weight'", values[rank])
        facts.tell("replica world/2/0", counts[rank], [fold([entry]), kind, "", []], lambda: [entry])
        facts.tell("lines world/2/0", "now", {"step": f"optimizer.step() at {SITE}"})
        if rank < told:
            facts.tell("end", "end", counts[rank])

    return tell


ONCE_LESS = ({0: 1}, {0: 1, 3: 2, 4: 1})  # rank 1 runs two backwards in its fourth step: one step was left out
EACH_TWICE = ({0: 2}, {0: 2, 3: 4, 4: 2})


@pytest.mark.parametrize(("backwards", "number"), [(ONCE_LESS, 9), (EACH_TWICE, 18)])
def test_a_step_that_was_left_out_is_certain_at_the_end(backwards: Sequence[Mapping[int, int]], number: int) -> None:
    finding = found(ends((9, 8), backwards), size=2)

    assert (finding.kind, finding.culprits, finding.is_certain) == ("replica", (1,), True)
    text = " ".join(finding.text.split())
    assert f"each rank ran {number} synchronised backwards" in text
    assert "optimizer.step() 9 times on rank 0, 8 times on rank 1" in text
    assert f"ranks 0,1: optimizer.step() at {SITE}" in text


QUIET_ENDS = {
    "one has not come to its end": ends((9, 8), ONCE_LESS, told=1),
    "the models are equal": ends((9, 8), ONCE_LESS, "aa"),
    "the ranks do not average": ends((9, 8), ONCE_LESS, kind="hook"),
    "one went on alone": ends((9, 8), ({0: 1}, {0: 1})),
    "one went on without synchronising": ends((9, 8), ({0: 1, 8: 0}, {0: 1})),
    "within join() nothing is told": ends((9, 8), ({}, {})),
    "what was told first is forgotten": ends((9, 8), ({3: 1}, {3: 2, 4: 1})),
}


@pytest.mark.parametrize("name", QUIET_ENDS)
def test_other_numbers_of_steps_at_the_end_are_no_fault_as_such(name: str) -> None:
    assert is_quiet(QUIET_ENDS[name], size=2)


@pytest.mark.parametrize(("gradients", "is_meant"), [("", False), ("d1", True)])
def test_models_trained_by_hand_are_meant_equal_where_gradients_were(gradients: str, is_meant: bool) -> None:
    tell = replicas({0: "a", 1: "b", 2: "a"}, kind="hand", gradients=gradients)

    assert is_quiet(tell) is not is_meant
    assert not is_meant or "ranks 0-2: made at train.py:9 main" in found(tell).text


@pytest.mark.parametrize("first", [(1, 1), (1, 2)], ids=["both", "one rank alone"])
def test_equal_gradients_are_those_of_all_ranks_in_one_step(first: tuple[int, int]) -> None:
    """Stages of a pipeline may look alike, and each may count its steps from another one on."""

    def tell(facts: Facts, rank: int) -> None:
        for step, gradients in ((first[rank], "d1"), (5, "")):
            rows = [["parameter 'weight'", f"of {rank}", [], False]]
            words = fold([Entry("parameter 'weight'", "same" if gradients else f"of {rank}")])
            facts.tell("replica hand world/2/0", step, [words, "hand", gradients, []], lambda rows=rows: rows)

    scene = scene_of(tell, 2)
    scene.records_of = lambda _: [record("all_reduce", step) for step in (0, 1, 4)]  # pyright: ignore[reportAttributeAccessIssue]
    assert (Training().find_training(scene) is None) is (first == (1, 2))


def test_another_learning_rate_alone_is_noted() -> None:
    def tell(facts: Facts, rank: int) -> None:
        entries = [Entry("lr of parameter group 0", "0.1" if rank else "0.2")]
        rows = [[e.what, e.value, e.holders, e.is_moving] for e in entries]
        facts.tell("replica world/3/0", 1, [fold(entries), "ddp", "", []], lambda: rows)
        facts.tell("lines world/3/0", "now", {"made": f"optimizer made at train.py:{min(rank, 1)}"})

    [note] = noted(tell)
    assert note.culprits == (0,)
    assert "lr of parameter group 0 is 0.1 on ranks 1, 2, 0.2 on rank 0" in note.text
    assert "rank 0: optimizer made at train.py:0\n  ranks 1,2: optimizer made at train.py:1\n" in note.text


def test_running_statistics_that_each_rank_keeps_are_noted() -> None:
    def tell(facts: Facts, rank: int, kept: Sequence[str] = ("'mean'",)) -> None:
        entries = [Entry("buffer 'mean'", str(rank), is_moving=True)]
        facts.tell("replica world/3/0", 1, [fold(entries), "ddp", "", kept], list)
        facts.tell("lines world/3/0", "now", LINES)

    [note] = noted(tell)
    assert "BUFFERS differ on ranks 0-2" in note.text
    assert "each rank keeps its own 'mean', and" in note.text
    assert "ranks 0-2: wrapped at train.py:9 main" in note.text
    assert is_quiet(lambda facts, rank: tell(facts, rank, kept=()))


# ------------------------------------------------------------------ gradients and data


def test_gradients_that_are_not_finite_are_told_once_all_have_come_by() -> None:
    def tell(facts: Facts, rank: int) -> None:
        if rank != 2:
            facts.tell("gradient", 3, ["loss is NaN" if rank == 1 else "", ["weight"], SITE])

    assert is_quiet(tell, unheard=[2])  # it may have told it by now
    assert is_quiet(tell, steps={0: 5, 1: 5, 2: 4})  # what a step has applied may be seen by the loss of the next one
    [note] = noted(tell, steps={0: 5, 1: 5, 2: 5})
    assert (note.kind, note.culprits) == ("gradient", (1,))
    assert "rank 1: loss is NaN at train.py:9 main" in note.text
    assert "gradients after averaging: weight" in note.text


def test_what_a_device_computes_is_told_once_all_know_how_it_went_and_the_first_step_counts() -> None:
    def tells(until: int, told: int | None = None) -> Tell:
        def tell(facts: Facts, rank: int) -> None:
            facts.tell("finite", "until", until if rank == 1 else 9)
            if rank != 1:
                facts.tell("gradient", 3, ["", ["weight"], SITE])
            elif told is not None:
                facts.tell("gradient", told, ["the loss is not finite", ["weight"], SITE])

        return tell

    ahead = {0: 30, 1: 30, 2: 30}
    assert is_quiet(tells(2), steps=ahead)  # rank 1 may yet say that it began there, or before
    [note] = noted(tells(3, told=2), steps=ahead)
    assert (note.culprits, "in step 3." in note.text) == ((1,), True)
    assert "cannot be told" in noted(tells(3), steps=ahead)[0].text
    assert noted(tells(2), steps=ahead, gone=[1])


def test_where_every_loss_was_finite_no_rank_is_blamed() -> None:
    [note] = noted(lambda facts, _: facts.tell("gradient", 3, ["", ["weight"], SITE]))

    assert note.culprits == ()
    assert "cannot be told: every loss was finite" in note.text


def loads(values: Sequence[Mapping[str, Any]], team: str = "world/3", number: int = 1) -> Tell:
    usual = {"batches": 4, "before": 4, "site": SITE, "joins": False, "order": None, "rule": "", "is_twice": False}
    usual |= {"begun": 1}

    def tell(facts: Facts, rank: int) -> None:
        facts.tell(f"data {team}/0", number, {**usual, "first": f"of rank {rank}", **values[rank]})

    return tell


DIFFERENT, SAME = "the ranks have different numbers of batches", "ranks train on the same samples"
AGAIN, RULES = "the samples come in the order of the last pass", "ranks share out the samples by different rules"


@pytest.mark.parametrize(
    ("values", "head", "said", "culprits"),
    [
        ([{}, {"batches": 5}, {}], DIFFERENT, "4 on ranks 0, 2; 5 (4 before) on rank 1.", ()),
        ([{"first": "x"}, {"first": "x"}, {}], SAME, "Ranks 0, 1 got the very same first batch", ()),
        ([{}, {"is_twice": True}, {}], "workers of a loader read the same samples", "get_worker_info", ()),
        ([{"rule": "seed 0"}, {"rule": "seed 1"}, {"rule": "seed 0"}], RULES, "rank 1 by seed 1", ()),
        ([{}, {}, {"order": "call set_epoch"}], AGAIN, "Call set_epoch.", (2,)),
        ([{"order": "call set_epoch"}] * 3, AGAIN, "Call set_epoch.", ()),
    ],
)
def test_data_that_is_dealt_wrong_is_noted(values: list[dict[str, Any]], head: str, said: str, culprits: Any) -> None:
    [note] = noted(loads(values))
    assert note.text.startswith(f"lockstep: DATA: {head}.")
    assert said in note.text
    assert note.culprits == culprits
    assert "in pass 2 of the loop at train.py:9 main" in note.text
    assert is_quiet(loads([{**each, "joins": True} for each in values]))  # join() is there for that


def test_ranks_with_the_same_samples_are_named_once_all_have_told() -> None:
    same = loads([{"first": "x"}] * 3)

    def two_have_told(facts: Facts, rank: int) -> None:
        if rank < 2:
            same(facts, rank)

    assert is_quiet(two_have_told)
    assert "Ranks 0, 1, 2 got the very same first batch" in noted(same)[0].text
    assert "Ranks 0, 1 got" in noted(two_have_told, gone=[2])[0].text
    later = loads([{}] * 3, number=2)  # who has not come by until then does not come by
    both = noted(lambda facts, rank: (two_have_told(facts, rank), rank or later(facts, rank)))
    assert "Ranks 0, 1 got" in both[0].text


def test_ranks_by_hand_are_compared_only_while_their_models_are_equal() -> None:
    same = loads([{"first": "x"}] * 3, team="hand")
    equal = replicas({0: "a", 1: "a", 2: "a"}, kind="hand")

    def both(facts: Facts, rank: int) -> None:
        same(facts, rank)
        equal(facts, rank)

    assert is_quiet(same)
    assert len(noted(both)) == 1


def test_one_file_that_two_ranks_write_in_one_step() -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("save", "model.pt" if rank < 2 else "model-2.pt", [7, f"save.py:{rank}"])

    [note] = noted(tell)
    assert "SAVE: ranks 0,1 wrote one file after step 7, at save.py:0, save.py:1." in note.text
    assert "ranks 0, 1 write the same file model.pt: the last one wins" in note.text
    assert is_quiet(lambda facts, rank: facts.tell("save", "model.pt", [7 + rank, SITE]))  # one after the other


def test_what_is_certain_comes_before_what_is_noted() -> None:
    wrap, load = wraps(1, MODEL[:1]), loads([{}, {"batches": 5}, {}])

    def both(facts: Facts, rank: int) -> None:
        load(facts, rank)
        wrap(facts, rank)

    scene = scene_of(both)
    first = Training().find_training(scene)
    assert first is not None
    assert first.kind == "model"
    assert [note.kind for note in Training().notes(scene)] == ["data"]
