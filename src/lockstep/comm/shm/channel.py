"""The way from one rank to one other: a few letters that lie open, and a belt for what does not fit into a letter.

    free -> OPEN            the sender has a message: tag, dtype, size; small ones lie in the letter itself
    OPEN -> free            the receiver took a small one
    OPEN -> WANTED -> free  the receiver takes a large one from the belt, piece by piece
    OPEN -> TAKEN -> free   the receiver copied it from where it lies in the segment; the sender clears the letter
    OPEN -> REFUSED -> free the receiver wanted another dtype or size; the sender clears the letter and raises

A letter is matched by its tag, in order of its number among equal tags, so a message nobody waits for yet blocks only
the letter it lies in. Every word has one writer at a time.
"""

from __future__ import annotations

import itertools
from typing import final

from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.waiting import ORDERED, fence

FREE, OPEN, WANTED, TAKEN, REFUSED = range(5)
LETTERS = 16
INLINE_BYTES = 4096  # what a letter itself can hold
PIECE_BYTES = 256 * 1024
_PIECES = 2  # on the belt: one is filled while the other is emptied

# words of a letter: state, number, tag, dtype, nbytes, 1 + place in the segment
STATE, NUMBER, TAG, DTYPE, NBYTES, PLACE = range(6)
_LETTER = 8
# the sender's counts (pieces on the belt, letters written) and the receiver's, on cache lines of their own
_FILLED, _WRITTEN, _EMPTIED = LETTERS * _LETTER, LETTERS * _LETTER + 1, LETTERS * _LETTER + 8
_WORDS = LETTERS * _LETTER + 16
_INLINE_AT = 8 * _WORDS
_BELT_AT = _INLINE_AT + LETTERS * INLINE_BYTES
CHANNEL_BYTES = _BELT_AT + _PIECES * PIECE_BYTES


@final
class Channel:
    """One side's view of the channel at `offset`. `words` is indexed by `letter + STATE` and so on."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self.words = memoryview(segment.map)[offset : offset + 8 * _WORDS].cast("Q")
        self._address = segment.base + offset
        self.streaming = False  # receiver: a message of this channel is on the belt

    def clear(self) -> None:
        """Make the memory of a new channel ready; its sender does it before anybody else can see it."""
        for index in range(_WORDS):
            self.words[index] = 0

    def free_letter(self) -> int | None:
        """A letter the sender may use."""
        return next((place for place in _PLACES if self.words[place + STATE] == FREE), None)

    def next_number(self) -> int:
        """The number of the sender's next letter."""
        return self.words[_WRITTEN] + 1

    def letter_written(self, letter: int) -> None:
        """The sender has filled a letter."""
        self.words[letter + STATE] = OPEN
        self.words[_WRITTEN] += 1

    def open_letters(self) -> list[int]:
        """The letters nobody has matched yet, oldest first.

        Those written while we look are left out: a later one could be seen and an earlier one not.
        """
        written = self.words[_WRITTEN]
        if not ORDERED:
            fence()
        found = [(self.words[place + NUMBER], place) for place in _PLACES if self.words[place + STATE] == OPEN]
        return [place for number, place in sorted(found) if number <= written]

    def inline_address(self, letter: int) -> int:
        """Where a small message lies."""
        return self._address + _INLINE_AT + letter // _LETTER * INLINE_BYTES

    def free_piece(self) -> int | None:
        """The address of a piece of the belt that may be filled; None while all are full."""
        filled = self.words[_FILLED]
        return self._piece(filled) if filled - self.words[_EMPTIED] < _PIECES else None

    def full_piece(self) -> int | None:
        """The address of the next piece to take; None while there is none."""
        emptied = self.words[_EMPTIED]
        return self._piece(emptied) if emptied < self.words[_FILLED] else None

    def piece_filled(self) -> None:
        """The sender has written a piece."""
        self.words[_FILLED] += 1

    def piece_emptied(self) -> None:
        """The receiver has read a piece."""
        self.words[_EMPTIED] += 1

    def _piece(self, number: int) -> int:
        return self._address + _BELT_AT + number % _PIECES * PIECE_BYTES


_PLACES = tuple(itertools.islice(itertools.count(0, _LETTER), LETTERS))
