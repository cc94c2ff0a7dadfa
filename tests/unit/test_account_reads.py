"""What an account reads of its record: all of it once, however many there were since it last looked, in C or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from lockstep.observe import sights
from lockstep.observe.account import Account
from lockstep.observe.flight import RECORDS, FlightRecorder, pack_words
from lockstep.observe.native import IS_IN_C
from lockstep.observe.sights import flight_path
from lockstep.observe.status import EVERY, NEWEST, Status

GROUPS = ("world", "ranks 0,1", "world #2")
_SPAN = 1024


class Reader:
    """A record, its account, and what is true."""

    def __init__(self, folder: Path) -> None:
        self.in_line = 0  # looks at operations that are in line
        self.recorder = FlightRecorder(flight_path(folder, 0), 0, 2)
        self.account = Account(self.recorder)
        for group in GROUPS:
            self.account.group(group, (0, 1))
        self.open: list[int] = []
        self.seqs: dict[object, int] = {}
        self.marks: dict[str, list[tuple[int, int, int]]] = {group: [] for group in GROUPS}

    def begin(self, group: str, *, is_message: bool = False, is_left: bool = True) -> None:
        text = "send float32 [1] to rank 1 tag 0" if is_message else "all_reduce float32 [1] sum"
        seq = self.seqs[group, is_message] = self.seqs.get((group, is_message), -1) + 1
        number = self.recorder.enter(seq, pack_words(group, text, "train.py:1 step"), is_message)
        if not is_message:
            self.marks[group].append((seq, self.recorder.step, self.recorder._digests[group][0]))
        self.recorder.leave(number) if is_left else self.open.append(number)

    def look(self) -> Status:
        before = self.account._read
        self.in_line += self.account._record.in_line(before) is not None
        self.account.motion.has_begun = False
        self.account.catch_up()
        assert self.account.motion.has_begun is (self.recorder.started > before)
        status = self.account.status(0.0)
        for name in GROUPS:
            assert status.groups[name].count == len(self.marks[name])
            shown = [tuple(mark) for mark in status.groups[name].marks]
            assert shown == sorted({*shown} & {*self.marks[name]})
        return status

    def close(self) -> None:
        for part in (self.account, self.recorder):
            part.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["as built", "one by one"])
def is_in_line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether what is in line is read so: where it is in C, unless it is taken away."""
    if request.param == "one by one":
        monkeypatch.setattr(sights, "in_line", lambda *_: None)
    return IS_IN_C and request.param == "as built"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_is_what_was_done(reader: Reader, is_in_line: bool, seed: int) -> None:
    """However many there were since the last look, up to more than are kept, and what is among them."""
    random, kept = Random(seed), True
    for _ in range(12):
        many = random.choice([0, 1, 64, 65, 200, 700, RECORDS - 64, RECORDS + 10])
        kept, mixes = kept and many <= RECORDS, random.random() < 0.4
        for _ in range(many):
            reader.begin(
                random.choice(GROUPS) if mixes and random.random() < 0.05 else GROUPS[0],
                is_message=mixes and random.random() < 0.01,
                is_left=random.random() < 0.99,
            )
            if random.random() < 0.1:
                reader.recorder.set_step(reader.recorder.step + 1)
        for number in random.sample(reader.open, len(reader.open) // 2):
            reader.recorder.leave(number)
            reader.open.remove(number)
        if many > RECORDS:  # of a group that has had none since, the newest may be among those that were overwritten
            reader.begin(GROUPS[1])
            reader.begin(GROUPS[2])
        status = reader.look()
        followed = {*reader.account._under_way}
        assert followed == {number for number in reader.open if number >= reader.recorder.started - RECORDS}
        sent = sum(count for (_, is_message), count in reader.seqs.items() if is_message)
        assert sum(status.messages.values()) == (sent + len(status.messages) if kept else 0)
        assert status.last is None or status.last.number == reader.recorder.started - 1
    assert (reader.in_line > 0) is is_in_line


def test_the_marks_that_are_kept_are_there(reader: Reader, is_in_line: bool) -> None:
    """The newest, and every thirty-second of the last thousand, wherever the ring begins anew."""
    for many in (300, 1000, 500, 1900, 70, 66, 900):
        for _ in range(many):
            reader.begin("world")
        marks, all_of_them = {*map(tuple, reader.look().groups["world"].marks)}, reader.marks["world"]
        assert marks.issuperset(all_of_them[-NEWEST:])
        assert marks.issuperset([mark for mark in all_of_them[-many:][-_SPAN:] if mark[0] % EVERY == 0])
    assert reader.in_line == (7 if is_in_line else 0)


@pytest.mark.skipif(not IS_IN_C, reason="in Python they are read one by one")
@pytest.mark.parametrize("at", [0, 1, 50, 99])
def test_two_groups_are_never_in_line(reader: Reader, at: int) -> None:
    """Also where the numbers of one go on from those of the other, and its name begins with that of the other."""
    for number in range(100):
        group = GROUPS[0] if number >= at else GROUPS[2]
        reader.seqs[group, False] = number - 1
        reader.begin(group)
    found = reader.account._record.in_line(0)
    assert (found is None) is (at > 0)
    if found is not None:
        until, (group, marks, under_way) = found
        assert (until, group, under_way) == (100, GROUPS[0], [])
        assert marks == [mark for mark in reader.marks[GROUPS[0]] if mark[0] % EVERY == 0 or mark[0] >= 100 - NEWEST]


@pytest.mark.skipif(not IS_IN_C, reason="in Python they are read one by one")
def test_a_name_that_was_cut_within_a_letter_is_read_as_elsewhere(reader: Reader) -> None:
    for seq in range(3):
        reader.recorder.enter(seq, pack_words("a" + "é" * 60, "all_reduce float32 [1] sum", "train.py:1 step"))
    found = reader.account._record.in_line(0)
    assert found is not None
    group, *_ = found[1]
    assert {group} == {record.group for record in reader.account.records()}
    assert "\ufffd" in group


@pytest.mark.skipif(not IS_IN_C, reason="in Python they are read one by one")
def test_what_is_not_all_there_is_not_in_line(reader: Reader) -> None:
    record = reader.account._record
    assert record.in_line(0) is None  # there is nothing
    for number in range(RECORDS):
        reader.begin("world", is_left=number != 7)
    found = record.in_line(0)
    assert found is not None
    assert found[1][2] == [7]
    reader.begin("world")
    assert record.in_line(0) is None  # overwritten
    assert record.in_line(1) is not None
    reader.begin("world", is_message=True)
    assert record.in_line(RECORDS) is None
    assert record.in_line(RECORDS + 2) is None  # there is nothing


def test_what_is_being_written_is_left_out(reader: Reader) -> None:
    """A thread that has its number has not stored its record yet, and another one is ahead of it."""
    for _ in range(100):
        reader.begin("world")
    skipped = next(reader.recorder._numbers)
    for _ in range(100):
        reader.begin("world")
    assert reader.account._record.in_line(0) is None
    assert (reader.account._record.in_line(skipped + 1) is not None) is IS_IN_C
    assert len(reader.look().groups["world"].marks) > NEWEST
