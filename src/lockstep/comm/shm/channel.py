"""The way from one rank to one other: letters that lie open, and a belt for what does not fit into a letter.

    free -> OPEN              the sender has a message: tag, dtype, size; small ones lie in the letter itself
    OPEN -> free              the receiver took a small one
    OPEN -> WANTED -> free    the receiver takes a large one from the belt, piece by piece
    OPEN -> TAKING -> TAKEN   the receiver copies it from where it lies in the segment; the sender frees the letter
    OPEN -> REFUSED           the receiver wanted another dtype or size; the sender frees the letter and raises

A letter is matched by its tag, in order of its number among equal tags. Letters come in sheets: where all are taken by
messages that nobody waits for yet, the sender adds a sheet. Every word has one writer at a time; a sender that takes
its tensor back marks the letter as withdrawn, in a word of its own.
"""

from __future__ import annotations

from typing import NamedTuple, final

from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.waiting import ORDERED, fence

FREE, OPEN, WANTED, TAKING, TAKEN, REFUSED = range(6)
INLINE_BYTES = 4096  # what a letter itself can hold
PIECE_BYTES = 256 * 1024

STATE, NUMBER, TAG, DTYPE, NBYTES, PLACE, WITHDRAWN = range(7)  # words of a letter; the place is 1 + its offset
_LETTERS = 16  # on a sheet
_LETTER = 8
_NEXT = _LETTERS * _LETTER  # 1 + offset of the next sheet; 0: there is none yet
_SHEET_WORDS = _NEXT + 8
SHEET_BYTES = 8 * _SHEET_WORDS + _LETTERS * INLINE_BYTES

# the sender's counts (pieces on the belt, letters written) and the receiver's, on cache lines of their own
_FILLED, _WRITTEN, _EMPTIED = 0, 1, 8
_HEAD_WORDS = 16
_PIECES = 2  # on the belt: one is filled while the other is emptied
_BELT_AT = 8 * _HEAD_WORDS + SHEET_BYTES
CHANNEL_BYTES = _BELT_AT + _PIECES * PIECE_BYTES


class Letter(NamedTuple):
    """One letter as both sides see it."""

    words: memoryview
    address: int  # of a small message


@final
class _Sheet:
    def __init__(self, segment: Segment, offset: int) -> None:
        self.words = memoryview(segment.map)[offset : offset + 8 * _SHEET_WORDS].cast("Q")
        inline = segment.base + offset + 8 * _SHEET_WORDS
        self.letters = [
            Letter(self.words[_LETTER * index : _LETTER * (index + 1)], inline + index * INLINE_BYTES)
            for index in range(_LETTERS)
        ]

    def clear(self) -> None:
        for index in range(_SHEET_WORDS):
            self.words[index] = 0


@final
class Channel:
    """One side's view of the channel at `offset`."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self.streaming = False  # receiver: a message of this channel is on the belt
        self._segment = segment
        self._head = memoryview(segment.map)[offset : offset + 8 * _HEAD_WORDS].cast("Q")
        self._belt = segment.base + offset + _BELT_AT
        self._sheets = [_Sheet(segment, offset + 8 * _HEAD_WORDS)]
        self._opened = 0  # receiver: letters that are not its concern any more

    def clear(self) -> None:
        """Make the memory of a new channel ready; its sender does it before anybody else can see it."""
        for index in range(_HEAD_WORDS):
            self._head[index] = 0
        self._sheets[0].clear()

    # ------------------------------------------------------------------ letters

    def free_letter(self) -> Letter | None:
        """A letter the sender may use, with its number; None where all are in use."""
        for sheet in self._sheets:
            for letter in sheet.letters:
                if letter.words[STATE] == FREE:
                    letter.words[NUMBER] = self._head[_WRITTEN] + 1
                    return letter
        return None

    def add_sheet(self, offset: int) -> None:
        """The sender has found SHEET_BYTES for more letters."""
        sheet = _Sheet(self._segment, offset)
        sheet.clear()
        if not ORDERED:
            fence()
        self._sheets[-1].words[_NEXT] = offset + 1
        self._sheets.append(sheet)

    def letter_written(self, letter: Letter) -> None:
        """The sender has filled a letter."""
        letter.words[WITHDRAWN] = 0
        letter.words[STATE] = OPEN
        self._head[_WRITTEN] += 1

    def open_letters(self) -> list[Letter]:
        """The letters nobody has matched yet, oldest first.

        Those written while we look are left out: a later one could be seen and an earlier one not.
        """
        written = self._head[_WRITTEN]
        if written == self._opened:
            return []
        if not ORDERED:
            fence()
        while following := self._sheets[-1].words[_NEXT]:
            self._sheets.append(_Sheet(self._segment, following - 1))
        found = [letter for sheet in self._sheets for letter in sheet.letters if letter.words[STATE] == OPEN]
        found.sort(key=lambda letter: letter.words[NUMBER])
        return [letter for letter in found if letter.words[NUMBER] <= written]

    def letter_opened(self) -> None:
        """The receiver has matched a letter, or found it withdrawn."""
        self._opened += 1

    # ------------------------------------------------------------------ the belt

    def free_piece(self) -> int | None:
        """The address of a piece of the belt that may be filled; None while all are full."""
        filled = self._head[_FILLED]
        return self._piece(filled) if filled - self._head[_EMPTIED] < _PIECES else None

    def full_piece(self) -> int | None:
        """The address of the next piece to take; None while there is none."""
        emptied = self._head[_EMPTIED]
        return self._piece(emptied) if emptied < self._head[_FILLED] else None

    def piece_filled(self) -> None:
        """The sender has written a piece."""
        self._head[_FILLED] += 1

    def piece_emptied(self) -> None:
        """The receiver has read a piece."""
        self._head[_EMPTIED] += 1

    def _piece(self, number: int) -> int:
        return self._belt + number % _PIECES * PIECE_BYTES
