"""When the guard of a rank leaves out a look: where one operation of each rank shows that all have done the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.observe import glance
from lockstep.observe.account import Account
from lockstep.observe.board import Board
from lockstep.observe.flight import RECORDS, FlightRecorder, pack_words
from lockstep.observe.glance import Glance
from lockstep.observe.sights import flight_path

SUM = pack_words("world", "all_reduce float32 [8] sum", "train.py:9 step")
MAX = pack_words("world", "all_reduce float32 [8] max", "train.py:9 step")
PART = pack_words("ranks 0,1", "all_reduce float32 [8] sum", "train.py:12 step")
SEND = pack_words("world", "send float32 [8] to rank 1 tag 0", "train.py:15 step")


class Ranks:
    """Those of one machine, each with a guard that looks when a glance is not enough; no thread of theirs runs."""

    def __init__(self, folder: Path, world_size: int, away: int = 0) -> None:
        self._open = ExitStack()
        here = range(world_size)
        self.recorders = [FlightRecorder(flight_path(folder, rank), rank, world_size + away) for rank in here]
        self.accounts = [Account(recorder) for recorder in self.recorders]
        self.boards = [Board(folder, recorder, here) for recorder in self.recorders]
        self.glances = [Glance(*each) for each in zip(self.recorders, self.accounts, self.boards, strict=True)]
        self.seqs = [dict.fromkeys(("world", "ranks 0,1", "send"), 0) for _ in here]
        for part in (*self.boards, *self.accounts, *self.recorders):
            self._open.callback(part.close)
        for rank in here:
            self.tells(rank)

    def tells(self, rank: int) -> None:
        """The others how it is, as each look does."""
        self.boards[rank].tell(self.accounts[rank].brief(facts=self.accounts[rank].facts.said()))

    def begins(self, rank: int, words: Any) -> None:
        kind = "send" if words is SEND else words.group
        self.recorders[rank].enter(self.seqs[rank][kind], words, words is SEND)
        self.seqs[rank][kind] += 1

    def steps(self, *each: Sequence[Any]) -> None:
        """Each rank, or all of them alike, does this in the step that it ends then."""
        for rank, recorder in enumerate(self.recorders):
            for words in each[rank % len(each)]:
                self.begins(rank, words)
            recorder.set_step(recorder.step + 1)

    def glance(self, *, is_due: bool = False) -> list[bool]:
        """Which of them see at a glance that there is no need to look."""
        return [one.is_enough(is_due=is_due) for one in self.glances]

    def found(self) -> list[bool]:
        return [one.has_found for one in self.glances]

    def settle(self) -> None:
        """All have looked, after a step like those that follow."""
        self.steps([SUM])
        self.glance(is_due=True)

    def close(self) -> None:
        self._open.close()


@pytest.fixture(params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path, request.param)
    yield made
    made.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path, 2)
    yield made
    made.close()


def all_of(ranks: Ranks, *, are: bool) -> list[bool]:
    return [are] * len(ranks.recorders)


def test_it_is_enough_while_all_do_the_same(ranks: Ranks) -> None:
    assert ranks.glance() == all_of(ranks, are=False), "nobody has looked yet"
    ranks.settle()
    for many in (1, 7, 30):
        ranks.steps([SUM] * many)
        assert ranks.glance() == all_of(ranks, are=True)
    ranks.steps([])
    assert ranks.glance() == all_of(ranks, are=True), "a step without an operation"
    ranks.steps([SUM])
    assert ranks.glance(is_due=True) == all_of(ranks, are=False)


def test_each_says_that_it_lives(ranks: Ranks) -> None:
    ranks.settle()
    record = ranks.boards[0].records_here()
    assert record is not None
    before, told_ns = record[0].header().alive_ns, record[0].told_ns
    ranks.steps([SUM])
    ranks.glance()
    assert record[0].header().alive_ns > before
    assert record[0].told_ns == told_ns, "it has told nothing more"


def test_whoever_has_not_moved_is_looked_at(ranks: Ranks) -> None:
    ranks.settle()
    ranks.steps([SUM])
    ranks.glance()
    assert ranks.glance() == all_of(ranks, are=False)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(("mine", "others"), [([MAX, SUM], [SUM, SUM]), ([SUM, SUM], [SUM]), ([SUM], [MAX])])
def test_what_differs_is_found_at_once(two: Ranks, at: int, mine: list[Any], others: list[Any]) -> None:
    """By both: the one that looks for all looks, and the other tells how it is."""
    two.settle()
    two.steps([SUM])
    assert two.glance() == [True, True]
    two.steps(*((mine, others) if at == 0 else (others, mine)))
    two.steps([SUM])
    assert two.glance() == [False, False]
    assert two.found() == [True, True]
    two.steps([SUM])
    assert two.glance() == [False, False]
    assert two.found() == [False, False], "it has been said"


def test_the_first_of_three_sees_what_two_others_cannot(tmp_path: Path) -> None:
    """Of the others each sees the first alone."""
    three = Ranks(tmp_path, 3)
    for recorder in three.recorders:
        recorder.set_machine(0)
    three.settle()
    three.steps([SUM], [SUM], [MAX])
    three.steps([SUM])
    assert three.glance() == [False, True, False]
    assert three.found() == [True, False, True]
    three.close()


def test_a_rank_that_is_ahead_is_none_that_differs(two: Ranks) -> None:
    two.settle()
    for _ in range(20):
        two.begins(0, SUM)
    two.steps([SUM])
    assert two.glance() == [True, True]


@pytest.mark.parametrize("other", [PART, SEND], ids=["another group", "a message"])
def test_what_one_operation_does_not_show_is_looked_at(two: Ranks, other: Any) -> None:
    """Wherever it stands among the others: their numbers have moved apart since the last look."""
    for before, after in ((0, 0), (0, 3), (3, 0), (3, 3)):
        two.settle()
        two.steps([*[SUM] * before, other, *[SUM] * after])
        assert two.glance() == [False, False], (before, after)
        assert two.found() == [False, False]
        two.settle()
        two.steps([SUM])
        assert two.glance() == [True, True], "from there on it is as before"


def test_two_groups_in_turn_are_looked_at_each_time(two: Ranks) -> None:
    two.settle()
    for _ in range(5):
        two.steps([SUM, PART])
        assert two.glance() == [False, False]


def test_what_it_does_not_see_is_looked_at(two: Ranks) -> None:
    two.settle()
    account, recorder = two.accounts[0], two.recorders[0]

    def rests() -> bool:
        two.steps([SUM])
        return two.glance()[0]

    assert rests()
    account.facts.tell("data world/2/0", 1, "batch")
    assert not rests()
    account.facts.said()  # and nobody has told the others
    assert not rests()
    two.tells(0)
    assert rests()
    with account.activity("checkpoint"):
        assert not rests()
    assert rests()
    recorder.clock.gpu = SimpleNamespace(leave=lambda: None)  # type: ignore[assignment]
    assert not rests()
    recorder.clock.gpu = None
    assert rests()
    is_due = [True]
    account.motion.queues.append(lambda: is_due[0])
    assert not rests()
    is_due[0] = False
    assert rests()
    account.end(None)
    assert not rests()


def test_news_of_another_rank_are_looked_at_once(two: Ranks) -> None:
    """What it has told of its training, not that it has told it again, nor what can wait."""
    facts = two.accounts[1].facts
    two.settle()
    for step, news in enumerate(("", "wrapped", "", "wrapped", "", "wrapped again", "drawn")):
        if news:
            facts.tell("model", step, news, can_wait=news == "drawn")
        is_told = step in (1, 5)
        two.steps([SUM])
        assert two.glance()[1] is not is_told
        two.steps([SUM])
        assert two.glances[1].is_enough(has_time=True) is not bool(news)
        two.tells(1)
        two.steps([SUM])
        assert two.glance()[0] is not is_told
        for is_seen in (False, True):  # then there is time
            two.steps([SUM])
            assert two.glances[0].is_enough(has_time=True) is (is_seen or is_told or not news)


def test_what_was_found_on_this_machine_is_looked_at(two: Ranks) -> None:
    two.settle()
    two.boards[1].announce("{}")
    for _ in range(2):
        two.steps([SUM])
        assert two.glance() == [False, False]


@pytest.mark.parametrize("at_once", [2, 7, 300, 900])
def test_the_record_is_read_before_anything_is_overwritten(two: Ranks, at_once: int) -> None:
    """At a rate that stays, it is known early enough."""
    two.settle()
    read = 1
    for _ in range(3):
        while not two.glances[0].is_full:
            two.steps([SUM] * at_once)
            assert two.recorders[0].started - read < RECORDS
            assert two.glance() == [True, True]
        begun = two.recorders[0].started - read
        assert glance._MOST - 2 * at_once < begun <= glance._MOST
        for one in two.glances:
            one.kept_up()
        assert not any(one.is_full for one in two.glances if at_once < 900)
        read = two.recorders[0].started


def test_nor_are_too_many_steps_left_unread(two: Ranks) -> None:
    two.settle()
    while not two.glances[0].is_full:
        two.steps([])
        assert two.glance() == [True, True]
    assert glance._MOST_STEPS < two.recorders[0].step <= glance._MOST_STEPS + 3


def test_what_differs_is_seen_also_after_the_record_was_read(two: Ranks) -> None:
    two.settle()
    two.steps([SUM])
    assert two.glance() == [True, True]
    for one in two.glances:
        one.kept_up()
    two.steps([SUM])
    assert two.glance() == [True, True]
    two.steps([MAX, SUM], [SUM, SUM])
    assert two.glance() == [False, False]
    assert two.found() == [True, True]


def test_what_was_left_to_be_entered_is_seen(two: Ranks) -> None:
    """Of a step whose operations C++ has started."""
    two.settle()
    for recorder, words in zip(two.recorders, (SUM, MAX), strict=True):
        recorder.left.append(lambda recorder=recorder, words=words: recorder.enter_all(iter([1]), words, 1, 2))
    two.steps([])
    assert two.glance() == [True, False], "the second sees it as soon as both have entered theirs"
    two.steps([])
    assert two.glance() == [False, False]
    assert two.found() == [True, False]


def test_of_other_machines_it_sees_nothing(tmp_path: Path) -> None:
    two = Ranks(tmp_path, 2, away=1)
    two.settle()
    two.steps([SUM])
    assert two.glance() == [False, False]
    two.close()


def test_nor_of_a_rank_that_has_not_begun(tmp_path: Path) -> None:
    recorder = FlightRecorder(flight_path(tmp_path, 0), 0, 2)
    account, board = Account(recorder), Board(tmp_path, recorder, range(2))
    board.tell(account.brief(facts=account.facts.said()))
    one = Glance(recorder, account, board)
    for _ in range(3):
        recorder.set_step(recorder.step + 1)
        assert not one.is_enough()
    for part in (board, account, recorder):
        part.close()
