"""What the ranks of one group tell each other about an operation: who has come, what it is, where the bytes lie.

Every word has one writer, so nothing needs to be locked. A rank says `tick` when it has done its part of a phase; its
number of ticks is its place in the protocol, which is the same for all ranks:

    operation      announce, tick | wait for all ticks | ... more phases, each with a tick ...

Announcements lie in two rows, used in turn: a rank can be one operation ahead of another, never two, because every
operation waits for all ranks at least once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

from lockstep.comm.engine import Patience
from lockstep.comm.op import ONE_ORDER, CommOp, describe
from lockstep.comm.shm.announcement import SAME_SIZE, Announcement, code_of, words_for
from lockstep.comm.shm.attendance import GONE, LEFT, Attendance
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.waiting import ORDERED, Parking, fence, yield_core
from lockstep.errors import CollectiveMismatch, CollectiveTimeout

# Words of 8 bytes. A rank's first cache line is what the others look at while they wait for it.
_TICK, _ASLEEP, _ANNOUNCED = 0, 1, (2, 5)
_STATE, _SLOT, BELL, BELL_ASLEEP = 8, 9, 10, 11
_LINE = 16

_ROUNDS, _LOOKS = 150, 5  # of looking before sleeping, some 60 us: what it costs to sleep and be woken
_SLICE_S = 0.2  # sleepers look this often whether the one they wait for still lives


def control_bytes(world_size: int) -> int:
    """How much memory a group of this size needs for its words."""
    return 8 * (_LINE * world_size + 3 * world_size * world_size)


@final
class Control:
    """One rank's view of its group's words."""

    def __init__(
        self, segment: Segment, offset: int, members: Sequence[int], rank: int, peers: Peers, parking: Parking
    ) -> None:
        size = len(members)
        self.rank = rank
        self.world_size = size
        self.words = memoryview(segment.map)[offset : offset + control_bytes(size)].cast("Q")
        self.address = segment.base + offset
        self.patience = Patience()
        self.parking = parking
        states = [self.words[_LINE * peer + _STATE : _LINE * peer + _STATE + 1] for peer in range(size)]
        self.attendance = Attendance(states, rank, members, peers)
        self._others = tuple((_LINE * peer, peer) for peer in range(size) if peer != rank)
        self._mine = _LINE * rank
        self.own_slot = 0
        self._ticks = 0
        self._row = 0

    # ------------------------------------------------------------------ tables

    def put_slot(self, offset: int) -> None:
        """Say where this rank's staging memory lies. Before its first tick."""
        self.own_slot = offset
        self.words[self._mine + _SLOT] = offset

    def slots(self) -> list[int]:
        """Where every rank's staging memory lies. After a first wait."""
        return [self.words[_LINE * rank + _SLOT] for rank in range(self.world_size)]

    def put_sizes(self, sizes: Sequence[int]) -> None:
        """Publish this rank's row of sizes with the coming announcement."""
        start = self._sizes(1 - self._row, self.rank)
        for index, size in enumerate(sizes):
            self.words[start + index] = size

    def sizes(self, rank: int) -> list[int]:
        """What `rank` published with the current announcement."""
        start = self._sizes(self._row, rank)
        return list(self.words[start : start + self.world_size])

    def _sizes(self, row: int, rank: int) -> int:
        return _LINE * self.world_size + (row * self.world_size + rank) * self.world_size

    def channel_word(self, source: int, target: int) -> int:
        """Index of the word that says where the channel between two ranks lies."""
        return _LINE * self.world_size + (2 * self.world_size + source) * self.world_size + target

    # ------------------------------------------------------------------ phases

    def announce(self, op: CommOp, numel: int = 0, place: int = 0) -> None:
        """Begin an operation. Others may read it after this rank's next tick."""
        refusal = self.attendance.refusal(op)
        if refusal is not None:
            raise refusal
        row = self._row = 1 - self._row
        start = self._mine + _ANNOUNCED[row]
        words = self.words
        words[start] = code_of(op)
        words[start + 1] = numel
        words[start + 2] = place

    def meet(self, op: CommOp) -> None:
        """Tick: this rank has done its part of the phase. Return when every rank has ticked as often."""
        words = self.words
        if not ORDERED:
            fence()
        self._ticks = ticks = self._ticks + 1
        words[self._mine] = ticks
        fence()  # the sleepers' words are read after the tick can be seen, so none is missed
        asleep = self.rank + 1
        for start, _ in self._others:
            if words[start + _ASLEEP] == asleep:
                self.parking.wake(self.address + 8 * self._mine)  # all of them
                break
        for start, peer in self._others:
            if words[start] < ticks:
                self._wait_for(start, peer, op)
        if not ORDERED:
            fence()

    def announced(self, rank: int) -> Announcement:
        """What `rank` said. After the wait that follows the announcement."""
        start = _LINE * rank + _ANNOUNCED[self._row]
        return Announcement(*self.words[start : start + 3])

    def places(self) -> list[int]:
        """Of every rank's tensor 1 + its offset in the segment, or 0 where it lies elsewhere."""
        row = _ANNOUNCED[self._row] + 2
        return [self.words[_LINE * rank + row] for rank in range(self.world_size)]

    def check(self, op: CommOp) -> None:
        """Raises: CollectiveMismatch where another rank is in a different operation, on every rank alike."""
        words = self.words
        row = _ANNOUNCED[self._row]
        sized = op.kind in SAME_SIZE
        code, numel = words[row], words[row + 1]
        for start in range(_LINE + row, _LINE * self.world_size, _LINE):
            if words[start] != code or (sized and words[start + 1] != numel):
                self._raise_mismatch(op, start // _LINE)

    def _raise_mismatch(self, op: CommOp, other: int) -> None:
        lines = "".join(f"\n  rank {rank}: {words_for(self.announced(rank))}" for rank in (0, other))
        what = f"{describe(op)} on rank {self.rank}: ranks called different operations at the same point"
        raise CollectiveMismatch(f"{what}:{lines}\n{ONE_ORDER}")

    # ------------------------------------------------------------------ bells, for messages

    def ring(self, peer: int) -> None:
        """Let `peer` look at its messages again. Anybody may ring: all write the same 1, and only the owner a 0."""
        start = _LINE * peer
        self.words[start + BELL] = 1
        fence()
        if self.words[start + BELL_ASLEEP]:
            self.parking.wake(self.address + 8 * (start + BELL))

    def sleep_until_rung(self, look: Callable[[], bool], enough: Callable[[], bool], seconds: float) -> bool:
        """Call `look` after every ring until it returns True; False where `seconds` pass without."""
        words, mine = self.words, self._mine
        end = time.monotonic() + seconds
        words[mine + BELL_ASLEEP] = 1
        try:
            while True:
                words[mine + BELL] = 0
                fence()  # what was done before a ring that this 0 erased can be seen now
                if look() or enough():
                    return True
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self.parking.sleep(self.address + 8 * (mine + BELL), 0, left)
        finally:
            words[mine + BELL_ASLEEP] = 0

    # ------------------------------------------------------------------ sleeping

    def _wait_for(self, start: int, peer: int, op: CommOp) -> None:
        words, ticks = self.words, self._ticks
        if self.patience.spins:
            for _ in range(_ROUNDS):
                for _ in range(_LOOKS):
                    if words[start] >= ticks:
                        return
                yield_core()  # to the peer, where both share one; else it costs a quarter of a microsecond
        address = self.address + 8 * start
        words[self._mine + _ASLEEP] = peer + 1
        try:
            while True:
                fence()  # the tick is read after the others can see that this rank sleeps
                seen = words[start]
                if seen >= ticks:
                    return
                self.parking.sleep(address, seen, _SLICE_S)
                if words[start] < ticks:
                    self._look_around(op)
        finally:
            words[self._mine + _ASLEEP] = 0

    def _behind(self) -> Iterator[int]:
        for start, peer in self._others:
            if self.words[start] < self._ticks:
                yield peer

    def _look_around(self, op: CommOp) -> None:
        """Raises: PeerLost, or what `check_patience` does, where waiting on makes no sense."""
        gone = [(peer, self.attendance.end_of(peer)) for peer in self._behind()]
        still = set(self._behind())  # whoever ticked first and left afterwards has done its part
        for peer, end in sorted(gone, key=lambda pair: pair[1] != "ended"):  # the dead first: others follow from them
            if end is not None and peer in still:
                raise self.attendance.lost(op, peer, end)
        self.check_patience(op, sorted(still))

    def check_patience(self, op: CommOp, missing: Sequence[int]) -> None:
        """Raises: CommError where this rank closed or aborted meanwhile, CollectiveTimeout after the deadline."""
        where = self.attendance.where(op)
        self.patience.check_open(where)
        if missing and self.patience.is_over():
            late = f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
            raise CollectiveTimeout(
                f"{where}: {late} did not come within {self.patience.seconds:g} s. Next: look where {late} "
                f"{'is' if len(missing) == 1 else 'are'} (log, stack): skipped this call, or waits elsewhere. "
                f"If only slow, raise timeout_s",
                missing,
            )

    # ------------------------------------------------------------------ leaving

    def fail(self, error: BaseException, op: CommOp | None = None) -> None:
        """Tell the others that this rank has given up (in `op`), and whose fault it is where that is known."""
        if self.attendance.fail(error, op):
            self._wake_others()

    def leave(self) -> None:
        """This rank will not come any more, and touches nothing of the group's from here on."""
        self.attendance.say(LEFT)
        self._wake_others()
        self.attendance.say(GONE)

    def _wake_others(self) -> None:
        fence()
        self.parking.wake(self.address + 8 * self._mine)
        for _, peer in self._others:
            self.ring(peer)

    def wake_own_threads(self) -> None:
        """Let this rank's threads look around; the others look in vain, once."""
        self.ring(self.rank)
        for start, _ in self._others:
            self.parking.wake(self.address + 8 * start)
