"""What a rank finds when an operation of torch's has failed, and not by its own doing."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rank_sights import FIRST, REDUCE, SECOND, PaperRank

from lockstep.launch.workers import Workers
from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecord, FlightRecorder, Mark, Record, pack_words
from lockstep.observe.guard import Guard
from lockstep.observe.settings import GuardSettings
from lockstep.observe.status import Sight

LOST = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4711")


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

    def __init__(self, folder: Path) -> None:
        self.ranks = [RecordedRank(rank, folder) for rank in (1, 2)]
        self.looks = 0
        self.happens: Any = lambda: None

    def sights(self, *, is_urgent: bool = False) -> Mapping[int, Sight]:
        self.looks += 1
        if self.looks == 3:
            self.happens()
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
    guard.leave(guard.enter("side", 0, REDUCE, SECOND))
    for one in story.ranks:
        one.call(group="side", site=SECOND)
    story.ranks[0].group("world", range(3))
    story.ranks[0].finishes()
    story.ranks[1].call()
    assert "FINISHED too early, in step 1.  Culprit: rank 1" in str(guard.cause_of(LOST))


def test_who_was_aborted_is_not_blamed_before_the_others_have_spoken(guard: Guard, story: Story) -> None:
    victim, other = story.ranks
    guard.enter("world", 0, REDUCE, FIRST)
    victim.waits(victim.call())
    victim.is_gone, victim.how = True, "was killed by SIGABRT"
    other.group("world", range(3))
    story.happens = lambda: other.call("barrier", SECOND)
    assert "MISMATCH in step 1, group world.  Culprit: rank 2" in str(guard.cause_of(LOST))


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
