"""The guards of one machine see each other through their records, those of several through a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.comm.waiting import wait_until
from lockstep.observe.board import Board, send_ends, send_silent
from lockstep.observe.cores import Cores
from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.onlooker import noticed
from lockstep.observe.sights import FlightRecord, flight_path, sight_of
from lockstep.observe.status import FINISHED, RUNNING, LastWords, Mark, Progress, Sight, Status, Waiting

Make = Callable[..., tuple[FlightRecorder, Board]]


class DictStore:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_gone = False

    def _check_held(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str, /) -> None:
        self._check_held()
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        self._check_held()
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self._check_held()
        return self.values.setdefault(key, desired.encode())


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[tuple[FlightRecorder, Board]] = []

    def one(
        rank: int,
        here: list[int],
        world_size: int = 2,
        folder: str = "",
        store: DictStore | None = None,
        *,
        has_launcher: bool = False,
    ) -> tuple[FlightRecorder, Board]:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        recorder = FlightRecorder(flight_path(place, rank), rank, world_size)
        made.append((recorder, Board(place, recorder, here, store, has_launcher=has_launcher)))
        return made[-1]

    yield one
    for recorder, board in made:
        board.close()
        recorder.close()


def status(rank: int, **fields: object) -> Status:
    return Status(rank, 2, os.getpid(), "host", **fields)  # type: ignore[arg-type]


def test_a_status_comes_through_whole(make: Make) -> None:
    recorder, mine = make(0, [0, 1])
    other, theirs = make(1, [0, 1])
    number = other.enter(4, pack_words("world", "all_reduce float32 [3] sum", "train.py:7 main", "grad"))
    record = theirs.records_of(1)[-1]
    assert (record.number, record.seq, record.text, record.site, record.label) == (
        number,
        4,
        "all_reduce float32 [3] sum",
        "train.py:7 main",
        "grad",
    )
    said = status(
        1,
        step=3,
        state=FINISHED,
        groups={"world": Progress((0, 1), 5, (Mark(4, 3, record.digest),))},
        waiting=(Waiting(record, 1.5),),
        last=record,
        stack=("train.py:7 main",),
        words=LastWords("ValueError", "bad", "train.py:7"),
    )
    assert mine.sights() == {}  # nobody has said anything
    theirs.tell(said)
    sight = mine.sights()[1]
    assert sight.status == said
    assert not sight.is_gone  # the process that wrote it is this one
    assert theirs.sights()[1].status == said  # it need not read its own
    other.enter(5, pack_words("world", "barrier", "train.py:8 main"))
    for board in (mine, theirs):
        assert board.sights(is_urgent=True)[1].status.groups["world"].count == 6
    assert mine.records_of(1) == theirs.records_of(1)
    assert recorder.rank == 0


def test_a_silent_rank_works_while_its_process_uses_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or would, if it got one."""
    cores, seen = Cores(), []
    for age_s, state, used_s in (
        (0.9, "R", 0.0), (1.1, "S", 5.0), (1.9, "S", 5.5), (2.2, "S", 5.6), (3.0, "S", 5.7),
        (3.3, "S", 5.6), (4.4, "R", 5.6), (5.5, "S", 5.61), (0.2, "S", 5.7), (1.1, "S", 6.0),
    ):  # fmt: skip
        monkeypatch.setattr("lockstep.observe.cores.state_and_cpu_s", lambda path, said=(state, used_s): said)
        seen.append(cores.seen(Sight(status(1), age_s, is_gone=False), 100 + age_s).is_working)
    assert seen == [False, False, False, True, True, False, True, False, False, False]


def test_a_rank_that_has_not_told_a_word_is_of_this_machine(make: Make) -> None:
    """C code may hold Python's lock from before the guard's first look; of another machine it would be cut off."""
    _, mine = make(1, [1, 2], 3)
    make(2, [1, 2], 3)
    assert mine.sights(is_urgent=True)[2].status.machine == 1


def test_a_store_that_does_not_answer_makes_nobody_silent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the rank of the other machine get through to it meanwhile."""
    now_s, store = 100.0, DictStore()
    _, mine = make(0, [0], store=store)
    store.set("guard/status/1", status(1, step=1).to_json().decode())
    monkeypatch.setattr("lockstep.observe.board.time.monotonic", lambda: now_s)
    assert mine.sights()[1].age_s == 0.0
    answers = store.check

    def check(keys: list[str]) -> bool:
        nonlocal now_s
        now_s += 5
        return answers(keys)

    monkeypatch.setattr(store, "check", check)
    now_s += 0.25
    assert mine.sights()[1].age_s == 0.25
    monkeypatch.setattr(store, "check", answers)
    now_s += 0.5
    assert mine.sights()[1].age_s == 0.75
    store.set("guard/status/1", status(1, step=2).to_json().decode())
    assert mine.sights()[1].age_s == 0.0


def test_the_first_finding_is_everybodys(make: Make) -> None:
    _, mine = make(0, [0, 1])
    _, theirs = make(1, [0, 1])
    assert mine.announced() == theirs.announced() == ""
    assert theirs.announce("first") == "first"
    assert mine.announce("second") == "first"
    assert mine.announced() == theirs.announced() == "first"


def test_files_need_no_names_once_they_are_open(make: Make, tmp_path: Path) -> None:
    _, mine = make(0, [0, 1])
    other, theirs = make(1, [0, 1])
    for board in (mine, theirs):
        board.open_all()
    for path in tmp_path.glob("flight-*"):
        path.unlink()
    theirs.tell(status(1))
    other.enter(0, pack_words("world", "barrier", "a.py:1 f"))
    assert mine.sights()[1].status == status(1)
    assert [record.text for record in mine.records_of(1)] == ["barrier"]
    assert theirs.announce("found") == mine.announced() == "found"


def test_a_rank_that_has_not_begun_is_not_seen(make: Make, tmp_path: Path) -> None:
    _, mine = make(0, [0, 1])
    assert mine.records_of(1) == []
    flight_path(tmp_path, 1).write_bytes(b"something else")
    mine.tell(status(0))
    assert list(mine.sights()) == [0]


_CHILD = """
import os, sys
from lockstep.observe.board import Board, send_ends
from lockstep.observe.sights import flight_path
from lockstep.observe.flight import FlightRecorder, pack_words
from lockstep.observe.status import Status
recorder = FlightRecorder(flight_path(sys.argv[1], 1), 1, 2)
board = Board(sys.argv[1], recorder, [0, 1])
recorder.set_step(7)
recorder.enter(0, pack_words("world", "barrier", "train.py:3 main"))
board.tell(Status(1, 2, os.getpid(), "host", step=6))
print("told", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("has_launcher", [False, True], ids=["no launcher", "a launcher that is stopped"])
def test_a_killed_rank_is_seen_to_be_gone_and_its_record_is_read(
    make: Make, tmp_path: Path, has_launcher: bool
) -> None:
    _, mine = make(0, [0, 1], has_launcher=has_launcher)
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.read() == "told\n"
    assert wait_until(lambda: 1 in mine.sights() and mine.sights()[1].is_gone, 10.0)
    child.wait()
    child.stdout.close()
    assert mine.sights()[1].status.step == 7
    (record,) = mine.records_of(1)
    assert (record.text, record.left_ns) == ("barrier", 0)
    seen = mine.sights()[1].status  # it was killed before it could say that it is in the barrier
    assert [waiting.record for waiting in seen.waiting] == [record]
    assert seen.last == record
    assert seen.groups["world"].marks == (Mark(0, 7, record.digest),)


@pytest.mark.parametrize("is_newer", [False, True])
def test_of_a_rank_that_is_gone_a_stack_from_before_its_last_call_is_not_kept(make: Make, is_newer: bool) -> None:
    recorder, board = make(0, [0])
    words = pack_words("world", "barrier", "train.py:9 f")
    if not is_newer:
        recorder.leave(recorder.enter(0, words))
    board.tell(status(0, stack=("train.py:2 f",)))
    if is_newer:
        recorder.leave(recorder.enter(0, words))
    record = FlightRecord(recorder.path)
    for how, is_kept in ((None, True), ("was killed by SIGKILL", not is_newer)):
        sight = sight_of(record, how=how, is_urgent=True)
        assert sight is not None
        assert sight.status.stack == ("train.py:2 f",) * is_kept
    record.close()


def test_two_machines_see_each_other_through_the_store(make: Make) -> None:
    store = DictStore()
    _, mine = make(0, [0], folder="a", store=store)
    other, theirs = make(1, [1], folder="b", store=store)
    theirs.tell(status(1, step=5))
    assert mine.sights()[1].status.step == 5
    assert 0 not in theirs.sights()
    other.enter(0, pack_words("world", "barrier", "train.py:3 main"))
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(0.02):
            theirs._told_s = 0.0
            theirs.tell(status(1, step=6))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert [record.text for record in mine.records_of(1)] == ["barrier"]
    finally:
        stop.set()
        thread.join()
    assert mine.announce("x") == "x"
    assert theirs.announced() == "x"
    assert theirs.announce("y") == "x"


def test_an_end_is_told_to_other_machines_at_once(make: Make) -> None:
    """However short a time ago something was told: there may be no next time."""
    store = DictStore()
    _, mine = make(0, [0], folder="a", store=store)
    _, theirs = make(1, [1], folder="b", store=store)
    theirs.tell(status(1))
    theirs.tell(replace(status(1), state=FINISHED))
    assert mine.sights()[1].status.state == FINISHED


@pytest.mark.parametrize("way", ["by itself", "its launcher says", "another rank of its machine sees"])
def test_what_a_rank_of_another_machine_did_last_is_kept_for_its_end(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Nobody is there any more who could be asked for it."""
    store = DictStore()
    _, mine = make(0, [0], folder="a", store=store)
    other, theirs = make(1, [1], folder="b", store=store)
    for seq in range(300):
        other.enter(seq, pack_words("world", "barrier", "train.py:3 main"))
    theirs.tell(status(1))
    assert mine.sights()[1].status.state == RUNNING
    if way == "by itself":
        theirs.tell(replace(status(1), state=FINISHED))
    elif way == "its launcher says":
        send_ends(tmp_path / "b", {1: "was killed by SIGKILL"}, store)
    else:
        _, third = make(2, [1, 2], world_size=3, folder="b", store=store)
        monkeypatch.setattr(third, "_how_it_ended", lambda rank, record: "" if rank == 1 else None)
        assert third.sights()[1].is_gone
    monkeypatch.setattr("lockstep.observe.board.time.sleep", never)
    assert mine.sights()[1].is_gone == (way != "by itself")
    assert [record.seq for record in mine.records_of(1)] == [*range(300)]


def test_a_silent_rank_of_another_machine_is_not_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not say by itself it would not answer: who waits for that looks at nobody, and is silent as well."""
    store, now_s = DictStore(), time.monotonic()
    _, mine = make(0, [0], store=store)
    store.set("guard/status/1", status(1).to_json().decode())
    assert 1 in mine.sights()
    monkeypatch.setattr("lockstep.observe.board.time.monotonic", lambda: now_s + 2)
    monkeypatch.setattr("lockstep.observe.board.time.sleep", never)
    assert mine.records_of(1) == []


def test_a_rank_that_was_stopped_elsewhere_is_in_the_step_it_had_come_to(make: Make, tmp_path: Path) -> None:
    """Its launcher reads that: what its guard has told may be some steps old."""
    store = DictStore()
    _, mine = make(0, [0], folder="a", store=store)
    other, theirs = make(1, [1], folder="b", store=store)
    theirs.tell(replace(status(1), step=3))
    other.set_step(30)
    send_ends(tmp_path / "b", {1: None}, store)
    sight = mine.sights()[1]
    assert (sight.is_stopped, sight.is_gone, sight.status.step) == (True, False, 30)


def test_ranks_of_two_machines_ask_each_other_at_once(make: Make) -> None:
    """Each of them answers while it waits."""
    store = DictStore()
    both = [make(rank, [rank], folder=str(rank), store=store) for rank in range(2)]
    for rank, (recorder, board) in enumerate(both):
        recorder.enter(0, pack_words("world", "barrier", "train.py:3 main"))
        board.tell(status(rank))
    for _, board in both:
        board.sights()
    found: dict[int, int] = {}

    def ask(rank: int) -> None:
        found[rank] = len(both[rank][1].records_of(1 - rank))
        while len(found) < len(both):  # who has its answer goes on looking, and answers
            both[rank][1].tell(status(rank))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 1, 1: 1}


def test_machines_that_find_something_at_once_have_one_finding(make: Make) -> None:
    store = DictStore()
    boards = [make(rank, [rank], folder=str(rank), store=store)[1] for rank in range(2)]
    assert [board.announce(f"of rank {rank}") for rank, board in enumerate(boards)] == ["of rank 0"] * 2
    assert [board.announced() for board in boards] == ["of rank 0"] * 2


def test_a_launcher_knows_what_was_found_on_another_machine_when_the_store_has_gone(make: Make, tmp_path: Path) -> None:
    store = DictStore()
    _, mine = make(0, [0], folder="a", store=store)
    _, theirs = make(1, [1], folder="b", store=store)
    assert noticed(tmp_path / "b") == ""
    mine.announce("x")
    assert theirs.announced() == "x"
    store.is_gone = True
    assert noticed(tmp_path / "b") == noticed(tmp_path / "a") == "x"


def test_a_store_that_cannot_be_reached_for_a_while(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's calls return when the cable is mended: meanwhile nobody waits for them, and the others fall silent."""
    monkeypatch.setattr("lockstep.observe.board._STORE_S", 0.05)
    store, is_mended = DictStore(), threading.Event()
    _, mine = make(0, [0], store=store)
    store.set("guard/status/1", status(1, step=1).to_json().decode())
    assert mine.sights()[1].status.step == 1
    answers = store.check
    monkeypatch.setattr(store, "check", lambda keys: is_mended.wait() and answers(keys))
    try:
        seen = [mine.sights()[1] for _ in range(3)]
        mine.tell(status(0, state=FINISHED))
        assert mine.announce("x") == "x"
        assert {one.status.step for one in seen} == {1}
        assert 0 < seen[0].age_s < seen[1].age_s < seen[2].age_s
    finally:
        is_mended.set()
    store.set("guard/status/1", status(1, step=2).to_json().decode())
    assert wait_until(lambda: mine.sights()[1].status.step == 2, 10.0)


def test_a_launcher_says_who_is_stopped_until_that_one_speaks_again(make: Make, tmp_path: Path) -> None:
    store = DictStore()
    _, mine = make(0, [0], folder="a", store=store)
    _, theirs = make(1, [1], folder="b", store=store)
    theirs.tell(status(1, step=3))
    send_ends(tmp_path / "b", {1: None}, store)
    (sight,) = mine.sights().values()
    assert (sight.is_stopped, sight.is_gone, sight.how, sight.status.rank) == (True, False, "", 1)
    theirs._told_s = 0.0
    theirs.tell(status(1, step=4))
    assert not mine.sights()[1].is_stopped


def test_a_rank_that_says_the_same_again_is_not_silent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that goes round a loop does, of which no look sees that it moves."""
    store, now_s = DictStore(), 100.0
    monkeypatch.setattr("lockstep.observe.board.time.monotonic", lambda: now_s)
    _, mine = make(0, [0], folder="a", store=store)
    _, theirs = make(1, [1], folder="b", store=store)
    for _ in range(9):
        now_s += 1.0
        theirs.tell(status(1))
        assert mine.sights()[1].age_s == 0.0


def test_a_launcher_speaks_for_a_rank_whose_guard_cannot(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is silent itself, as where the cable is cut, or the guard speaks again."""
    store, now_s = DictStore(), 100.0
    monkeypatch.setattr("lockstep.observe.board.time.monotonic", lambda: now_s)
    monkeypatch.setattr("lockstep.observe.board.time.sleep", never)
    _, mine = make(0, [0], folder="a", store=store)
    _, theirs = make(1, [1], folder="b", store=store)
    theirs.tell(status(1))
    for age_s, works in ((1.25, False), (2.25, True)):
        send_silent([Sight(status(1, step=3), age_s, is_gone=False, is_working=works)], store)
        sight = mine.sights()[1]
        assert sight == Sight(status(1, step=3), age_s, is_gone=False, is_working=works, is_seen=True)
        now_s += 1.0
    assert mine.records_of(1) == [], "nor is it asked"
    assert (mine.sights()[1].age_s, mine.sights()[1].is_seen) == (3.25, True)
    now_s += 2.5
    assert mine.sights()[1] == Sight(status(1, step=3), 5.75, is_gone=False)
    theirs.tell(status(1, step=4))
    assert mine.sights()[1] == Sight(status(1, step=4), 0.0, is_gone=False)


def never(*_: object) -> None:
    raise AssertionError


def test_a_store_whose_holder_has_ended_is_no_error(make: Make) -> None:
    store = DictStore()
    _, mine = make(0, [0], folder="a", store=store)
    _, theirs = make(1, [1], folder="b", store=store)
    theirs.tell(status(1))
    assert 1 in mine.sights()
    store.is_gone = True
    mine.tell(status(0))
    assert mine.sights()[1].status == status(1)  # what was heard stays
    assert mine.announced() == ""
    assert mine.announce("z") == "z"
    assert mine.records_of(1) == []


def test_a_status_of_another_version_is_left_out(make: Make) -> None:
    _, mine = make(0, [0, 1])
    other, _ = make(1, [0, 1])
    for text in (b"not json", json.dumps({"rank": 1, "unknown": 2}).encode(), status(1).to_json()[:-5]):
        other.tell(text)
        assert 1 not in mine.sights()
