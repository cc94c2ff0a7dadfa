"""Where nothing may be said: somebody works, is ahead, or keeps others company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_sights import (
    FIRST,
    LIMITS,
    REDUCE,
    SECOND,
    Build,
    PaperRank,
    diagnosed,
    found_in,
    rank_1,
    running,
    waiting_for_rank_1,
    world,
)

from lockstep.observe.diagnosis import diagnose
from lockstep.observe.motion import CHILDREN
from lockstep.observe.scene import INIT, NEW_GROUP


def at_work(activity: str, age_s: float = 55.0, unmoved_s: float = 55.0) -> list[PaperRank]:
    ranks = waiting_for_rank_1(3, age_s)
    ranks[1].is_at("save.py:3 write", unmoved_s=unmoved_s, activity=activity)
    return ranks


def only_ahead() -> list[PaperRank]:
    """Rank 0 has started a hundred operations that rank 1 has not come to."""
    ranks = running(2)
    for _ in range(50):
        ranks[0].calls(FIRST, SECOND)
    return ranks


def accumulating() -> list[PaperRank]:
    ranks = world(3)
    for step in range(12):
        for one in ranks:
            one.calls(*([FIRST, SECOND] if step % 4 == 3 else [FIRST] * (step % 3)))
    return ranks


def joined(label: str = "", *, joins: bool = False) -> list[PaperRank]:
    """Rank 1 has no more batches and keeps the others company, without counting steps."""
    ranks = running(2)
    for _ in range(5):
        for one in ranks:
            one.call(REDUCE, FIRST, label="ddp.join" if label else "")
            one.call(REDUCE, SECOND, label=label if one.rank == 1 else "")
            one.step += one.rank == 0
    ranks[1].is_at("join.py:1 f")
    ranks[1].status_fields["joins"] = joins
    return ranks


def without_steps() -> list[PaperRank]:
    """Rank 1 has no optimizer."""
    ranks = world(2)
    for _ in range(5):
        for one in ranks:
            one.calls(FIRST, SECOND)
            one.step *= one.rank == 0
    return ranks


def in_c_code() -> list[PaperRank]:
    """Rank 1 sorts, parses or unpickles much at once: its guard does not get the interpreter's lock."""
    ranks = waiting_for_rank_1(3, 19)
    ranks[1].age_s, ranks[1].is_working = 8, True
    ranks[1].is_at("data.py:31 load_batch", unmoved_s=0.2)
    return ranks


def groups_of_few() -> list[PaperRank]:
    """Ranks 0 and 1 have a group that only rank 0 has begun with; 2 and 3 one of the same name, far ahead."""
    ranks = running(4)
    for one in ranks:
        one.group("pair", [0, 1] if one.rank < 2 else [2, 3])
    ranks[0].call("barrier", group="pair")
    for rank in (2, 3):
        for _ in range(30):
            ranks[rank].call("all_gather float32", group="pair")
    return ranks


def teams_with_models_of_their_own() -> list[PaperRank]:
    """Two pairs train a model each; after five steps of the one and eight of the other all ranks tell how it went."""
    ranks = world(4)
    for _epoch in range(3):
        for one in ranks:
            team = one.rank // 2
            for _ in range(5 + 3 * team):
                one.group(f"pair {team}", [2 * team, 2 * team + 1])
                one.call(group=f"pair {team}")
                one.step += 1
            one.call("all_gather int64 [1]")
    return ranks


def one_has_made_the_group() -> list[PaperRank]:
    ranks = running(2)
    ranks[0].group("new", [0, 1])
    ranks[0].waits(ranks[0].call("barrier", group="new"), 4)
    ranks[1].is_at("train.py:60 setup", unmoved_s=4)
    return ranks


def stopped_after_its_part() -> list[PaperRank]:
    """What rank 1 had to do is done, and the other two have all they need: it only takes them a while."""
    ranks = running(3)
    for one in ranks:
        number = one.call()
        if one.rank != 1:
            one.waits(number, 4.0)
    ranks[1].age_s, ranks[1].is_stopped = 3.4, True
    return ranks


def dropped_handles() -> list[PaperRank]:
    """Rank 0 never waits for the work of its own operations, and goes on computing."""
    ranks = running(2)
    ranks[0].waits(ranks[0].call(), 50, unmoved_s=0.0)
    ranks[1].is_at("train.py:3 compute", unmoved_s=50)
    return ranks


def sent_before_received() -> list[PaperRank]:
    """Rank 0 receives from 1 while it has sent to it; rank 1 posted its receive early and computes."""
    ranks = world(2)
    ranks[0].waits(ranks[0].message("recv float32 [4] from rank 1 tag 0"), 4)
    ranks[1].waits(ranks[1].message("recv float32 [4] from rank 0 tag 0"), 4)
    ranks[1].is_at("model.py:8 compute", unmoved_s=4)
    return ranks


def polling() -> list[PaperRank]:
    """Rank 1 polls for what rank 2 does, which is at work; rank 0 waits for both."""
    ranks = waiting_for_rank_1(3, 19)
    ranks[2].open.clear()
    ranks[2].records.pop()
    ranks[2].folds["world"].count -= 1
    ranks[2].is_at("eval.py:3 evaluate", unmoved_s=0.1)
    return ranks


NO_FAULT: dict[str, Build] = {
    "a slow checkpoint": lambda: at_work("checkpoint"),
    "an evaluation on one rank": lambda: at_work("evaluate"),
    "a compilation": lambda: at_work("compile"),
    "a debugger": lambda: at_work("debugger"),
    "a loader that uses a core": lambda: at_work("", 19, unmoved_s=0.3),
    "a loader whose workers use cores": lambda: at_work(CHILDREN),
    "C code that holds Python's lock": in_c_code,
    "everybody computes": lambda: running(3),
    "one rank is ahead": only_ahead,
    "accumulation": accumulating,
    "company with labels": lambda: joined(label="join"),
    "company within Join": lambda: joined(joins=True),
    "a rank without steps": without_steps,
    "groups of few ranks": groups_of_few,
    "teams with models of their own": teams_with_models_of_their_own,
    "a group that one rank has made": one_has_made_the_group,
    "handles nobody waits for": dropped_handles,
    "a receive posted early": sent_before_received,
    "one polls for another's work": polling,
    "killed a moment ago": lambda: rank_1(lambda one: setattr(one, "is_gone", True), 0.3),
    "silent for a moment": lambda: rank_1(lambda one: setattr(one, "age_s", 2.9), 4.0),
    "stopped after its part": stopped_after_its_part,
    "not started yet": lambda: waiting_for_rank_1(3, 30)[::2],
}


@pytest.mark.parametrize("name", NO_FAULT)
def test_no_alarm(name: str) -> None:
    finding = diagnosed(NO_FAULT[name]())
    assert finding is None, finding.text


@pytest.mark.parametrize(
    ("name", "open_s"),
    [
        ("a slow checkpoint", 61),
        ("a loader that uses a core", 21),
        ("a loader whose workers use cores", 61),
        ("C code that holds Python's lock", 21),
        ("one polls for another's work", 21),
    ],
)
def test_a_long_wait_is_mentioned(name: str, open_s: float) -> None:
    ranks = NO_FAULT[name]()
    for one in ranks:
        one.open_s = open_s
    finding = found_in(ranks)
    assert (finding.kind, finding.is_certain) == ("waiting", False)
    assert "is at work" in finding.text
    assert "no fault" in finding.text


def test_workers_excuse_nobody_who_stands_in_an_operation() -> None:
    """They fetch ahead, whatever their rank waits for."""
    ranks = waiting_for_rank_1(3)
    for activity, kind in ((CHILDREN, "hang"), ("checkpoint", None)):
        for one in (ranks[0], ranks[2]):
            one.status_fields["activity"] = activity
        finding = diagnosed(ranks)
        assert (finding and finding.kind) == kind


@pytest.mark.parametrize(("age_s", "looping_s", "is_told"), [(10.1, 7.1, True), (9.9, 9.9, False), (10.1, 6.9, False)])
def test_a_loop_is_mentioned_sooner(age_s: float, looping_s: float, is_told: bool) -> None:
    ranks = at_work("", age_s, unmoved_s=0.0)
    ranks[1].status_fields["looping_s"] = looping_s
    finding = diagnosed(ranks)
    assert (finding is not None) == is_told
    if finding is not None:
        assert (finding.kind, finding.is_certain) == ("waiting", False)
        assert "waiting for rank 1 for 10.1 s in step 4; is that a loop without an end?" in finding.text
        assert f"rank 1 is at work (in one loop for {looping_s} s): at save.py:3 write" in finding.text
    ranks[1].status_fields["activity"] = "evaluate"
    assert diagnosed(ranks) is None


def finished(one: PaperRank) -> None:
    one.finishes()


def working(one: PaperRank) -> None:
    one.is_working = True


def excused(one: PaperRank) -> None:
    one.is_at("save.py:3 write", unmoved_s=99.0, activity="checkpoint")


def moving(one: PaperRank) -> None:
    one.is_at("data.py:31 load_batch", unmoved_s=59.0)


def silent(one: PaperRank) -> None:
    one.age_s = 61.0


def waiting(one: PaperRank) -> None:
    one.waits(one.call(REDUCE, FIRST), 1.0, unmoved_s=61.0)


IDLE: dict[str, tuple[Callable[[PaperRank], object], bool]] = {
    "all": (lambda one: None, True),
    "one has finished": (finished, True),
    "one works in C": (working, False),
    "one saves": (excused, False),
    "one moves": (moving, False),
    "one is not heard, as where a clock has jumped": (silent, False),
    "one is waited for": (waiting, False),
}


@pytest.mark.parametrize("name", IDLE)
def test_all_stand_still_and_none_waits_for_another(name: str) -> None:
    ranks, (change, is_told) = running(3), IDLE[name]
    for one in ranks:
        one.is_at("train.py:77 get_key", unmoved_s=60.5)
    change(ranks[1])
    finding = diagnosed(ranks)
    assert (finding is not None) == is_told
    if finding is not None:
        assert (finding.kind, finding.is_certain) == ("idle", False)
        assert "no rank has moved for 60.5 s in step 4, and none waits for another; no fault so far" in finding.text
        assert f"{'ranks 0,2' if change is finished else 'ranks 0-2'} are idle: at train.py:77 get_key" in finding.text
        assert diagnosed(ranks[::2]) is None  # the third may yet come
        ranks[2].raises("KeyboardInterrupt", "", "train.py:77")
        assert "no rank has moved" not in str(diagnosed(ranks))
    (alone,) = running(1)
    alone.is_at("train.py:77 get_key", unmoved_s=60.5)
    assert diagnosed([alone]) is None


@pytest.mark.parametrize(
    ("looping_s", "is_behind", "kind"), [(9.0, True, "hang"), (0.0, True, None), (9.0, False, None)]
)
def test_who_asks_in_a_loop_waits(looping_s: float, is_behind: bool, kind: str | None) -> None:
    """Whether others have come: without a pause, so it never stands still. Once all have, it is at something else."""
    ranks = waiting_for_rank_1(3)
    if not is_behind:
        ranks[1].call(REDUCE, FIRST)
    for one in (ranks[0], ranks[2]):
        one.is_at("train.py:41 train_step", unmoved_s=0.0)
        one.status_fields["looping_s"] = looping_s
    finding = diagnosed(ranks)
    assert (finding and (finding.kind, finding.culprits)) == (kind and (kind, (1,)))
    ranks[1].is_at("save.py:3 write", unmoved_s=0.5)
    assert diagnosed(ranks) is None


def test_a_rank_that_was_never_heard_of_is_mentioned() -> None:
    finding = found_in(waiting_for_rank_1(3, 61)[::2])
    assert finding.culprits == (1,)
    assert "not been heard of" in finding.text


def test_records_are_only_asked_for_once_something_differs() -> None:
    """They may have to come from another machine."""
    sights = {one.rank: one.sight() for one in only_ahead()}

    def never(rank: int) -> list:
        raise AssertionError(f"the records of rank {rank} were asked for")

    assert diagnose(0, sights, never, LIMITS) is None


def test_whoever_may_yet_send_to_one_that_receives_from_any_is_waited_for() -> None:
    """Not the transport: of what was sent to it and never waited for, nobody knows whether it was received."""
    ranks = world(3)
    ranks[0].waits(ranks[0].message("recv float32 [4] from rank any tag 0"), 40)
    for one in ranks[1:]:
        one.open.add(one.message("send float32 [4] to rank 0 tag 0", "train.py:3 f"))
    ranks[1].is_at("model.py:8 compute", unmoved_s=0.1)
    ranks[1].open_s = 40
    ranks[2].waits(ranks[2].message("recv float32 [4] from rank 0 tag 0"), 40)
    finding = diagnosed(ranks)
    assert finding is not None
    assert (finding.kind, finding.culprits) == ("waiting", (1,)), finding.text


@pytest.mark.parametrize(
    ("begun", "unmoved_s", "others", "kind"),  # by a call in which group; what the others have done, and wait in
    [
        ("", 14, (0, "world"), "waiting"),  # it builds what the others will use
        (INIT, 14, (0, "world"), "waiting"),
        ("", 301, (0, "world"), "hang"),
        ("world", 14, (0, "world"), "hang"),
        (INIT, 14, (1, "world"), "hang"),
        (INIT, 14, (0, NEW_GROUP), "hang"),  # which all make together
    ],
)
def test_a_rank_that_has_not_begun_is_waited_for_longer(
    begun: str, unmoved_s: float, others: tuple[int, str], kind: str
) -> None:
    ranks = world(3)
    for one in ranks:
        if begun or one.rank != 1:
            one.call("barrier", "train.py:3 main", begun or INIT)
        if one.rank != 1:
            one.step, group = others
            one.waits(one.call(REDUCE, FIRST, group), unmoved_s)
    ranks[1].is_at("data.py:7 build", unmoved_s=unmoved_s)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == (kind, (1,)), finding.text
    assert "at data.py:7 build" in finding.text
    assert ("rank 1 is still starting" in finding.text) is (kind == "waiting")


_WRAP = "train.py:8 main"


@pytest.mark.parametrize("step_before", [0, 40])  # of the checkpoint that they go on from
@pytest.mark.parametrize(
    ("calls", "unmoved_s", "kind"),  # lines of rank 1 after its model was wrapped
    [
        ((), 14, "waiting"),
        ((FIRST,), 14, "waiting"),  # a forward that sends buffers, and the batch has still to come
        ((FIRST,), 301, "hang"),
        ((FIRST, SECOND, FIRST), 14, "hang"),  # it trains, though nobody counts its steps
        ((FIRST, FIRST), 14, "hang"),
    ],
)
def test_a_rank_with_a_model_is_waited_for_longer_in_its_first_step(
    calls: tuple[str, ...], unmoved_s: float, kind: str, step_before: int
) -> None:
    ranks = world(3)
    for one in ranks:
        one.step = one.status_fields["step_before"] = step_before
        one.call("barrier", "train.py:3 main")
        for _ in range(2):
            one.call("broadcast float32 [8] root=0", _WRAP)
        for site in calls:
            one.call(REDUCE, site)
        one.status_fields["facts"] = {"model 7f/3/1": {"wrapped": ["d1", _WRAP]}}
        if one.rank != 1:
            one.waits(one.call(REDUCE, "train.py:52 train_step"), unmoved_s)
    ranks[1].is_at("data.py:7 fetch", unmoved_s=unmoved_s)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == (kind, (1,)), finding.text
    assert "at data.py:7 fetch" in finding.text
    assert f"ranks 0,2 wait in {REDUCE} #" in finding.text
    fix = "Likely fix: none while it loads or compiles; else see what holds it. A HANG after 300 s."
    assert (fix in finding.text.splitlines()) is (kind == "waiting")


def test_a_rank_with_a_model_that_has_ended_a_step_is_not_starting() -> None:
    ranks = waiting_for_rank_1(3)
    for one in ranks:
        one.status_fields["facts"] = {"model 7f/3/1": {"wrapped": ["d1", _WRAP]}}
    assert found_in(ranks).kind == "hang"


def test_who_lost_a_rank_that_is_gone_is_not_said_to_be_the_one_that_raised() -> None:
    """Others had waited for long when rank 1 was ended; rank 0 raises at once, who is gone is said a second later."""
    ranks = waiting_for_rank_1(3, 4.3)
    ranks[0].raises("PeerFailed", "rank 1 was ended", "train.py:40", is_consequence=True, of=1)
    ranks[1].is_gone, ranks[1].how = True, "was ended by its launcher: no progress for 10 s"
    assert diagnosed(ranks) is None
    ranks[1].age_s = 1.5
    assert found_in(ranks).text.startswith("lockstep: GONE in step 4.  Culprit: rank 1")


def test_only_a_receive_from_any_rank_is_told_to_send_as_many() -> None:
    """A collective is not, whose missing rank has just been killed: that is said a moment later."""
    ranks = waiting_for_rank_1(3)
    ranks[1].is_gone, ranks[1].how = True, "was killed by SIGKILL"
    assert "as many receives" not in found_in(ranks).text


def test_a_rank_that_nobody_waits_for_does_not_hide_who_lost_another() -> None:
    """Rank 3 is gone, of another group: what rank 2 raised is told all the same."""
    ranks = waiting_for_rank_1(4, 4.3)
    for one in ranks[:3]:
        one.folds["world"].ranks = (0, 1, 2)
    ranks[2].raises("PeerLost", "connection closed by peer", "train.py:40", is_consequence=True)
    ranks[3].open.clear()
    ranks[3].is_gone, ranks[3].how = True, "was killed by SIGKILL"
    assert (found_in(ranks).kind, found_in(ranks).culprits) == ("raised", (2,))
