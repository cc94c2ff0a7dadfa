"""Messages between two ranks on shared memory: which send meets which receive, and how the bytes move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import final

from lockstep.comm.op import CommOp, describe
from lockstep.comm.shm.announcement import DTYPE_CODES
from lockstep.comm.shm.channel import (
    CHANNEL_BYTES,
    DTYPE,
    FREE,
    INLINE_BYTES,
    NBYTES,
    NUMBER,
    PIECE_BYTES,
    PLACE,
    REFUSED,
    STATE,
    TAG,
    TAKEN,
    WANTED,
    Channel,
)
from lockstep.comm.shm.control import Control
from lockstep.comm.shm.segment import Heap, Segment
from lockstep.comm.shm.staging import move
from lockstep.comm.shm.waiting import ORDERED, fence
from lockstep.errors import CollectiveMismatch, CommError, SharedMemoryUnavailable


@final
class Delivery:
    """One send or receive, and how far it has come."""

    def __init__(self, op: CommOp) -> None:
        tensor = (op.inputs or op.outputs)[0]
        self.op = op
        self.address = tensor.data_ptr()
        self.nbytes = tensor.nbytes
        self.dtype = DTYPE_CODES[tensor.dtype]
        self.moved = 0  # bytes that went over the belt
        self.channel: Channel | None = None  # set once it has a letter
        self.letter = 0
        self.source: int | None = None  # of a receive: the rank whose letter it opened
        self.done = False
        self.error: CommError | None = None

    def end(self, error: CommError | None = None) -> None:
        """It is over, well or badly."""
        self.error = error
        self.done = True


@final
class Post:
    """The channels of one rank of one group. One thread at a time."""

    def __init__(self, segment: Segment, heap: Heap, control: Control) -> None:
        self.offsets: list[int] = []  # of the channels this rank has made
        self._segment = segment
        self._heap = heap
        self._control = control
        self._rank = control.rank
        self._outgoing: list[Channel | None] = [None] * control.world_size
        self._incoming: list[Channel | None] = [None] * control.world_size

    def advance(self, pending: Iterable[Delivery]) -> None:
        """Move what can be moved now.

        Among deliveries that could take each other's place the older goes first, also where the younger one's partner
        comes while we look.
        """
        full: set[int | None] = set()  # targets without a free letter
        waiting: set[tuple[int | None, int]] = set()  # (source, tag) that an older receive still waits for
        for message in pending:
            op = message.op
            if message.channel is not None:
                (self._take_pieces if op.kind == "recv" else self._give_pieces)(message)
            elif op.kind == "send" and op.peer not in full:
                self._write_letter(message)
                if message.channel is None and not message.done:
                    full.add(op.peer)
            elif op.kind == "recv":
                self._match(message, waiting)
                if message.channel is None and not message.done:
                    waiting.add((op.peer, op.tag))

    def _give_pieces(self, message: Delivery) -> None:
        """Go on with a message whose letter is written."""
        peer = message.op.peer
        assert peer is not None
        assert message.channel is not None
        channel, words, letter = message.channel, message.channel.words, message.letter
        state = words[letter + STATE]
        if state == TAKEN:
            words[letter + STATE] = FREE
            message.end()
        elif state == REFUSED:
            words[letter + STATE] = FREE
            message.end(
                CollectiveMismatch(
                    f"{self.where(message.op)}: rank {peer} expects another dtype or size. Next: its error has both"
                )
            )
        elif state == WANTED:
            while message.moved < message.nbytes and (piece := channel.free_piece()) is not None:
                count = min(PIECE_BYTES, message.nbytes - message.moved)
                move(piece, message.address + message.moved, count)
                message.moved += count
                self._publish(peer, channel.piece_filled)
            if message.moved == message.nbytes:
                message.end()

    def _write_letter(self, message: Delivery) -> None:
        peer = message.op.peer
        assert peer is not None
        try:
            channel = self._channel_to(peer)
        except SharedMemoryUnavailable as error:
            message.end(error)
            return
        letter = channel.free_letter()
        if letter is None:
            return
        words = channel.words
        words[letter + NUMBER] = channel.next_number()
        words[letter + TAG] = message.op.tag
        words[letter + DTYPE] = message.dtype
        words[letter + NBYTES] = message.nbytes
        place = self._segment.offset_of(message.address, message.nbytes)
        words[letter + PLACE] = 0 if place is None else place + 1
        is_small = message.nbytes <= INLINE_BYTES
        if is_small:
            move(channel.inline_address(letter), message.address, message.nbytes)
        message.channel, message.letter = channel, letter
        self._publish(peer, lambda: channel.letter_written(letter))
        if is_small:
            message.end()

    def _match(self, message: Delivery, waiting: Set[tuple[int | None, int]]) -> None:
        """Find the letter for a receive, unless an older receive has a right to it."""
        op = message.op
        sources = range(self._control.world_size) if op.peer is None else (op.peer,)
        if (None, op.tag) in waiting:
            return
        for source in sources:
            channel = None if (source, op.tag) in waiting else self._channel_from(source)
            if channel is None:
                continue
            letter = next((place for place in channel.open_letters() if channel.words[place + TAG] == op.tag), None)
            if letter is None:
                continue
            if not channel.streaming or channel.words[letter + NBYTES] <= INLINE_BYTES:  # the belt is free
                self._open_letter(message, source, channel, letter)
                return

    def _open_letter(self, message: Delivery, source: int, channel: Channel, letter: int) -> None:
        if not ORDERED:
            fence()
        words = channel.words
        nbytes, place = words[letter + NBYTES], words[letter + PLACE]
        is_small = nbytes <= INLINE_BYTES
        message.source = source
        if nbytes != message.nbytes or words[letter + DTYPE] != message.dtype:
            self._publish(source, lambda: words.__setitem__(letter + STATE, FREE if is_small else REFUSED))
            message.end(
                CollectiveMismatch(
                    f"{self.where(message.op)}: there is room for {message.nbytes} bytes, but rank {source} sent "
                    f"{nbytes}"
                    + (", of another dtype" if words[letter + DTYPE] != message.dtype else "")
                    + ". Next: receive into a tensor of the size and dtype that is sent"
                )
            )
        elif is_small:
            move(message.address, channel.inline_address(letter), nbytes)
            self._publish(source, lambda: words.__setitem__(letter + STATE, FREE))
            message.end()
        elif place:
            move(message.address, self._segment.base + place - 1, nbytes)
            self._publish(source, lambda: words.__setitem__(letter + STATE, TAKEN))
            message.end()
        else:
            message.channel, message.letter = channel, letter
            channel.streaming = True
            self._publish(source, lambda: words.__setitem__(letter + STATE, WANTED))

    def _take_pieces(self, message: Delivery) -> None:
        channel = message.channel
        assert channel is not None
        assert message.source is not None
        while message.moved < message.nbytes and (piece := channel.full_piece()) is not None:
            if not ORDERED:
                fence()
            count = min(PIECE_BYTES, message.nbytes - message.moved)
            move(message.address + message.moved, piece, count)
            message.moved += count
            self._publish(message.source, channel.piece_emptied)
        if message.moved == message.nbytes:
            channel.streaming = False
            self._publish(message.source, lambda: channel.words.__setitem__(message.letter + STATE, FREE))
            message.end()

    def _publish(self, peer: int, store: Callable[[], object]) -> None:
        """Let `peer` see one store, after everything that was written before it."""
        if not ORDERED:
            fence()
        store()
        self._control.ring(peer)

    def _channel_to(self, peer: int) -> Channel:
        channel = self._outgoing[peer]
        if channel is None:
            offset = self._heap.allocate(CHANNEL_BYTES)
            self.offsets.append(offset)
            channel = self._outgoing[peer] = Channel(self._segment, offset)
            channel.clear()
            word = self._control.channel_word(self._rank, peer)
            self._publish(peer, lambda: self._control.words.__setitem__(word, offset))
        return channel

    def _channel_from(self, peer: int) -> Channel | None:
        channel = self._incoming[peer]
        if channel is None and peer != self._rank:
            offset = self._control.words[self._control.channel_word(peer, self._rank)]
            if offset:
                channel = self._incoming[peer] = Channel(self._segment, offset)
        return channel

    def end_of_peer(self, message: Delivery) -> tuple[int, str] | None:
        """The rank whose leaving makes a delivery impossible, and how it left."""
        peer = message.op.peer if message.op.peer is not None else message.source
        peers = [rank for rank in range(self._control.world_size) if rank != self._rank] if peer is None else [peer]
        ends = [(rank, self._control.end_of(rank)) for rank in peers]
        left = [(rank, end) for rank, end in ends if end is not None]
        return left[0] if len(left) == len(peers) else None

    def where(self, op: CommOp) -> str:
        """The operation and its rank, for a message."""
        return f"{describe(op)} on rank {self._rank} of {self._control.world_size} (shm)"
