"""Which ranks of a group are still here, and how the others left."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from lockstep.comm.op import CommOp, describe
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.waiting import fence
from lockstep.comm.transport import without_traceback
from lockstep.errors import CommError, PeerLost

# bits of a rank's word; above them 1 + the rank whose fault a failure was
_FAILED = 1
LEFT = 2  # will not come any more
GONE = 4  # never touches the group's memory again, but to look at these words
SWEPT = 8  # never looks at these words again
_FAULT_SHIFT = 4


@final
class Attendance:
    """One rank's view of `words`: one for each rank of the group, written by that rank alone."""

    def __init__(self, words: Sequence[memoryview], rank: int, members: Sequence[int], peers: Peers) -> None:
        self._words = words
        self._rank = rank
        self._members = tuple(members)  # rank in this group -> rank in the segment
        self._peers = peers
        self._failure: CommError | None = None
        self._pinned: list[CommOp] = []
        self._writing = threading.RLock()  # an abort comes from any thread
        self._is_gone = False

    # ------------------------------------------------------------------ the others

    def end_of(self, peer: int) -> str | None:
        """How `peer` left: "ended", "failed" or "closed"; None while it is here."""
        if self._peers.has_ended(self._members[peer]):
            return "ended"
        state = self._words[peer][0]
        return "failed" if state & _FAILED else "closed" if state else None

    def lost(self, op: CommOp, peer: int, end: str) -> PeerLost:
        """The error for an operation that needs a rank which has left."""
        culprit = peer
        if end == "failed":
            culprit = (self._words[peer][0] >> _FAULT_SHIFT) - 1
            culprit = peer if culprit in (-1, self._rank) else culprit
        what = {
            "ended": f"the process of rank {peer} (pid {self._peers.pids[self._members[peer]]}) has ended",
            "closed": f"rank {peer} has closed this communicator",
            "failed": f"rank {peer} gave up"
            + (f" because of rank {culprit}" if culprit != peer else ": it waited too long, was interrupted or closed"),
        }[end]
        return PeerLost(
            f"{self.where(op)}: {what}. "
            f"Next: read that rank's own error or exit code (signal 9 is often the out-of-memory killer)",
            culprit,
        )

    def have_all(self, bit: int) -> bool:
        """Whether every rank is GONE, or has SWEPT, or has no process any more."""
        return all(
            word[0] & bit or self._peers.has_ended(member)
            for word, member in zip(self._words, self._members, strict=True)
        )

    # ------------------------------------------------------------------ this rank

    def where(self, op: CommOp) -> str:
        """The operation and its rank, for a message."""
        return f"{describe(op)} on rank {self._rank} of {len(self._members)} (shm)"

    def fail(self, error: BaseException, op: CommOp | None) -> bool:
        """Nothing can be agreed on any more. True the first time: then the others must be woken.

        `op`: what failed, where something is under way. Its tensors are kept until all have left: a slow rank may still
        write into them.
        """
        if op is not None:
            self._pinned.append(op)
        if self._failure is not None:
            return False
        culprit = error.rank if isinstance(error, PeerLost) else None
        is_ours = isinstance(error, CommError)
        self._failure = without_traceback(error) if is_ours else CommError(f"interrupted: {error!r}")
        self.say(_FAILED | (0 if culprit is None else culprit + 1) << _FAULT_SHIFT)
        return True

    def refusal(self, op: CommOp) -> CommError | None:
        """Why nothing can be begun any more; None while all is well."""
        if self._failure is None:
            return None
        error = CommError(
            f"{self.where(op)}: an earlier operation failed on this rank. "
            f"Next: the cause is in the first error; end this run, or make a new communicator"
        )
        error.__cause__ = self._failure
        return error

    def say(self, bits: int) -> None:
        """This rank has LEFT, is GONE, or has SWEPT. After GONE the group's memory may be another's."""
        with self._writing:
            if not self._is_gone or bits == SWEPT:
                self._is_gone = bits == GONE
                fence()
                self._words[self._rank][0] |= bits
