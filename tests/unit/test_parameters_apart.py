"""Parameters that drift apart though all ranks do alike, and ranks that go past DDP: what is said, and what not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from told_facts import SITE, Tell, found, is_quiet, noted, record

from lockstep.observe.facts import Facts
from lockstep.observe.replica_diff import SIGNS, Entry, fold
from lockstep.observe.scene import FROM_CPP
from lockstep.observe.status import Waiting


def apart(
    kind: str,
    *,
    head: str = "abc",
    starts: Sequence[int] = (7, 7, 7),
    own: Sequence[int] = (1, 2, 3),
    shared: Sequence[int] = (9, 9, 9),
    steps: Sequence[int] = (1, 8),
    is_over: bool = False,
) -> Tell:
    """Two parameters: the body, whose gradients are `shared`, and a head of what `own` gradients have made of it."""

    def tell(facts: Facts, rank: int) -> None:
        for step in steps:
            entries = [Entry("parameter 'body'", str(shared[rank])), Entry("parameter 'head'", head[rank])]
            signs = {"parameter 'body'": [shared[rank], 5, [4, 2]], "parameter 'head'": [own[rank], starts[rank], [3]]}
            rows = [[e.what, e.value, e.holders, e.is_moving] for e in entries] + [[SIGNS, signs, [], False]]
            value = [fold(entries), kind, str(own[rank] + shared[rank]), []]
            facts.tell("replica hand world/3/1", step, value, lambda rows=rows: rows)
        if is_over:
            facts.tell("end", "end", 8)
        facts.tell("lines hand world/3/1", "now", {"step": f"optimizer.step() at {SITE}"})

    return tell


OF_BODY, OF_BOTH = ["all_reduce float32 [4, 2] sum", "broadcast float32 [3]"], ["all_reduce float32 [8] sum"]
ALONE = (1, 2, 3)  # each rank's own gradient, of all
NOT_AVERAGED = {
    "beside what DDP wraps": (apart("loose"), []),
    "of a model that the program averages": (apart("hand"), OF_BODY),
    "of one that it averages as a whole": (apart("hand"), OF_BOTH),
    "of one that it gathers to average": (apart("hand"), ["all_gather float32 [4, 2]"]),
    "by a comm hook that sends nothing": (apart("hook", shared=ALONE, steps=(1, 8, 1024)), []),
    "by such a hook, until the end": (apart("hook", shared=ALONE, is_over=True), []),
}


@pytest.mark.parametrize("name", NOT_AVERAGED)
def test_gradients_that_nobody_averages_are_noted(name: str) -> None:
    tell, texts = NOT_AVERAGED[name]
    [note] = noted(tell, texts=texts)

    assert (note.kind, note.culprits, note.is_certain) == ("replica", (), False)
    text = " ".join(note.text.split())
    assert "UNAVERAGED gradients of" in text
    assert not text.endswith("...")
    assert "seen after step 1." in text
    assert f"ranks 0-2: optimizer.step() at {SITE}" in text
    assert ("parameter 'head' began alike on all ranks; " in text) is ("hook" not in name)


MEANT = {
    "each rank began with its own": (apart("loose", starts=(7, 8, 7)), []),
    "what a rank began with is not known": (apart("hand", starts=(0, -1, -2)), OF_BODY),
    "all are averaged, and of one rank that is not so": (apart("hand", own=(1, 1, 2), head="aab"), []),
    "nobody has averaged anything": (apart("hand", shared=ALONE), []),
    "the same gradient is of work that is done together": (apart("hand"), ["all_reduce float32 [6, 2] sum"]),
    "features are gathered": (apart("hand"), ["all_gather float32 [6, 2]"]),
    "experts, to which tokens are sent": (apart("loose"), ["all_to_all float32 [6, 2]"]),
    "a hook that averages some": (apart("hook"), []),
    "a hook that averaged at first": (apart("hook", shared=ALONE, steps=(8, 16)), []),
    "a hook of models that may be averaged later": (apart("hook", shared=ALONE, steps=(1, 8, 512)), []),
    "a hook of models that are averaged": (
        apart("hook", shared=ALONE, steps=(1, 8, 1024)),
        ["all_reduce float32 [4, 2] sum", "all_reduce float32 [3] sum"],
    ),
    "a hook that was asked once": (apart("hook", shared=ALONE, steps=(1,)), []),
}


@pytest.mark.parametrize("name", MEANT)
def test_parameters_that_are_each_rank_s_own_are_left_alone(name: str) -> None:
    tell, texts = MEANT[name]
    assert is_quiet(tell, texts=texts)


def test_a_model_that_the_program_averages_again_is_left_alone() -> None:
    first, later = apart("hook", shared=ALONE, steps=(1,)), apart("hook", head="aaa", shared=(4, 4, 4), steps=(8,))

    def tell(facts: Facts, rank: int) -> None:
        first(facts, rank)
        later(facts, rank)

    assert is_quiet(tell)


def goes_past(*ranks: int) -> Tell:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("sync world/3/1", 0, [1, 0, ""])
        past = {"past": f"in step 6 a backward went past DistributedDataParallel, at {SITE}"}
        facts.tell("lines world/3/1", "now", past if rank in ranks else {"step": SITE})

    return tell


def standing(age_s: float, text: str = FROM_CPP) -> Mapping[int, Waiting]:
    return {rank: Waiting(record(text), age_s) for rank in (0, 2)}


def test_a_rank_that_goes_past_ddp_is_named_once_others_wait() -> None:
    finding = found(goes_past(1), steps={1: 8}, waits=standing(1.5))

    assert (finding.kind, finding.culprits, finding.is_certain) == ("model", (1,), True)
    text = " ".join(finding.text.split())
    assert "PAST DDP on some ranks only, since step 6." in text
    assert f"rank 1: in step 6 a backward went past DistributedDataParallel, at {SITE}" in text


@pytest.mark.parametrize(
    ("tell", "step", "waits"),
    [
        (goes_past(1), 8, standing(0.5)),
        (goes_past(1), 5, standing(1.5)),
        (goes_past(1), 8, standing(1.5, "barrier")),
        (goes_past(), 8, standing(1.5)),
        (goes_past(0, 1, 2), 8, standing(1.5)),
    ],
    ids=["not for long", "in the same step", "at a barrier", "nobody did", "all did"],
)
def test_ranks_that_go_past_ddp_are_not_named_else(tell: Tell, step: int, waits: Mapping[int, Waiting]) -> None:
    assert is_quiet(tell, steps={1: step}, waits=waits)
