"""The flight record: what a rank did last, in memory that others see, also after a SIGKILL.

One file per rank, of fixed size, in a file system that lies in memory:

    header    64 words of 8 bytes: who this is, how far it has come, when it was last alive
    status    what the rank's guard says of it, as JSON, behind a version word that is odd while it is written
    notice    what a rank of this machine has found to be wrong, once; that of the machine's first rank counts
    ring      the last operations, 256 bytes each; record n lies in slot n % RECORDS

Only the rank writes (but for the notice, behind a lock), one store per word, so a reader sees old or new and never
waits. No torch here: a launcher reads it too.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import NamedTuple, final

from lockstep.observe.native import in_c, read_in_c
from lockstep.observe.profile.step_clock import WAITS, StepClock

RECORDS = 2048
_CHANNELS = 4 * RECORDS  # whose messages are numbered
_TEXT_BYTES = (24, 96, 56, 27)  # of group, text, site, label; what is longer is cut

MAGIC = int.from_bytes(b"lkstpfl3", "little")
HEADER_BYTES = 8 * 64
STATUS_AT, NOTICE_AT, RING_AT = HEADER_BYTES, 56 << 10, 64 << 10
_STATUS_BYTES, NOTICE_BYTES = NOTICE_AT - STATUS_AT, RING_AT - NOTICE_AT
RECORD = struct.Struct("<qqqqqqBB206s")  # number, seq, step, entered, left, digest, is_message, spare, words
RECORD_BYTES = RECORD.size
FILE_BYTES = RING_AT + RECORDS * RECORD_BYTES
WORD = struct.Struct("<q")
_write_record, _write_word = RECORD.pack_into, WORD.pack_into  # of all ways to write, those that touch least memory
_LEFT_AT, _DIGEST_AT, _MESSAGE_AT = 32, 40, 48

# words of the header
IS, RANK, WORLD, PID, MACHINE, STEP, ALIVE_NS, COUNT, VERSION, LENGTH, NOTICE, TOLD_NS, NEWS, FACTS = range(14)
_COUNT_AT = 8 * COUNT


class Record(NamedTuple):
    """One operation of one rank."""

    number: int  # among all operations of this rank
    seq: int  # among the collectives of its group, or the messages of its group, kind, peer and tag
    step: int  # in which it was started; 0 where that was in a thread of its own, which knows no steps
    entered_ns: int  # by time.monotonic_ns, which is one clock for all processes of a machine
    left_ns: int  # when its result could be read; 0 while it is under way
    digest: int  # of all collectives of its group up to this one, and of the steps they were in; of a message `let_go`
    is_message: bool  # between two ranks; else it is a collective, and `seq` matches it with the other ranks'
    group: str
    text: str  # "all_reduce float32 [262144] sum": equal on all ranks, or the collective makes no sense
    site: str  # "train.py:88 train_step": where in the user's code
    label: str  # what it is for, in the caller's words


class Mark(NamedTuple):
    """The digest of all collectives of a group up to number `seq`: equal on all ranks, or they differ before it."""

    seq: int
    step: int  # in which number `seq` was started
    digest: int


mark_of = partial(tuple.__new__, Mark)  # as Mark._make, without a call of Python


class Words(NamedTuple):
    """What a record says of its operation, ready to be stored. Worth keeping: operations repeat."""

    stored: bytes
    group: str
    code: int  # of the text


def pack_words(group: str, text: str, site: str, label: str = "") -> Words:
    """What `FlightRecorder.enter` takes."""
    parts = (group, text, site, label)
    stored = b"\0".join(_cut(part, limit) for part, limit in zip(parts, _TEXT_BYTES, strict=True))
    return Words(stored, group, zlib.crc32(text.encode()))


def _cut(text: str, limit: int) -> bytes:
    raw = text.replace("\0", " ").encode(errors="backslashreplace")  # names of files are any bytes
    return raw if len(raw) <= limit else raw[: limit - 2] + b".."


class _Caller(threading.local):
    """Whether the steps of the rank are those of the thread that calls: not of one that the program has started."""

    def __init__(self, owner: int) -> None:
        mine = get_ident()
        started = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        self.has_steps = mine == owner or mine not in started  # autograd runs hooks in threads that Python did not make


@final
class MessageNumbers(OrderedDict[object, Iterator[int]]):
    """By kind, peer and tag, what the next message is numbered. Of thousands, those met first are forgotten."""

    def __missing__(self, key: object) -> Iterator[int]:
        if len(self) >= _CHANNELS:
            self.popitem(last=False)
        return self.setdefault(key, itertools.count())  # another thread may have come first


@final
@read_in_c
class FlightRecorder:
    """Writes one rank's record. `enter` and `leave` cost about a microsecond together and never raise."""

    __slots__ = (
        *("_digests", "_memory", "_numbers", "_owner", "clock", "left", "started", "step"),
        *("__dict__", "__weakref__"),
    )

    def __init__(self, path: str | os.PathLike[str], rank: int, world_size: int) -> None:
        """Make the file `path`, which must not exist."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES) if hasattr(os, "posix_fallocate") else os.truncate(fd, FILE_BYTES)
            self._memory = mmap.mmap(fd, FILE_BYTES)
        finally:
            os.close(fd)
        self.path = Path(path)
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.started = 0  # operations so far
        self.left: list[Callable[[], object]] = []  # to be done by `take_up`
        self._taking, self._is_taking = threading.RLock(), False
        self.clock = StepClock()  # where the time of the thread that makes this goes
        self._words = memoryview(self._memory)[:HEADER_BYTES].cast("q")
        self._numbers = itertools.count()
        self._digests: dict[str, list[int]] = {}  # group -> [of its collectives so far]
        self._owner = get_ident()
        self._thread = _Caller(self._owner)
        self._words[RANK], self._words[WORLD], self._words[PID] = rank, world_size, os.getpid()
        self._words[ALIVE_NS] = monotonic_ns()
        self.set_machine(rank)
        self._words[IS] = MAGIC

    @in_c
    def enter(self, seq: int, words: Words, is_message: bool = False, now_ns: int = 0) -> int:
        """An operation begins; its number. The step counts in the digest: else one that was skipped is invisible.

        now_ns: by time.monotonic_ns, where who calls knows it.
        """
        if self.left:
            self.take_up()
        number, memory = next(self._numbers), self._memory
        step = self.step if get_ident() == self._owner or self._thread.has_steps else 0
        stored, group, code = words
        if is_message:
            digest = 0
        else:
            # of integers, so it is the same in every process
            chain = self._digests.setdefault(group, [0])
            digest = chain[0] = hash((chain[0], code, step))
        at = RING_AT + number % RECORDS * RECORD_BYTES
        _write_record(memory, at, number, seq, step, now_ns or monotonic_ns(), 0, digest, is_message, 0, stored)
        if number >= self.started:  # another thread may be ahead
            self.started = number + 1
            _write_word(memory, _COUNT_AT, number + 1)
        return number

    def its_step(self) -> int:
        """In which step the thread that calls is, as `enter` has it."""
        return self.step if get_ident() == self._owner or self._thread.has_steps else 0

    def enter_all(self, seqs: Iterator[int], words: Words, count: int, step: int, now_ns: int = 0) -> Sequence[int]:
        """So many collectives alike, at least one, have begun in `step`, with the next of `seqs`; their numbers.

        Unlike `enter` it takes nothing up. now_ns: as there.
        """
        numbers, memory, now_ns = [*islice(self._numbers, count)], self._memory, now_ns or monotonic_ns()
        newest = numbers[-1]
        stored, group, code = words
        chain = self._digests.setdefault(group, [0])
        digest = chain[0]
        for number, seq in zip(numbers, seqs, strict=False):
            digest = hash((digest, code, step))
            at = RING_AT + number % RECORDS * RECORD_BYTES
            _write_record(memory, at, number, seq, step, now_ns, 0, digest, False, 0, stored)
        chain[0] = digest
        if newest >= self.started:  # another thread may be ahead
            self.started = newest + 1
            _write_word(memory, _COUNT_AT, newest + 1)
        return numbers

    def leave(self, number: int) -> None:
        """Operation `number` has ended."""
        if number >= self.started - RECORDS:
            at = RING_AT + number % RECORDS * RECORD_BYTES + _LEFT_AT
            _write_word(self._memory, at, monotonic_ns())

    def let_go(self, number: int) -> None:
        """Nobody has waited for operation `number`, and nobody can any more: a message has the digest 1 then, not 0."""
        self.leave(number)
        at = RING_AT + number % RECORDS * RECORD_BYTES
        if number >= self.started - RECORDS and self._memory[at + _MESSAGE_AT]:
            _write_word(self._memory, at + _DIGEST_AT, 1)

    def leave_all(self, numbers: Sequence[int]) -> None:
        """These operations have ended."""
        now_ns, memory, oldest = monotonic_ns(), self._memory, self.started - RECORDS
        for number in numbers:
            if number >= oldest:
                _write_word(memory, RING_AT + number % RECORDS * RECORD_BYTES + _LEFT_AT, now_ns)

    @in_c
    def stood(self, number: int, since_ns: int, ended_ns: int = 0) -> None:
        """Operation `number` has ended; the thread that calls has stood still for it. ended_ns: if that is known."""
        now_ns = monotonic_ns()
        if number >= self.started - RECORDS:
            at = RING_AT + number % RECORDS * RECORD_BYTES + _LEFT_AT
            _write_word(self._memory, at, ended_ns or now_ns)
        clock = self.clock  # as `leave` and `StepClock.waited`, of which each would cost more than it does
        if not clock.is_brief and clock.close_reader is not None and get_ident() == self._owner:
            clock.waits.append((number, since_ns, now_ns))
            if len(clock.waits) >= WAITS:
                clock.sum_up(now_ns)

    def count_this_thread(self) -> None:
        """What the calling thread enters belongs to the rank's steps, though the program has started the thread."""
        self._thread.has_steps = True

    def set_machine(self, first: int) -> None:
        """This rank is on the machine of which rank `first` is the first: those that share its memory."""
        self.machine = self._words[MACHINE] = first

    def set_step(self, step: int) -> None:
        """Operations from now on belong to `step`."""
        self.step = self._words[STEP] = step

    def take_up(self) -> None:
        """Do what was appended to `left`: what belongs into the record before all that is entered from now on.

        So the rank's own thread, in whose way each microsecond counts, leaves what can wait to whoever comes first: the
        guard's thread, or the next that enters. What is done there enters by `enter_all` alone.
        """
        if os.getpid() != self._words[PID]:  # of a process that was forked off
            self.left.clear()
            return
        with self._taking:
            while self.left and not self._is_taking:  # else a signal handler or a finalizer came within
                self._is_taking = True
                try:
                    self.left[0]()
                finally:
                    self._is_taking = False
                    del self.left[0]  # not before: who comes meanwhile waits until it is done

    def tell(self, status: bytes, *, is_news: bool = False, has_facts: bool = False) -> None:
        """Replace the status, and say that this rank is alive. One thread only.

        is_news: the others are to look at it soon. has_facts: or when they have the time: there are other facts in it.
        """
        status = status[:_STATUS_BYTES]
        words = self._words
        words[VERSION] += 1
        self._memory[STATUS_AT : STATUS_AT + len(status)] = status
        words[LENGTH] = len(status)
        words[VERSION] += 1
        words[NEWS] += is_news
        words[FACTS] += has_facts
        words[TOLD_NS] = monotonic_ns()
        self.live()

    def live(self) -> None:
        """Say that this rank is alive."""
        self._words[ALIVE_NS] = monotonic_ns()

    def close(self) -> None:
        """Give back the memory; the file stays for whoever has it open. What is recorded from now on goes nowhere."""
        self._memory = mmap.mmap(-1, FILE_BYTES)  # the old one goes with whoever writes to it at this moment
        self._words = memoryview(self._memory)[:HEADER_BYTES].cast("q")
