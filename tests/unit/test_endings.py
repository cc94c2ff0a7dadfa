"""Whose end is named where ranks end one after the other, and in which words."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_sights import PaperRank, diagnosed, found_in, rank_1, running, waiting_for_rank_1
from test_board import DictStore

from lockstep.errors import CommError, PeerFailed, PeerLost, TransportClosed
from lockstep.observe import endings
from lockstep.observe.board import Board, send_ends, tell_ends
from lockstep.observe.endings import BECAUSE_OF_ANOTHER, left_first
from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.guard import Guard
from lockstep.observe.onlooker import post_mortem, told_in
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import flight_path
from lockstep.observe.status import FINISHED, LastWords, Progress, Status
from lockstep.observe.wording import BEFORE


def first_of(ranks: list[PaperRank], me: int = 0, *, is_final: bool = True) -> tuple[int, str] | None:
    return left_first(me, {one.rank: one.sight() for one in ranks}, is_final=is_final)


def kill(one: PaperRank, how: str = "was killed by SIGKILL") -> None:
    one.is_gone, one.how, one.age_s = True, how, 1.3


CLOSED = "Connection reset by peer"
BROUGHT = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/lib/torch/fetch.py", line 54, in fetch
  File "{cwd}/data.py", line 18, in __getitem__
ValueError: sample 40
"""
SPAWNED = """

-- Process 3 terminated with the following error:
Traceback (most recent call last):
  File "/lib/torch/multiprocessing/spawn.py", line 90, in _wrap
  File "{cwd}/data.py", line 19, in work
KeyError: 40
"""


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised_from(*causes: BaseException, is_hidden: bool = False) -> KeyError:
    """An error that came up while that was handled, which came up while the next one was."""
    error = last = KeyError(1)
    for cause in causes:
        last.__context__, last.__suppress_context__ = cause, is_hidden
        last = cause
    return error


def undo(one: PaperRank) -> None:
    """It has not come to the operation that it waits in."""
    one.open.clear()
    one.records.pop()
    one.folds["world"].count -= 1


def fail(one: PaperRank) -> None:
    one.raises("ValueError", "label 7", "data.py:31")


def blame_rank_3(one: PaperRank) -> None:
    one.raises("PeerFailed", "in step 3 rank 3 (pid 4713) was killed", "train.py:40", True, 3)


def fail_blindly(one: PaperRank) -> None:
    one.raises("RuntimeError", "Connection closed by peer", "train.py:40", True)


ORDER = (  # the first that is there is named
    (fail, "in step 4 rank {} raised at data.py:31: ValueError: label 7"),
    (kill, "in step 4 rank {} (pid {}) was killed by SIGKILL"),
    (PaperRank.finishes, "in step 4 rank {} finished normally after 6 collectives"),
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_cause_is_named_before_an_effect(order: tuple[int, ...]) -> None:
    ranks = running(4)
    ranks[0].call()
    for place, rank in enumerate(order, 1):
        ORDER[rank][0](ranks[place])
    for rank, (_, words) in enumerate(ORDER):
        place = order.index(rank) + 1
        assert first_of(ranks) == (place, words.format(place, 4710 + place))
        ranks[place] = running(4)[place]
    assert first_of(ranks) is None


def test_whoever_has_lost_another_names_it_and_is_not_named() -> None:
    ranks = running(4)
    fail_blindly(ranks[1])
    assert first_of(ranks) is None
    blame_rank_3(ranks[1])
    assert first_of(ranks, is_final=False) == (3, "in step 3 rank 3 (pid 4713) was killed")
    assert first_of(ranks, me=3) is None  # which knows better
    kill(ranks[2])
    assert first_of(ranks) == (2, "in step 4 rank 2 (pid 4712) was killed by SIGKILL")  # it is seen


def test_who_was_ended_because_of_another_is_not_named() -> None:
    ranks = running(3)
    kill(ranks[1], BECAUSE_OF_ANOTHER)
    assert first_of(ranks) is None
    assert diagnosed(rank_1(lambda one: kill(one, BECAUSE_OF_ANOTHER))) is None


def interrupt(one: PaperRank) -> None:
    one.raises("KeyboardInterrupt", "KeyboardInterrupt", "train.py:12")


@pytest.mark.parametrize(
    ("how", "is_fault"), [(None, False), (BECAUSE_OF_ANOTHER, False), ("was killed by SIGINT", True)]
)
def test_a_stop_by_the_user_is_no_fault_and_one_that_the_program_raises_is(how: str | None, is_fault: bool) -> None:
    def leave(one: PaperRank) -> None:
        interrupt(one)
        if how is not None:
            kill(one, how)

    for age_s in (1.5, 40.0):  # the others may have waited for long, and that is why it was stopped
        found = diagnosed(rank_1(leave, age_s))
        assert (found.culprits if found else None) == ((1,) if is_fault else None)
    ranks = running(3)
    leave(ranks[1])
    assert (first_of(ranks) is not None) == is_fault


def test_of_ranks_that_were_killed_the_first_is_quoted_first() -> None:
    ranks = waiting_for_rank_1(4)
    for rank, how in ((1, "was killed by SIGKILL, 0.08 s after rank 2"), (2, "was killed by SIGKILL")):
        undo(ranks[rank]) if rank == 2 else None
        kill(ranks[rank], how)
    found = found_in(ranks)
    assert found.culprits == (1, 2)
    first, second = (
        "rank 2 (pid 4712) was killed by SIGKILL",
        "rank 1 (pid 4711) was killed by SIGKILL, 0.08 s after rank 2",
    )
    assert f"\n  {first}\n  {second}\n" in found.text


def test_of_who_finished_the_collectives_of_that_group_are_counted() -> None:
    ranks = running(3)
    for rank in (0, 2):
        ranks[rank].group("pair", [0, 2])
        ranks[rank].call("barrier", group="pair")
    ranks[2].finishes()
    ranks[0].waits(ranks[0].call("barrier", group="pair"), 1.5)
    text = " ".join(found_in(ranks).text.split())
    assert "rank 2 finished normally after 1 collective, rank 0 wanted a 2nd (barrier, " in text


@pytest.mark.parametrize(("size", "culprit"), [(2, 1), (3, 0), (4, 0)])
def test_who_calls_alone_after_most_have_ended_is_the_odd_one(size: int, culprit: int) -> None:
    ranks = running(size)
    for one in ranks[1:]:
        one.finishes()
    ranks[0].waits(ranks[0].call("barrier", "train.py:50 main"), 1.5)
    found = found_in(ranks)
    assert found.culprits == (culprit,), found.text
    others = "rank 1" if size == 2 else f"ranks 1{',' if size == 3 else '-'}{size - 1}"
    assert f"\n  {others} finished normally after 6 collectives,\n  rank 0 wanted a 7th (barrier, " in found.text


def test_the_odd_one_is_not_named_before_all_have_come_to_one_end() -> None:
    ranks = running(3)
    ranks[1].call()
    for one in ranks[1:]:
        one.finishes()
    for _ in range(2):
        number = ranks[0].call()
    ranks[0].waits(number, 1.5)
    assert found_in(ranks).culprits == (1, 2)


def test_who_destroyed_a_group_that_another_still_uses_is_named() -> None:
    ranks = running(3)
    for rank in (0, 1):
        ranks[rank].group("1 [0, 1]", [0, 1])
        ranks[rank].call("barrier", group="1 [0, 1]")
    ranks[1].status_fields["facts"] = {endings.CLOSED: {"1 [0, 1]": "at train.py:9 main, in step 2"}}
    ranks[0].waits(ranks[0].call(group="1 [0, 1]"), 0.5)
    assert diagnosed(ranks) is None  # it may have come to the end of this call just before
    ranks[0].open_s = 1.5
    found = found_in(ranks)
    assert (found.kind, found.culprits) == ("finished", (1,)), found.text
    text = " ".join(found.text.split())
    assert "rank 1 destroyed group 1 [0, 1] at train.py:9 main, in step 2 after 1 collective, rank 0 wanted" in text


@pytest.mark.parametrize(
    ("number", "article"), [(7, "a"), (8, "an"), (11, "an"), (18, "an"), (80, "an"), (100, "a"), (111, "a"), (181, "a")]
)
def test_the_call_that_nobody_joins_is_counted_as_one_says_it(number: int, article: str) -> None:
    ranks = running(2, 0)
    for one in ranks:
        for _ in range(number - 1):
            one.call()
    ranks[1].finishes()
    ranks[0].waits(ranks[0].call(), 1.5)
    assert f"\n  rank 0 wanted {article} {number}" in found_in(ranks).text


@pytest.mark.parametrize("has_raised", [True, False])
def test_what_a_rank_told_before_its_end_is_said(has_raised: bool) -> None:
    ranks = waiting_for_rank_1(2, 1.4)
    fail(ranks[1]) if has_raised else ranks[1].finishes()
    told = "it had called destroy_process_group at train.py:12 main, in step 3"
    assert told not in found_in(ranks).text
    ranks[1].status_fields["facts"] = {BEFORE: {"groups": told}}
    assert f"\n    {told}\n  rank 0 {'waits in' if has_raised else 'wanted a'} " in found_in(ranks).text


def test_where_a_rank_that_is_gone_was_seen_has_an_age() -> None:
    ranks = waiting_for_rank_1(3, 2.5)
    kill(ranks[1])
    assert "rank 1 was last seen 1.3 s ago: at data.py:31 load_batch" in found_in(ranks).text
    ranks[1].status_fields["stack"] = ()  # as where its record is newer
    assert "rank 1 was last seen 1.3 s ago\n    issued last: all_reduce" in found_in(ranks).text


def test_a_stack_from_before_the_operation_is_not_shown() -> None:
    """A busy thread is hardly ever asked where it is."""
    ranks = waiting_for_rank_1(3, 1.5)
    fail(ranks[1])
    assert "stack of ranks 0,2: train.py:40" in found_in(ranks).text
    ranks[2].is_at("train.py:3 <module>")
    assert "stack of rank 0: train.py:40" in found_in(ranks).text
    assert "train.py:3 " not in found_in(ranks).text


def test_an_end_in_peace_waits_for_news_of_others() -> None:
    ranks = running(3)
    ranks[2].finishes()
    ranks[0].call()
    assert first_of(ranks, is_final=False) is None
    assert first_of(ranks) is not None


def test_who_did_its_part_and_finished_is_not_the_cause() -> None:
    """Rank 0 has lost rank 1, of which nothing is heard yet; rank 2 came to its end after all that it had to do."""
    ranks = running(3)
    ranks[2].finishes()
    assert first_of(ranks) is None
    ranks[0].group("pair", [0, 1])
    ranks[0].call(group="pair")
    assert first_of(ranks) is None
    ranks[0].call()
    assert first_of(ranks) is not None
    sights = {one.rank: one.sight() for one in ranks}
    assert left_first(0, sights, is_final=True, lost=1) is None


def test_of_two_that_are_gone_the_first_is_the_cause() -> None:
    """Rank 2 was killed; who had started them then ended rank 1 too, and rank 0 takes longer."""
    ranks = waiting_for_rank_1(4, 5)
    undo(ranks[2])
    for rank, age_s in ((1, 1.9), (2, 2.4)):
        kill(ranks[rank], "")
        ranks[rank].age_s = age_s
    assert found_in(ranks).culprits == (2,)
    assert first_of(ranks) == (2, "in step 4 rank 2 (pid 4712) was killed without a word")


def test_who_blames_a_third_is_not_blamed() -> None:
    """Rank 1 lost rank 2, which had lost rank 3; nobody sees that one."""
    ranks = waiting_for_rank_1(4, 3.1)[:3]
    ranks[1].raises("PeerFailed", "rank 2 is lost", "train.py:40", True, 2)
    blame_rank_3(ranks[2])
    assert found_in(ranks).culprits == (3,)
    assert first_of(ranks) == (3, "in step 3 rank 3 (pid 4713) was killed")


def test_two_that_fail_at_once_are_both_named() -> None:
    ranks = waiting_for_rank_1(4, 0.4)
    undo(ranks[2])
    for one in ranks[1:3]:
        fail(one)
    finding = found_in(ranks)
    assert finding.culprits == (1, 2)
    assert "Culprits: ranks 1,2" in finding.text


@pytest.mark.parametrize("is_caught", [False, True])
def test_who_ended_because_of_another_is_not_the_culprit(is_caught: bool) -> None:
    """Rank 1 lost rank 3, which nobody else sees; then it raised, or caught that and came to its end."""
    ranks = waiting_for_rank_1(3, 1.5)
    blame_rank_3(ranks[1])
    if is_caught:
        ranks[1].status_fields["state"] = FINISHED
    assert diagnosed(ranks) is None
    for one in (ranks[0], ranks[2]):
        one.open_s = 3.1
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("raised", (3,))
    assert "Culprit: rank 3" in finding.text.splitlines()[0]


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        ("was ended by its launcher: stopped (SIGSTOP) for 10 s", "find what stopped it"),
        ("was killed by the kernel: out of memory", "use less memory"),
        ("was killed by SIGKILL", "find who sent it: out of memory (dmesg"),
        ("was killed by SIGSEGV; its last words: Fatal Python error", "a crash in native code"),
        ("was killed by SIGABRT", "did the ranks make other calls?"),
        ("ended with exit code 7", "look for os._exit"),
        ("", "killed: look for out of memory"),
    ],
)
def test_the_advice_is_for_that_end(how: str, advice: str) -> None:
    text = found_in(rank_1(lambda one: kill(one, how))).text
    assert f"Likely fix: {advice}" in text
    said = " ".join(line.strip() for line in text.splitlines())
    assert f"rank 1 (pid 4711) {how or 'was killed without a word'}" in said


# ------------------------------------------------------------------ the guards of some ranks


class Ranks:
    """Ranks 0 and 1 are on one machine, rank 2 on another, which is seen through a store."""

    def __init__(self, folder: Path) -> None:
        self.store = DictStore()
        self.guards = [self._guard(folder / "ab"[rank // 2], rank, [[0, 1], [2]][rank // 2]) for rank in range(3)]
        for guard in self.guards:
            guard.group("world", range(3))
            guard.look_now()

    def _guard(self, folder: Path, rank: int, here: list[int]) -> Guard:
        folder.mkdir(exist_ok=True)
        recorder = FlightRecorder(flight_path(folder, rank), rank, 3)
        return Guard(recorder, Board(folder, recorder, here, self.store), GuardSettings(evidence=""))

    def kill_rank_2(self) -> None:
        status = Status(2, 3, 4712, "b", step=7).to_json().decode()
        self.store.set("guard/status/2", f"gone was killed by SIGKILL\n{status}")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for guard in made.guards:
        guard.close()


KILLED = "in step 8 rank 2 (pid 4712) was killed by SIGKILL"


def test_a_rank_that_caught_the_loss_of_another_and_ended_is_not_blamed(ranks: Ranks) -> None:
    """The order in which a slow machine once did it: the store goes with rank 0, before rank 1 has looked."""
    ranks.kill_rank_2()
    raised = ranks.guards[0].lost(PeerLost("rank 2 is lost, or one of those it speaks for", 2))
    ranks.guards[0].end()
    ranks.store.is_gone = True
    told = ranks.guards[1].lost(PeerLost("rank 0 reports: rank 2 is lost, or one of those it speaks for", 2))
    for rank, error in enumerate((raised, told)):
        assert isinstance(error, PeerFailed)
        assert error.rank == 2
        assert str(error).startswith(f"{KILLED}. On this rank, {rank}: ")
        assert str(error).count("On this rank") == 1


@pytest.mark.parametrize(
    "words", [LastWords("PeerFailed", KILLED, "", True, 2), LastWords("SystemExit", "1", "")], ids=["saw", "did not"]
)
def test_exit_after_a_loss_that_was_caught_is_that_loss(ranks: Ranks, words: LastWords) -> None:
    """sys.exit(1) in an `except` of the outermost function, say."""
    ranks.kill_rank_2()
    if words.of is not None:
        ranks.guards[0].lost(PeerLost("closed", 2))
    ranks.guards[0].end(SystemExit(1))
    status = ranks.guards[1].board.sights(is_urgent=True)[0].status
    assert (status.state, status.words) == ("raised", words)


def test_a_rank_that_ends_for_itself_is_named_after_a_while(ranks: Ranks) -> None:
    ranks.guards[0].lost(TransportClosed("this communicator was closed"))
    ranks.guards[0].end()
    error = ranks.guards[1].lost(PeerLost("connection closed"))
    assert isinstance(error, PeerFailed)
    assert error.rank == 0
    assert "rank 0 finished normally" in str(error)


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (SystemExit(0), "finished", LastWords("", "", "")),
        (SystemExit(None), "finished", LastWords("", "", "")),
        (SystemExit(3), "raised", LastWords("SystemExit", "3", "")),
        (SystemExit("no data"), "raised", LastWords("SystemExit", "no data", "")),
        (KeyboardInterrupt(), "raised", LastWords("KeyboardInterrupt", "KeyboardInterrupt", "")),
        (
            PeerFailed("rank 1 left. On this rank, 0: x", 1),
            "raised",
            LastWords("PeerFailed", "rank 1 left", "", True, 1),
        ),
        (ValueError(), "raised", LastWords("ValueError", "ValueError", "")),
        (raised_from(PeerFailed("rank 1 left", 1)), "raised", LastWords("KeyError", "1", "", True, 1)),
        (raised_from(ValueError(), PeerLost("closed", 2)), "raised", LastWords("KeyError", "1", "", True, 2)),
        (ConnectionError(CLOSED), "raised", LastWords("ConnectionError", CLOSED, "")),
        (RuntimeError(CLOSED), "raised", LastWords("RuntimeError", CLOSED, "", True)),
        (raised_from(ValueError()), "raised", LastWords("KeyError", "1", "")),
        (raised_from(PeerLost("closed", 2), is_hidden=True), "raised", LastWords("KeyError", "1", "")),
        (ValueError("\n\nx" * 2), "raised", LastWords("ValueError", "x", "")),
        (Mute(), "raised", LastWords("Mute", "<exception str() failed>", "")),
        (
            ValueError(BROUGHT.format(cwd=Path.cwd())),
            "raised",
            LastWords("ValueError", "sample 40 (in DataLoader worker process 0)", "data.py:18"),
        ),
        (
            ValueError(SPAWNED.format(cwd=Path.cwd())),
            "raised",
            LastWords("ValueError", "KeyError: 40 (in Process 3)", "data.py:19"),
        ),
        (CommError("broken\nin two"), "raised", LastWords("CommError", "broken", "", True)),
    ],
)
def test_last_words(ranks: Ranks, tmp_path: Path, error: BaseException, state: str, words: LastWords) -> None:
    """The other ranks have them, and a launcher afterwards."""
    ranks.guards[0].end(error)
    status = ranks.guards[1].board.sights(is_urgent=True)[0].status
    assert (status.state, status.words) == (state, words)
    assert {rank: one.words for rank, one in told_in(tmp_path / "a").items()} == {0: words, 1: None}


def test_a_launcher_says_how_a_process_ended(ranks: Ranks, tmp_path: Path) -> None:
    """On its own machine by a file, on others by the store; also of a process that never had a guard."""
    store, ends = DictStore(), {2: "was killed by SIGSEGV", 5: "ended with exit code 1"}
    tell_ends(tmp_path / "b", ends)
    send_ends(tmp_path / "b", ends, store)
    recorder = FlightRecorder(tmp_path / "b" / "flight-3", 3, 4)
    launched = Board(tmp_path / "b", recorder, [2, 3], has_launcher=True)
    ranks.store.values.update(store.values)
    with contextlib.closing(launched):
        for sights in (launched.sights(), ranks.guards[0].board.sights(is_urgent=True)):
            assert (sights[2].is_gone, sights[2].how) == (True, "was killed by SIGSEGV")
        assert 5 not in launched.sights()
    recorder.close()


def test_of_ends_of_one_moment_no_name_is_given_before_all_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard that looks while a launcher writes would name one of those who were killed together."""
    named: list[set[str]] = []
    write = Path.write_text

    def look(path: Path, text: str, **how: Any) -> int:
        named.append({one.name for one in tmp_path.iterdir()} & {"ended-1", "ended-2"})
        return write(path, text, **how)

    monkeypatch.setattr(Path, "write_text", look)
    tell_ends(tmp_path, {1: "was killed by SIGKILL", 2: "was killed by SIGKILL"})
    assert named == [set(), set()]
    assert {one.name for one in tmp_path.iterdir()} == {"ended-1", "ended-2"}


@pytest.mark.parametrize("kind", ["CollectiveMismatch", "ValueError"])
def test_what_a_rank_has_raised_itself_its_launcher_does_not_say_again(tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        for rank, text in enumerate(("all_reduce float32 [5] sum", "broadcast float32 [5] root=0")):
            recorder = stack.enter_context(contextlib.closing(FlightRecorder(flight_path(tmp_path, rank), rank, 2)))
            recorder.enter(0, pack_words("world", text, "train.py:5 <module>"))
            words = LastWords(kind, "MISMATCH in step 1", "train.py:5") if rank else None
            groups = {"world": Progress((0, 1), 1, ())}
            recorder.tell(Status(rank, 2, os.getpid(), "host", groups=groups, words=words).to_json())
        assert ("they differ in kind" in post_mortem(tmp_path)) is (kind == "ValueError")
