"""What one guard says while things happen one after the other: an event is one block, and a line once it is over."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_sights import FIRST, REDUCE, PaperRank, diagnosed, running, waiting_for_rank_1, world
from watched_guard import Watched, failed, stopped

from lockstep.errors import CollectiveTimeout, CommError, PeerFailed
from lockstep.observe import lookout
from lockstep.observe.guard import Guard
from lockstep.observe.status import Stalled


@pytest.fixture
def watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Watched]:
    made = Watched(tmp_path, capsys)
    yield made
    made.guard.close()


def ended(how: str) -> list[PaperRank]:
    ranks = stopped(12)
    ranks[1].is_stopped, ranks[1].is_gone, ranks[1].how = False, True, how
    return ranks


HOW = "was ended by its launcher: stopped (SIGSTOP) for 10 s"


def test_a_stopped_rank_that_is_ended_is_one_block_and_a_line(watched: Watched) -> None:
    block = watched.sees(stopped())
    assert block[0].startswith("lockstep: STOPPED in step 4.  Culprit: rank 1")
    assert watched.sees(stopped(5)) == []
    assert watched.sees(ended(HOW)) == [f"lockstep: STOPPED, above, is over: rank 1 (pid 4711) {HOW}"]
    with pytest.raises(CommError, match="GONE in step 4"):  # all of it
        watched.guard.raise_if_found()
    assert watched.sees(ended(HOW)) == []


def test_a_stopped_rank_that_goes_on_is_told_to_go_on(watched: Watched) -> None:
    """And the run with it: nothing is raised. If it is stopped once more, that is another event."""
    watched.sees(stopped())
    assert watched.sees(waiting_for_rank_1(3, 3.0)) == []  # it runs, and has not come yet
    going = running(3, steps=4)
    assert watched.sees(going) == ["lockstep: STOPPED, above, is over: rank 1 goes on"]
    assert watched.sees(going) == []
    watched.guard.raise_if_found()
    again = running(3, steps=4)
    for one in (again[0], again[2]):
        one.waits(one.call(REDUCE, FIRST), 4)
    again[1].age_s, again[1].is_stopped = 4, True
    assert watched.sees(again)[0].startswith("lockstep: STOPPED in step 5")
    assert len(watched.sees(ended(HOW))) == 1


def test_what_was_said_is_not_said_again_after_something_else(watched: Watched) -> None:
    """A rank at the border of two states."""
    stuck, busy = waiting_for_rank_1(3, 21), waiting_for_rank_1(3, 21)
    busy[1].is_at("train.py:31 train_step", "data.py:31 load_batch", unmoved_s=0.3)
    said = [watched.sees(ranks)[:1] for ranks in (stuck, busy, stuck, busy)]
    assert [line[0].split()[1] for line in said if line] == ["HANG:", "waiting"]
    assert said[2:] == [[], []]


def test_a_hang_that_ends_in_an_error_quotes_it_in_a_line(watched: Watched) -> None:
    assert watched.sees(waiting_for_rank_1(3))[0].startswith("lockstep: HANG")
    assert watched.sees(failed()) == [
        "lockstep: HANG, above, is over: rank 1 raised at data.py:31: ValueError: label 7"
    ]


def in_step() -> list[PaperRank]:
    """They have averaged once."""
    ranks = world(3)
    for one in ranks:
        one.status_fields["facts"] = {"sync world/3": {"0": [1, 0, FIRST]}}
        one.calls(FIRST)
    return ranks


def in_no_sync(*, knows: bool) -> list[PaperRank]:
    """Rank 1 has left out an average; whether it has said so."""
    ranks = in_step()
    for one in ranks:
        if one.rank == 1:
            if knows:
                one.status_fields["facts"] = {"sync world/3": {"0": [1, 0, FIRST], "1": [0, 1, FIRST]}}
            one.step += 1
        one.call(REDUCE, FIRST)
    return ranks


@pytest.mark.parametrize("is_over", [False, True])
def test_an_operation_that_failed_by_a_hang_names_who_it_waited_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    """Not by one that has passed: then it is for another reason."""
    monkeypatch.setattr("lockstep.observe.lookout.WORDS_S", 0.0)
    monkeypatch.setattr("lockstep.observe.lookout._NEWS_S", 0.0)
    watched.sees(waiting_for_rank_1(3))
    if is_over:
        watched.board.ranks = running(3, steps=4)
    late = RuntimeError("Timed out waiting 60000ms for recv operation to complete")
    cause = watched.guard.cause_of(late)
    if is_over:
        assert cause is late
    else:
        assert isinstance(cause, CollectiveTimeout), cause
        assert str(cause).startswith("HANG: nothing has moved for 12.4 s in step 4.  Culprit: rank 1")
        assert cause.__cause__ is late


def test_the_end_of_another_rank_is_an_event_of_its_own(watched: Watched) -> None:
    watched.sees(stopped())
    ranks = stopped(5)
    ranks[2].open.clear()
    ranks[2].raises("KeyError", "'labels'", "data.py:33")
    ranks[2].records.pop()
    ranks[2].folds["world"].count -= 1
    assert watched.sees(ranks)[0].startswith("lockstep: RAISED in step 4.  Culprit: rank 2")


@pytest.mark.parametrize(("place", "lines"), [("here", 1), ("elsewhere", 9), ("", 9)])
def test_a_report_that_another_rank_gave_counts_in_the_same_output(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, place: str, lines: int
) -> None:
    monkeypatch.setattr("lockstep.observe.voice.place_of", lambda stream: "here" if place else "")
    ranks = ended(HOW)
    ranks[2].status_fields["stalled"] = Stalled("stopped", (1,), (5,), place)
    said = watched.sees(ranks)
    assert len(said) == lines, said


def test_who_has_said_it_tells_the_others(watched: Watched) -> None:
    watched.sees(stopped())
    watched.sees(stopped(3))
    assert watched.board.told is not None
    assert watched.board.told.stalled == Stalled("stopped", (1,), (5,), "")


@pytest.mark.parametrize(
    ("kind", "unmoved_s", "stuck_s"),
    [("hang", 21.0, 21.0), ("hang", 0.3, 0.3), ("stopped", 21.0, 0.0), (None, 21.0, 0.0)],
)
def test_only_who_is_named_in_a_hang_and_does_not_move_is_stuck(
    kind: str | None, unmoved_s: float, stuck_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Watched(tmp_path, capsys, me=1)
    ranks = waiting_for_rank_1(3, 21)
    ranks[1].is_at("train.py:31 train_step", "data.py:31 load_batch", unmoved_s=unmoved_s)
    ranks[0].status_fields["stalled"] = None if kind is None else Stalled(kind, (1,), (5,), "")
    made.sees(ranks)
    assert made.guard.stuck_s == stuck_s
    made.guard.close()


@pytest.mark.parametrize(("waits", "stuck_s"), [(True, 21.0), (False, 0.0)])
def test_who_waits_for_a_message_of_ranks_that_have_ended_is_stuck(
    waits: bool, stuck_s: float, watched: Watched
) -> None:
    """From any of them: nobody else is left whom a launcher could end. Who does not wait any more may stand still."""
    ranks = world(3)
    ranks[0].waits(ranks[0].message("recv float32 [4] from rank any tag 0"), 21)
    for one in ranks[1:]:
        one.finishes()
    said = watched.sees(ranks)
    assert said[0] == "lockstep: HANG: nothing has moved for 21.0 s in step 1.  Culprits: ranks 1,2"
    assert said[-1] == "Likely fix: as many receives from any rank as sends: nobody is left who could send."
    ranks[0].status_fields["stalled"] = Stalled("hang", (1, 2), (-1, -1), "")
    if not waits:
        ranks[0].open.clear()
    watched.sees(ranks)
    assert watched.guard.stuck_s == stuck_s


def test_who_waits_for_one_that_has_failed_has_more_time_to_fail_by_it(watched: Watched) -> None:
    """The launcher of that one has ended it; those of other machines are about to hear of that."""
    ranks = waiting_for_rank_1(3, 21)
    ranks[0].status_fields["stalled"] = Stalled("hang", (1,), (5,), "")
    ranks[1].is_gone, ranks[1].how = True, "was ended by its launcher: no progress for 20 s"
    watched.sees(ranks)
    assert watched.guard.stuck_s == 16.0


def test_time_in_which_nobody_looked_is_not_held_against_anybody(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks were suspended for an hour; the first to run again sees no sign of the others."""
    now_s = time.monotonic()
    clock: Any = time
    monkeypatch.setattr(clock, "monotonic", lambda: now_s)
    assert watched.sees(running(3)) == []
    now_s += 3600
    assert watched.sees(stopped(3600)) == []
    assert watched.board.told is not None
    assert watched.board.told.unmoved_s == 0.0
    now_s += 0.3
    assert watched.sees(stopped(3600)) == []
    now_s += 0.8
    assert watched.sees(stopped(3600))[0].startswith("lockstep: STOPPED")


def at_its_end(watched: Watched, capsys: pytest.CaptureFixture[str]) -> list[str]:
    watched.guard.finish()
    watched.guard.end()
    return capsys.readouterr().err.splitlines()


def test_an_error_that_the_program_has_caught_is_said_once_at_its_end(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    told = list[Any]()
    watched.guard.on_finding.append(told.append)
    assert watched.sees(failed())[0].startswith("lockstep: RAISED")
    with pytest.raises(PeerFailed):
        watched.guard.step_done()
    said = at_its_end(watched, capsys)
    assert said[0] == "lockstep: CAUGHT by the program in step 2, an error of the ranks."
    text = " ".join(" ".join(said).split())
    assert re.search(r" rank 0 at \S*test_guard_says.py:\d+ test_an_error\w+: PeerFailed: RAISED in step 4.", text)
    assert [(one.kind, one.is_certain) for one in told] == [("raised", True), ("caught", False)]


def test_torchs_error_of_another_ranks_end_is_one_that_was_caught(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the guard has found that rank's end meanwhile, or not."""
    watched.sees(running(3))
    watched.guard.saw(RuntimeError("[/x/pair.cc:5] Connection closed by peer [127.0.0.1]:5"))
    assert watched.sees(failed())[0].startswith("lockstep: RAISED")
    said = at_its_end(watched, capsys)
    assert said[0].startswith("lockstep: CAUGHT")
    assert ": RuntimeError: Connection closed by peer [127.0.0.1]:5 Why" in " ".join(" ".join(said).split())


def test_who_had_ended_before_an_error_that_was_caught_is_said_with_it(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = running(3)
    watched.sees(ranks)
    watched.guard.saw(RuntimeError("[/x/pair.cc:5] Connection closed by peer [127.0.0.1]:5"))
    for one in ranks[1:]:
        one.finishes()
    watched.sees(ranks)
    said = at_its_end(watched, capsys)
    assert said[0].startswith("lockstep: CAUGHT")
    assert said[1] == "  rank 1 finished normally after 6 collectives"


def test_what_the_program_has_not_seen_is_raised_at_its_end(watched: Watched) -> None:
    watched.sees(failed())
    with pytest.raises(PeerFailed, match="RAISED in step 4"):
        watched.guard.finish()


def test_nothing_is_said_of_a_rank_that_ends_by_the_error(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watched.sees(failed())
    with pytest.raises(PeerFailed) as raised:
        watched.guard.raise_if_found()
    capsys.readouterr()
    watched.guard.end(raised.value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("other", "state", "says"), [(1, "", True), (2, "finished", True), (0, "finished", False), (0, "raised", True)]
)
def test_one_of_those_who_caught_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: int, state: str, says: bool
) -> None:
    """Who ended by it has not caught it."""
    me = 1
    watched = Watched(tmp_path, capsys, me)
    ranks = failed()
    if other != me:
        facts = {"caught": {"caught": [3, "train.py:8 main", "PeerFailed: RAISED"]}}
        ranks[other].status_fields.update(facts=facts, state=state)
    ranks[1].status_fields.pop("state", None)
    watched.board.ranks = ranks
    watched.guard.saw(RuntimeError("Connection closed by peer"))
    watched.guard.end()
    said = capsys.readouterr().err
    assert ("CAUGHT by the program" in said) == says
    assert ("rank 2 at train.py:8 main: PeerFailed: RAISED" in said) == (other == 2)
    assert "rank 0" not in said
    watched.guard.close()


def test_what_two_threads_of_a_rank_find_at_once_is_said_once(watched: Watched) -> None:
    assert watched.sees(failed())[0].startswith("lockstep: RAISED")
    found = watched.guard.finding
    assert found is not None
    watched.guard._lookout.put_up(found, watched.board.sights())
    assert watched.sees(failed()) == []


def test_what_was_done_a_moment_before_an_end_is_named_in_its_place(watched: Watched) -> None:
    """Rank 1 has raised, and of what rank 2 did before that its guard has yet to tell."""
    watched.board.urgent = failed()
    watched.board.urgent[0].call(REDUCE, FIRST)
    watched.board.urgent[2].call("barrier", "train.py:50 train_step")
    assert watched.sees(failed())[0].startswith("lockstep: MISMATCH in step 4")


def test_what_another_rank_has_said_is_not_said_again(watched: Watched) -> None:
    """The rank that looks for all may be another one meanwhile."""
    ranks = waiting_for_rank_1(3)
    found = diagnosed(ranks)
    assert found is not None
    ranks[2].status_fields["said"] = (found.key,)
    assert watched.sees(ranks) == []


# ------------------------------------------------------------------ when it looks


def moments_of(guard: Guard, begun_s: float, took_s: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When it looks, in three seconds from `begun_s` on; each look takes `took_s`."""
    now_s, moments = begun_s, list[float]()

    def wait(timeout_s: float) -> bool:
        nonlocal now_s
        now_s += timeout_s
        moments.append(round(now_s, 6))
        return now_s > 103

    def look(*, is_urgent: bool) -> None:
        assert not is_urgent
        nonlocal now_s
        now_s += took_s

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s)
        patch.setattr(guard, "_stop", SimpleNamespace(wait=wait))
        patch.setattr(guard, "look", look)
        guard._watch()
    return moments


def test_the_guards_of_a_machine_look_at_the_same_moments(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they were started, and however long a look takes: ranks that wait for each other stand still once."""
    moments = [moments_of(watched.guard, *how, monkeypatch) for how in ((100.07, 0.01), (100.24, 0.11))]
    assert moments[0] == moments[1] == [100 + look / 4 for look in range(1, 14)]


def test_in_a_long_run_it_looks_less_often_while_all_is_well(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """What began to be wrong then is looked at as often as ever."""
    monkeypatch.setattr(lookout, "_YOUNG", 2)
    guard = watched.guard
    seldom, often = [100.4, 100.8, 101.2, 101.6, 102.0, 102.4, 102.8, 103.2], [100 + look / 4 for look in range(1, 14)]

    def moments() -> list[float]:
        return moments_of(guard, 100.07, 0.01, monkeypatch)

    for _ in range(2):
        watched.sees(running(3))
        assert moments() == often  # the run is young
    watched.sees(running(3))
    assert moments() == seldom
    number = guard.enter("world", 0, REDUCE, FIRST)
    watched.sees(running(3))
    assert moments() == seldom  # just begun
    monkeypatch.setattr(guard._lookout, "_period_s", 0.0)
    watched.sees(running(3))
    assert moments() == often  # has been under way since before the last look
    guard.recorder.leave(number)
    monkeypatch.setattr(guard._lookout, "_period_s", 0.25)
    watched.sees(running(3))
    assert moments() == seldom
    watched.sees(stopped())
    assert guard.finding is not None
    assert moments() == often
    watched.sees(running(3, steps=5))  # they go on
    assert guard.finding is None
    assert moments() == seldom


@pytest.mark.parametrize("ends", ["it says why", "it says nothing", "it was nothing", "the program ends"])
def test_who_differs_by_the_records_is_heard_first(
    watched: Watched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Rank 1 has left out an average: its record shows it, what explains it its guard tells when it looks."""
    board, guard = watched.board, watched.guard
    board.ranks, board.urgent = in_step(), in_no_sync(knows=False)
    guard.look(is_urgent=True)
    assert guard.finding is None
    assert guard._lookout.shown_ns
    assert not guard._lookout.is_calm
    assert guard._pause_s() < 0.1  # by then they have
    if ends == "it was nothing":
        board.urgent = board.ranks = in_step()
        guard.look()
        board.urgent = in_no_sync(knows=False)  # which is not asked for any more
        guard.look()
        assert guard.finding is None
        return
    guard.look()
    assert guard.finding is None
    if ends == "the program ends":  # what all have told is said at once
        board.ranks, board.urgent = in_no_sync(knows=True), in_no_sync(knows=True)
        assert guard.look_now() is not None
    elif ends == "it says why":  # who does as most do need not
        board.urgent = in_no_sync(knows=True)
        board.ranks = [*board.urgent[:2], *in_step()[2:]]
    else:
        monkeypatch.setattr(lookout, "_NEWS_S", 0.0)
    guard.look()
    assert not guard._lookout.shown_ns
    said = "MISMATCH in step 2" if ends == "it says nothing" else "NO_SYNC on some ranks only, in step 2"
    assert capsys.readouterr().err.startswith(f"lockstep: {said}, group world.  Culprit: rank 1")


def test_what_names_nobody_has_passed_once_anybody_goes_on(watched: Watched) -> None:
    """All ranks are in the same operation, and nothing moves."""
    ranks = running(3)
    for one in ranks:
        one.waits(one.call(REDUCE, FIRST), 80.0)
        one.status_fields["unmoved_s"] = 80.0
    assert watched.sees(ranks)[0].startswith("lockstep: HANG of the transport")
    assert watched.guard.finding is not None
    assert watched.guard.finding.culprits == ()
    watched.sees(running(3, steps=5))
    assert watched.guard.finding is None
