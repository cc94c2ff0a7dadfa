"""What a rank finds when an operation of torch's has failed, and not by its own doing."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rank_sights import FIRST, REDUCE, SECOND, PaperRank

from lockstep.errors import CollectiveTimeout
from lockstep.launch.workers import Workers
from lockstep.observe import lookout
from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder, Mark, Record, pack_words
from lockstep.observe.guard import Guard
from lockstep.observe.hang import FAILING
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import FlightRecord
from lockstep.observe.status import Sight

LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
LATE = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete")


class DistStoreError(RuntimeError):
    """By torch's name."""


class RecordedRank(PaperRank):
    """Its digests are those of a rank."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__(rank, 3)
        self._recorder = FlightRecorder(folder / f"flight-{rank}", rank, 3)
        self._record = FlightRecord(self._recorder.path)

    def call(self, text: str = REDUCE, site: str = FIRST, group: str = "world", label: str = "") -> int:
        self.group(group, range(3))
        fold = self.folds[group]
        number = self._recorder.enter(fold.count, pack_words(group, text, site, label))
        (record,) = self._record.records(number)
        self.records.append(record)
        fold.add(Mark(record.seq, record.step, record.digest))
        return number

    def close(self) -> None:
        self._record.close()
        self._recorder.close()


class Story:
    """A board on which something happens when it is looked at for the third time."""

    here = frozenset({0, 1, 2})

    def __init__(self, folder: Path) -> None:
        self.ranks = [RecordedRank(rank, folder) for rank in (1, 2)]
        self.looks = 0
        self.happens: Any = lambda: None
        self.told: Mapping[int, Sight] | None = None  # what the ranks have told before that

    def sights(self, *, is_urgent: bool = False) -> Mapping[int, Sight]:
        self.looks += 1
        if self.looks == 3:
            self.happens()
            self.told = None
        if self.told is not None and not is_urgent:
            return self.told
        return {one.rank: one.sight() for one in self.ranks}

    def records_of(self, rank: int) -> list[Record]:
        return next((one.kept_records() for one in self.ranks if one.rank == rank), [])

    def announce(self, finding: str) -> str:
        return finding

    def announced(self) -> str:
        return ""

    def tell(self, status: object) -> None:
        pass

    def close(self) -> None:
        for one in self.ranks:
            one.close()


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


@pytest.fixture
def guard(tmp_path: Path, story: Story) -> Iterator[Guard]:
    made = Guard(FlightRecorder(tmp_path / "flight-0", 0, 3), cast(Board, story), GuardSettings(evidence=""))
    for name in ("world", "side"):
        made.group(name, range(3))
    yield made
    made.close()


def test_what_another_thread_began_last_hides_nothing(guard: Guard, story: Story) -> None:
    guard.enter("world", 0, REDUCE, FIRST)
    guard.recorder.leave(guard.enter("side", 0, REDUCE, SECOND))
    for one in story.ranks:
        one.call(group="side", site=SECOND)
    story.ranks[0].group("world", range(3))
    story.ranks[0].finishes()
    story.ranks[1].call()
    assert "FINISHED too early, in step 1.  Culprit: rank 1" in str(guard.cause_of(LOST))


def test_what_had_gone_wrong_before_an_error_of_its_own_is_said_first(
    guard: Guard, story: Story, capfd: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("broken sample")
    assert guard.cause_of(error) is error
    assert not capfd.readouterr().err
    for one, text in zip(story.ranks, ("barrier", REDUCE), strict=True):
        one.call(text)
    assert guard.cause_of(error) is error
    assert "MISMATCH in step 1, group world.  Culprits: ranks 1,2" in capfd.readouterr().err


def test_a_guard_at_rest_does_not_look_back(guard: Guard, story: Story, capfd: pytest.CaptureFixture[str]) -> None:
    """As that of a communicator which an error has left, before that ends the program."""
    for one, text in zip(story.ranks, ("barrier", REDUCE), strict=True):
        one.call(text)
    guard.rest()
    error = ValueError("broken sample")
    assert guard.cause_of(error) is error
    assert not capfd.readouterr().err


def test_who_was_aborted_is_not_blamed_before_the_others_have_spoken(guard: Guard, story: Story) -> None:
    victim, other = story.ranks
    guard.enter("world", 0, REDUCE, FIRST)
    victim.waits(victim.call())
    victim.is_gone, victim.how = True, "was killed by SIGABRT"
    other.group("world", range(3))
    story.happens = lambda: other.call("barrier", SECOND)
    assert "MISMATCH in step 1, group world.  Culprit: rank 2" in str(guard.cause_of(LOST))


def test_who_has_left_out_an_average_may_say_why(guard: Guard, story: Story) -> None:
    """Its record shows that at once, but why is told by its guard, when that looks."""
    guard.recorder.leave(guard.enter("world", 0, REDUCE, FIRST))
    guard.recorder.set_step(1)
    guard.enter("world", 1, REDUCE, FIRST)
    guard.facts.tell("sync world/3", 0, [1, 0, FIRST])
    told: dict[str, object] = {"0": [1, 0, FIRST]}
    for one in story.ranks:
        one.call()
        one.step += 1
        one.status_fields["facts"] = {"sync world/3": {**told}}
    story.told = {one.rank: one.sight() for one in story.ranks}
    culprit, other = story.ranks
    culprit.step += 1
    for one in (culprit, other):
        one._recorder.set_step(one.step)
        one.call()
    story.happens = lambda: culprit.status_fields.update(facts={"sync world/3": {**told, "1": [0, 1, SECOND]}})
    said = str(guard.cause_of(LOST))
    assert "NO_SYNC on some ranks only, in step 2, group world.  Culprit: rank 1" in said
    assert f"rank 1 ran 1 backward in no_sync(), at {SECOND}" in said


@pytest.mark.parametrize("comes", [False, True])
def test_two_that_differ_are_named_where_the_third_never_comes(guard: Guard, story: Story, comes: bool) -> None:
    """It had met one of them, and was about to meet the one that was aborted."""
    victim, other = story.ranks
    guard.enter("world", 0, REDUCE, FIRST)
    victim.waits(victim.call("all_reduce float32 [2] sum"))
    victim.is_gone, victim.how = True, "was killed by SIGABRT"
    other.group("world", range(3))

    def goes_on() -> None:
        victim.age_s = 1.0
        if comes:
            other.call()

    story.happens = goes_on
    said = str(guard.cause_of(LOST))
    assert f"MISMATCH in step 1, group world.  {'Culprit: rank 1' if comes else 'Culprits: ranks 0,1'}" in said
    assert "rank 1: all_reduce float32 [2] sum at train.py:40 train_step (step 1)" in said


def test_news_that_come_late_make_a_finding_too(
    guard: Guard, story: Story, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a launcher that was held up while it had to tell of an end."""
    monkeypatch.setattr(lookout, "_NEWS_S", 0.0)
    guard.enter("world", 0, REDUCE, FIRST)
    for one in story.ranks:
        one.group("world", range(3))

    def told() -> None:
        story.ranks[0].is_gone, story.ranks[0].how = True, "was killed by SIGKILL"

    story.happens = told
    assert "GONE in step 1.  Culprit: rank 1" in str(guard.cause_of(LOST))
    assert guard.finding is not None
    assert (guard.finding.kind, guard.finding.culprits) == ("gone", (1,))
    assert "GONE in step 1.  Culprit: rank 1" in capfd.readouterr().err


def test_who_was_aborted_is_named_where_nobody_says_more(guard: Guard, story: Story) -> None:
    guard.enter("world", 0, REDUCE, FIRST)
    for one in story.ranks:
        one.group("world", range(3))
    story.ranks[0].is_gone, story.ranks[0].how = True, "was killed by SIGABRT"
    assert "GONE in step 1.  Culprit: rank 1" in str(guard.cause_of(LOST))


@pytest.mark.parametrize(("code", "is_known"), [(-signal.SIGABRT, False), (-signal.SIGKILL, True)])
def test_an_abort_may_be_another_ranks_fault(code: int, is_known: bool) -> None:
    workers: Any = SimpleNamespace(processes={0: SimpleNamespace(exit_code=code)}, stuck={}, error_files={0: "none"})
    assert Workers.cause_is_known(workers) is is_known


def test_who_was_not_there_when_torch_gave_up_is_named(guard: Guard, story: Story) -> None:
    missing, other = story.ranks
    guard.recorder.leave(guard.enter("world", 0, REDUCE, FIRST))
    missing.group("world", range(3))
    missing.is_at("data.py:31 load", unmoved_s=3.8)
    other.call()
    cause = guard.cause_of(LATE)
    assert isinstance(cause, CollectiveTimeout), cause
    assert (cause.missing, cause.__cause__) == ((1,), LATE)
    assert "TIMEOUT in step 1.  Culprit: rank 1 " in str(cause)
    assert "\n  rank 1 is not there: at data.py:31 load, unmoved for 3.8 s\n" in str(cause)
    assert f"\n  ranks 0,2 wait in {REDUCE} #0 of group world, {FIRST}\n" in str(cause)


def test_who_waits_for_another_is_not_blamed_for_a_timeout(guard: Guard, story: Story) -> None:
    guard.recorder.leave(guard.enter("world", 0, REDUCE, FIRST))
    middle, last = story.ranks
    middle.group("world", range(3))
    middle.waits(middle.message("recv float32 [4] from rank 2 tag 0", SECOND))
    last.group("world", range(3))
    last.is_at("data.py:31 load", unmoved_s=3.8)
    cause = guard.cause_of(LATE)
    assert isinstance(cause, CollectiveTimeout), cause
    assert cause.missing == (2,)
    assert f"rank 1 waits in recv float32 [4] from rank 2 tag 0, {SECOND}, for 12.4 s" in str(cause)


@pytest.mark.parametrize(("error", "came"), [(LATE, (1, 2)), (LOST, (2,))], ids=["all have come", "no timeout"])
def test_nobody_is_blamed_where_torch_says_something_else(
    guard: Guard, story: Story, error: Exception, came: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "WORDS_S", 0.1)
    guard.recorder.leave(guard.enter("world", 0, REDUCE, FIRST))
    for one in story.ranks:
        one.group("world", range(3))
        if one.rank in came:
            one.call()
    assert guard.cause_of(error) is error
    assert guard.finding is None


@pytest.mark.parametrize("way", ["elsewhere", "unheard"])
def test_who_is_not_at_the_line_of_a_store_that_was_given_up_is_named(guard: Guard, story: Story, way: str) -> None:
    error: BaseException = DistStoreError("wait timeout after 4000ms, keys: /k")
    with contextlib.suppress(DistStoreError):
        exec(compile("raise error", str(Path.cwd() / "train.py"), "exec"), {"error": error})
    missing, there = story.ranks
    missing.is_at("train.py:9 load")
    there.is_at("observe/lookout.py:219 of_failure", activity=FAILING)  # it has given up a moment before
    if way == "unheard":
        story.ranks.remove(missing)
        missing.close()
    cause = guard.cause_of(error)
    assert isinstance(cause, CollectiveTimeout), cause
    assert cause.missing == (1,)
    assert "\n  rank 0 waits in the store (wait timeout after 4000ms, keys: /k), train.py:1\n" in str(cause)
    where = "is not there: at train.py:9 load" if way == "elsewhere" else "has not been heard of"
    assert f"\n  rank 1 {where}" in str(cause)
