"""Messages between two ranks on shared memory: which send meets which receive, and how the bytes move."""

from __future__ import annotations

import time
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, final

from lockstep.comm.shm.channel import (
    CHANNEL_BYTES,
    DTYPE,
    FREE,
    INLINE_BYTES,
    NBYTES,
    PIECE_BYTES,
    PLACE,
    REFUSED,
    SHEET_BYTES,
    STATE,
    TAG,
    TAKEN,
    TAKING,
    WANTED,
    WITHDRAWN,
    Channel,
    Letter,
)
from lockstep.comm.shm.control import Control
from lockstep.comm.shm.segment import Heap, Segment
from lockstep.comm.shm.staging import move
from lockstep.comm.shm.waiting import ORDERED, fence
from lockstep.errors import CollectiveMismatch, SharedMemoryUnavailable

if TYPE_CHECKING:
    from lockstep.comm.shm.messages import Message

_LOOK_S = 50e-6
_COPYING_S = 2.0  # a receiver that takes longer for its copy was stopped


@final
class Post:
    """The channels of one rank of one group. One thread at a time."""

    def __init__(self, segment: Segment, heap: Heap, control: Control) -> None:
        self.offsets: list[int] = []  # of the memory that this rank has made channels of
        self._segment = segment
        self._heap = heap
        self._control = control
        self._rank = control.rank
        self._outgoing: list[Channel | None] = [None] * control.world_size
        self._incoming: list[Channel | None] = [None] * control.world_size

    def advance(self, pending: Iterable[Message]) -> None:
        """Move what can be moved now.

        Among deliveries that could take each other's place the older goes first, also where the younger one's partner
        comes while we look.
        """
        waiting: set[tuple[int | None, int]] = set()  # (source, tag) that an older receive still waits for
        for message in pending:
            op = message.op
            if message.letter is not None:
                (self._take_pieces if op.kind == "recv" else self._give_pieces)(message, *message.letter)
            elif op.kind == "send":
                self._write_letter(message)
            else:
                self._match(message, waiting)
                if message.letter is None and not message.done:
                    waiting.add((op.peer, op.tag))

    # ------------------------------------------------------------------ the sender's side

    def _write_letter(self, message: Message) -> None:
        peer = message.op.partner
        try:
            channel = self._channel_to(peer)
            letter = channel.free_letter()
            if letter is None:
                channel.add_sheet(self._allocate(SHEET_BYTES))
                letter = channel.free_letter()
        except SharedMemoryUnavailable as error:
            message.end(error)
            return
        assert letter is not None
        place = self._segment.place_of(message.tensor)
        words = letter.words
        words[TAG] = message.op.tag
        words[DTYPE] = message.dtype
        words[NBYTES] = message.nbytes
        words[PLACE] = 0 if place is None else place + 1
        is_small = message.nbytes <= INLINE_BYTES
        if is_small:
            move(letter.address, message.address, message.nbytes)
        message.letter = channel, letter
        if not ORDERED:
            fence()
        channel.letter_written(letter)
        self._control.ring(peer)
        if is_small:
            message.end()

    def _give_pieces(self, message: Message, channel: Channel, letter: Letter) -> None:
        peer, state = message.op.partner, letter.words[STATE]
        if state == TAKEN:
            letter.words[STATE] = FREE
            message.end()
        elif state == REFUSED:
            letter.words[STATE] = FREE
            where = self._control.attendance.where(message.op)
            text = f"{where}: rank {peer} expects another dtype or size. Next: its error has both"
            message.end(CollectiveMismatch(text))
        elif state == WANTED:
            while message.moved < message.nbytes and (piece := channel.free_piece()) is not None:
                count = min(PIECE_BYTES, message.nbytes - message.moved)
                move(piece, message.address + message.moved, count)
                message.moved += count
                if not ORDERED:
                    fence()
                channel.piece_filled()
                self._control.ring(peer)
            if message.moved == message.nbytes:
                message.end()

    def withdraw(self, message: Message) -> bool:
        """Take the tensor of an unfinished send back: nobody reads it after this.

        False where the receiver is in the middle of it, and cannot be left alone.
        """
        if message.op.kind == "recv" or message.letter is None:
            return message.letter is None
        _, letter = message.letter
        letter.words[WITHDRAWN] = 1
        fence()  # whoever has not said that it is taking it sees that it must not
        patience = time.monotonic() + _COPYING_S
        while letter.words[STATE] == TAKING and time.monotonic() < patience:
            if self._control.attendance.end_of(message.op.partner) == "ended":
                return True
            time.sleep(_LOOK_S)
        return letter.words[STATE] not in (TAKING, WANTED)

    # ------------------------------------------------------------------ the receiver's side

    def _match(self, message: Message, waiting: Set[tuple[int | None, int]]) -> None:
        """Find the letter for a receive, unless an older receive has a right to it."""
        op = message.op
        sources = range(self._control.world_size) if op.peer is None else (op.peer,)
        if (None, op.tag) in waiting:
            return
        for source in sources:
            channel = None if (source, op.tag) in waiting else self._channel_from(source)
            if channel is None:
                continue
            for letter in channel.open_letters():
                if letter.words[TAG] != op.tag:
                    continue
                if self._open_letter(message, source, channel, letter):
                    return
                if not letter.words[WITHDRAWN]:  # it must wait for the belt, and what came later behind it
                    break

    def _open_letter(self, message: Message, source: int, channel: Channel, letter: Letter) -> bool:
        """Take what the letter is about; False where that cannot be now, or never."""
        words = letter.words
        nbytes, place = words[NBYTES], words[PLACE]
        is_small = nbytes <= INLINE_BYTES
        if not is_small and not place and channel.streaming:
            return False
        if not is_small:
            words[STATE] = TAKING
            fence()
            if words[WITHDRAWN]:
                channel.letter_opened()
                self._answer(source, letter, FREE)
                return False
        channel.letter_opened()
        message.source = source
        if nbytes != message.nbytes or words[DTYPE] != message.dtype:
            message.end(self._refusal(message, source, words))
            self._answer(source, letter, FREE if is_small else REFUSED)
        elif is_small:
            move(message.address, letter.address, nbytes)
            self._answer(source, letter, FREE)
            message.end()
        elif place:
            move(message.address, self._segment.base + place - 1, nbytes)
            self._answer(source, letter, TAKEN)
            message.end()
        else:
            message.letter = channel, letter
            channel.streaming = True
            self._answer(source, letter, WANTED)
        return True

    def _take_pieces(self, message: Message, channel: Channel, letter: Letter) -> None:
        source = message.source
        assert source is not None
        while message.moved < message.nbytes and (piece := channel.full_piece()) is not None:
            if not ORDERED:
                fence()
            count = min(PIECE_BYTES, message.nbytes - message.moved)
            move(message.address + message.moved, piece, count)
            message.moved += count
            if not ORDERED:
                fence()
            channel.piece_emptied()
            self._control.ring(source)
        if message.moved == message.nbytes:
            channel.streaming = False
            self._answer(source, letter, FREE)
            message.end()

    def _answer(self, source: int, letter: Letter, state: int) -> None:
        if not ORDERED:
            fence()
        letter.words[STATE] = state
        self._control.ring(source)

    def _refusal(self, message: Message, source: int, words: memoryview) -> CollectiveMismatch:
        where = self._control.attendance.where(message.op)
        other = ", of another dtype" if words[DTYPE] != message.dtype else ""
        return CollectiveMismatch(
            f"{where}: there is room for {message.nbytes} bytes, but rank {source} sent {words[NBYTES]}{other}. "
            f"Next: receive into a tensor of the size and dtype that is sent"
        )

    # ------------------------------------------------------------------ channels and peers

    def _channel_to(self, peer: int) -> Channel:
        channel = self._outgoing[peer]
        if channel is None:
            offset = self._allocate(CHANNEL_BYTES)
            channel = self._outgoing[peer] = Channel(self._segment, offset)
            channel.clear()
            if not ORDERED:
                fence()
            self._control.words[self._control.channel_word(self._rank, peer)] = offset
        return channel

    def _channel_from(self, peer: int) -> Channel | None:
        channel = self._incoming[peer]
        if channel is None and peer != self._rank:
            offset = self._control.words[self._control.channel_word(peer, self._rank)]
            if offset:
                channel = self._incoming[peer] = Channel(self._segment, offset)
        return channel

    def _allocate(self, nbytes: int) -> int:
        offset = self._heap.allocate(nbytes)
        self.offsets.append(offset)
        return offset

    def end_of_peer(self, message: Message) -> tuple[int, str] | None:
        """The rank whose leaving makes a delivery impossible, and how it left."""
        peer = message.op.peer if message.op.peer is not None else message.source
        peers = [rank for rank in range(self._control.world_size) if rank != self._rank] if peer is None else [peer]
        ends = [(rank, self._control.attendance.end_of(rank)) for rank in peers]
        left = [(rank, end) for rank, end in ends if end is not None]
        return left[0] if len(left) == len(peers) else None
