"""A machine that is not heard any more: its network, or all of it, and no rank that is to blame."""

from __future__ import annotations

import pytest
from rank_sights import FIRST, REDUCE, PaperRank, diagnosed, found_in, running

from lockstep.errors import CollectiveTimeout
from lockstep.observe.status import Stalled


def two_machines(silent_s: float = 3.4, age_s: float = 4.0) -> list[PaperRank]:
    """Four ranks, the last two of them on another machine; all stand in one operation."""
    ranks = running(4)
    for one in ranks:
        one.waits(one.call(REDUCE, FIRST), age_s)
        one.host, one.age_s = ("near", 0.0) if one.rank < 2 else ("far", silent_s)
    return ranks


def has_not_come(one: PaperRank) -> None:
    one.open.clear()
    one.folds, one.records = running(4)[one.rank].folds, running(4)[one.rank].records
    one.is_at("train.py:31 train_step")


@pytest.mark.parametrize("has_come", [True, False])
def test_all_ranks_of_a_machine_that_fell_silent_are_named_together(has_come: bool) -> None:
    ranks = two_machines()
    if not has_come:
        for one in ranks[2:]:
            has_not_come(one)
    found = found_in(ranks)
    assert (found.kind, found.culprits, found.is_certain) == ("unreachable", (2, 3), False)
    assert found.text.startswith("lockstep: UNREACHABLE in step 4.  Culprits: ranks 2,3\n")
    assert "\n  ranks 0,1 wait in all_reduce float32 [4] sum #6 of group world, train.py:40 train_step" in found.text
    assert "\n  nothing has come from far (ranks 2,3) for 3.4 s: " in found.text
    assert "`ping far`" in found.text
    assert isinstance(found.comm_error(), CollectiveTimeout)


def test_a_machine_with_the_same_name_is_another_one() -> None:
    ranks = two_machines()
    for one in ranks[2:]:
        one.host, one.machine = "near", 2
    found = found_in(ranks)
    assert (found.kind, found.culprits) == ("unreachable", (2, 3))
    assert "nothing has come from near (ranks 2,3) for 3.4 s" in found.text
    assert "\nLikely fix: ping the other near, and see there whether its ranks run; " in found.text


def test_nothing_is_said_before_somebody_has_waited_for_them() -> None:
    assert diagnosed(two_machines(silent_s=2.5)) is None
    assert diagnosed(two_machines(age_s=2.5)) is None


def test_one_of_several_is_stopped() -> None:
    """Its machine is heard through the other."""
    ranks = two_machines()
    has_not_come(ranks[2])
    ranks[3].age_s = 0.2
    assert (found_in(ranks).kind, found_in(ranks).culprits) == ("stopped", (2,))


def test_whose_launcher_has_ended_it_for_it_waited_is_not_to_blame() -> None:
    """The launchers of all machines that still hear each other do so, one after the other."""
    ranks = two_machines()
    ranks[0].status_fields["stalled"] = Stalled("unreachable", (2, 3), (6, 6), "")
    ranks[1].is_gone, ranks[1].how, ranks[1].age_s = True, "was ended by its launcher: no progress for 4 s", 2.0
    assert (found_in(ranks).kind, found_in(ranks).culprits) == ("unreachable", (2, 3))
    ranks[1].how = "was killed by SIGKILL, out of memory"
    assert (found_in(ranks).kind, found_in(ranks).culprits) == ("gone", (1,))


def test_whom_its_launcher_says_to_be_stopped_is_no_machine() -> None:
    ranks = two_machines()
    for one in ranks[2:]:
        has_not_come(one)
        one.is_stopped = True
    assert (found_in(ranks).kind, found_in(ranks).culprits) == ("stopped", (2, 3))


@pytest.mark.parametrize(
    ("unmoved_s", "is_working", "is_told"), [(60.5, False, True), (59.0, False, False), (60.5, True, False)]
)
def test_a_lost_machine_is_named_where_the_others_do_nothing(unmoved_s: float, is_working: bool, is_told: bool) -> None:
    """A key of the store, a lock, a file: no guard can see whether they wait for a rank there."""
    ranks = two_machines(silent_s=62.0)
    for one in ranks:
        has_not_come(one)
        one.is_at("train.py:77 get_key", unmoved_s=unmoved_s)
    ranks[1].is_working = is_working
    found = diagnosed(ranks)
    assert (found and (found.kind, found.culprits, found.is_certain)) == (
        ("unreachable", (2, 3), False) if is_told else None
    )
    assert not is_told or "\n  nothing has come from far (ranks 2,3) for 62.0 s: " in str(found and found.text)


@pytest.mark.parametrize("is_working", [False, True])
def test_of_whom_its_launcher_tells_no_machine_is_lost(is_working: bool) -> None:
    """The only rank there is in C code that holds Python's lock, or the kernel does not run it."""
    ranks = two_machines(silent_s=21.0, age_s=21.0)[:3]
    for one in ranks:
        one.world_size = 3
    has_not_come(ranks[2])
    ranks[2].is_seen, ranks[2].is_working = True, is_working
    found = found_in(ranks)
    assert (found.kind, found.culprits) == ("waiting" if is_working else "stopped", (2,))
    assert not is_working or "rank 2 is at work (C code that holds Python's lock)" in found.text
