"""Letters and pieces between two ranks: both sides of a channel in one process."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.comm.shm.channel import CHANNEL_BYTES, FREE, NUMBER, OPEN, SHEET_BYTES, STATE, TAG, Channel, Letter
from lockstep.comm.shm.segment import PAGE, Segment, SegmentFile, default_directory


@pytest.fixture(scope="module")
def segment() -> Segment:
    file = SegmentFile.create(default_directory(), 512 * PAGE)
    made = Segment(file.fd, PAGE, 1, 511 * PAGE)
    file.close()
    return made


class Pair:
    """A sender's and a receiver's view of a new channel."""

    def __init__(self, segment: Segment) -> None:
        self.sender = Channel(segment, PAGE)
        self.sender.clear()
        self.receiver = Channel(segment, PAGE)
        self.next_sheet = PAGE + -(-CHANNEL_BYTES // PAGE) * PAGE

    def send(self, tag: int) -> int:
        """Write a letter; its number."""
        letter = self.sender.free_letter()
        if letter is None:
            self.sender.add_sheet(self.next_sheet)
            self.next_sheet += -(-SHEET_BYTES // PAGE) * PAGE
            letter = self.sender.free_letter()
        assert letter is not None
        number = letter.words[NUMBER]
        letter.words[TAG] = tag
        self.sender.letter_written(letter)
        return number

    def take(self, letter: Letter) -> int:
        """Match a letter and give it back; its number."""
        number = letter.words[NUMBER]
        self.receiver.letter_opened()
        letter.words[STATE] = FREE
        return number

    def receive(self, tag: int) -> int | None:
        """The number of the oldest letter with this tag."""
        found = (letter for letter in self.receiver.open_letters() if letter.words[TAG] == tag)
        letter = next(found, None)
        return None if letter is None else self.take(letter)


@settings(derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=120))
def test_equal_tags_come_in_order(segment: Segment, calls: list[tuple[bool, int]]) -> None:
    pair = Pair(segment)
    model: defaultdict[int, deque[int]] = defaultdict(deque)
    for is_send, tag in calls:
        if is_send:
            model[tag].append(pair.send(tag))
        else:
            assert pair.receive(tag) == (model[tag].popleft() if model[tag] else None)
    numbers = sorted(number for waiting in model.values() for number in waiting)
    assert [pair.take(letter) for letter in pair.receiver.open_letters()] == numbers
    assert pair.receiver.open_letters() == []


def test_more_letters_than_a_sheet_holds(segment: Segment) -> None:
    pair = Pair(segment)
    numbers = [pair.send(tag) for tag in range(100)]
    assert [pair.receive(tag) for tag in reversed(range(100))] == numbers[::-1]
    sheets = pair.next_sheet
    assert [pair.send(5) and pair.receive(5) for _ in range(50)] == list(range(101, 151))
    assert pair.next_sheet == sheets  # letters are used again


def test_letters_written_while_the_receiver_looks_are_left_out(segment: Segment) -> None:
    """Their place among the others is not known yet: an older one may lie in a letter that was looked at before."""
    pair = Pair(segment)
    first = pair.send(1)
    letter = pair.sender.free_letter()
    assert letter is not None
    letter.words[STATE] = OPEN  # it can be seen, but is not counted
    assert [found.words[NUMBER] for found in pair.receiver.open_letters()] == [first]
    pair.sender.letter_written(letter)
    assert [found.words[NUMBER] for found in pair.receiver.open_letters()] == [first, first + 1]


def test_the_belt_has_room_for_two_pieces(segment: Segment) -> None:
    pair = Pair(segment)
    assert pair.receiver.full_piece() is None
    for _ in range(5):
        filled = []
        while (piece := pair.sender.free_piece()) is not None:
            filled.append(piece)
            pair.sender.piece_filled()
        assert len(set(filled)) == 2
        taken = []
        while (piece := pair.receiver.full_piece()) is not None:
            taken.append(piece)
            pair.receiver.piece_emptied()
        assert taken == filled


def test_a_file_for_one_user_without_a_name(tmp_path: Path) -> None:
    file = SegmentFile.create(tmp_path, PAGE)
    try:
        assert list(tmp_path.iterdir()) == [] or [path.name for path in tmp_path.iterdir()] == [Path(file.path).name]
        other = SegmentFile.open(file.path)
        other.close()
        other.close()
    finally:
        file.close()
    assert list(tmp_path.iterdir()) == []
