"""Messages between two ranks on shared memory: what is sent, what is awaited, and who moves it.

All pending messages of a rank advance together: one pass over them does whatever can be done now. A rank that waits
makes the passes itself; while nobody waits, a thread does. Between passes it sleeps until a peer rings its bell.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Set
from typing import final

from lockstep.comm.op import CommOp, Work, describe
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
from lockstep.comm.shm.collectives import move
from lockstep.comm.shm.control import DTYPE_CODES, Control
from lockstep.comm.shm.segment import Heap, Segment
from lockstep.comm.shm.waiting import ORDERED, fence
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, SharedMemoryUnavailable, TransportClosed

_SLICE_S = 0.2
_SPINS = 300  # passes without success before sleeping


@final
class Message(Work):
    """One send or receive, and how far it has come."""

    def __init__(self, mail: Mail, op: CommOp) -> None:
        tensor = (op.inputs or op.outputs)[0]
        self.op = op
        self.address = tensor.data_ptr()
        self.nbytes = tensor.nbytes
        self.dtype = DTYPE_CODES[tensor.dtype]
        self.moved = 0  # bytes that went over the belt
        self.channel: Channel | None = None  # set once it has a letter
        self.letter = 0
        self.done = False
        self.error: CommError | None = None
        self.source: int | None = None
        self._mail = mail

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.done:
            self._mail.finish(self, timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done

    def source_rank(self) -> int | None:
        return self.source if self.op.kind == "recv" and self.op.peer is None else None

    def end(self, error: CommError | None = None) -> None:
        self.error = error
        self.done = True


@final
class Mail:
    """The messages of one rank of one group."""

    def __init__(self, segment: Segment, heap: Heap, control: Control, timeout_s: float, name: str) -> None:
        self._closing = False
        self.timeout_s = timeout_s
        self.offsets: list[int] = []  # of the channels this rank has made
        self._segment = segment
        self._heap = heap
        self._control = control
        self._name = name
        self._rank = control.rank
        self._outgoing: list[Channel | None] = [None] * control.world_size
        self._incoming: list[Channel | None] = [None] * control.world_size
        self._pending: list[Message] = []  # in order of submission; changed by whoever has the turn, grown by `submit`
        self._turn = threading.Lock()
        self._waiters = 0
        self._for_thread: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ the two sides

    def submit(self, op: CommOp) -> Message:
        """Begin a send or a receive."""
        message = Message(self, op)
        refusal = self._control.refusal(op)
        if refusal is not None:
            message.end(refusal)
            return message
        self._pending.append(message)
        if op.async_op:
            if self._turn.acquire(blocking=False):  # what can go now goes now
                try:
                    self._pass()
                finally:
                    self._turn.release()
            if not message.done:
                self._call_thread()
        return message

    def finish(self, message: Message, timeout_s: float | None) -> None:
        """Return when `message` has ended, moving whatever can be moved meanwhile."""
        seconds = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + seconds
        self._waiters += 1
        try:
            self._control.ring(self._rank)  # the thread, if it sleeps, leaves the turn to this one
            while not message.done:
                with self._turn:
                    if not message.done:
                        self._advance(lambda: message.done, _SPINS)
                if not message.done and time.monotonic() > deadline:
                    self._give_up(message, seconds)
        finally:
            self._waiters -= 1
            if any(waiting.op.async_op for waiting in self._pending):
                self._call_thread()

    def close(self) -> None:
        """End the thread, and what is pending with TransportClosed."""
        self._closing = True
        self._control.ring(self._rank)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._for_thread.put(False)
            if thread is not threading.current_thread():
                thread.join()
        with self._turn:
            for message in self._pending:
                message.end(TransportClosed(f"{self._where(message.op)}: this communicator was closed on this rank"))
            self._pending.clear()

    def _call_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name=self._name, daemon=True)
            self._thread.start()
        self._for_thread.put(True)

    def serve(self) -> None:
        """The thread's work: pass until nothing is pending or somebody waits and does it himself."""
        while self._pending and not self._waiters and not self._closing:
            with self._turn:
                self._advance(lambda: self._waiters > 0, spins=0)

    # ------------------------------------------------------------------ with the turn

    def _advance(self, enough: Callable[[], bool], spins: int) -> None:
        """Pass until something ended, at most one slice long; then look whether the awaited still live."""
        for _ in range(spins):
            if self._pass() or enough():
                return
        if self._control.sleep_until_rung(self._pass, enough, _SLICE_S) or enough():
            return
        for message in list(self._pending):
            end = self._end_of_peer(message)
            if end is not None:
                self._pass()  # what it said before it left counts
                if not message.done:
                    message.end(self._control.lost(message.op, *end))
        self._forget_ended()

    def _pass(self) -> bool:
        """Move what can be moved. True where a message ended.

        Among messages that could take each other's place the older goes first, also where the younger one's partner
        comes while we look.
        """
        full: set[int | None] = set()  # targets without a free letter
        waiting: set[tuple[int | None, int]] = set()  # (source, tag) that an older receive still waits for
        for message in list(self._pending):
            op = message.op
            if message.channel is not None:
                self._move_on(message)
            elif op.kind == "send" and op.peer not in full:
                self._write_letter(message)
                if message.channel is None and not message.done:
                    full.add(op.peer)
            elif op.kind == "recv":
                self._match(message, waiting)
                if message.channel is None and not message.done:
                    waiting.add((op.peer, op.tag))
        return self._forget_ended()

    def _move_on(self, message: Message) -> None:
        (self._take_pieces if message.op.kind == "recv" else self._give_pieces)(message)

    def _forget_ended(self) -> bool:
        """Take what has ended off the list; True where there was any. `submit` may append meanwhile."""
        ended = [message for message in self._pending if message.done]
        for message in ended:
            self._pending.remove(message)
        return bool(ended)

    def _give_pieces(self, message: Message) -> None:
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
                    f"{self._where(message.op)}: rank {peer} expects another dtype or size. Next: its error has both"
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

    def _write_letter(self, message: Message) -> None:
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
            letter = next((place for place in channel.open_letters() if channel.words[place + TAG] == op.tag), None)
            if letter is None:
                continue
            if not channel.streaming or channel.words[letter + NBYTES] <= INLINE_BYTES:  # the belt is free
                self._open_letter(message, source, channel, letter)
                return

    def _open_letter(self, message: Message, source: int, channel: Channel, letter: int) -> None:
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
                    f"{self._where(message.op)}: there is room for {message.nbytes} bytes, but rank {source} sent "
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

    def _take_pieces(self, message: Message) -> None:
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

    # ------------------------------------------------------------------ parts of the above

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

    def _end_of_peer(self, message: Message) -> tuple[int, str] | None:
        """The rank whose leaving makes `message` impossible, and how it left."""
        peer = message.op.peer if message.op.peer is not None else message.source
        peers = [rank for rank in range(self._control.world_size) if rank != self._rank] if peer is None else [peer]
        ends = [(rank, self._control.end_of(rank)) for rank in peers]
        left = [(rank, end) for rank, end in ends if end is not None]
        return left[0] if len(left) == len(peers) else None

    def _give_up(self, message: Message, seconds: float) -> None:
        with self._turn:
            if message.done:
                return
            error = self._timeout(message.op, seconds)
            message.end(error)
            self._forget_ended()
            if message.channel is not None or message.op.kind == "send":
                self._control.fail(error)  # the other side may be in the middle of it

    def _timeout(self, op: CommOp, seconds: float) -> CollectiveTimeout:
        who = "any rank" if op.peer is None else f"rank {op.peer}"
        did, do = ("nothing came from", "send") if op.kind == "recv" else ("it was not taken by", "receive")
        return CollectiveTimeout(
            f"{self._where(op)}: {did} {who} within {seconds:g} s. Next: find why {who} did not {do} with tag {op.tag}; "
            f"if it is only slow, raise timeout_s",
            () if op.peer is None else (op.peer,),
        )

    def _where(self, op: CommOp) -> str:
        return f"{describe(op)} on rank {self._rank} of {self._control.world_size} (shm)"


def _serve(ref: weakref.ref[Mail]) -> None:
    """The thread: it holds the mail only while something is pending."""
    mail = ref()
    signals = None if mail is None else mail._for_thread
    del mail
    while signals is not None and signals.get():
        mail = ref()
        if mail is None:
            return
        mail.serve()
        del mail
