"""Proof that every sample of an epoch was used exactly once: 24 bytes per epoch, whoever used which sample when.

The digest of a set of samples is how many there are (8 bytes) and the sum, modulo 2**128, of a 128-bit hash of each (16
bytes). A sum does not depend on order, so ranks, steps and restarts add up in any order; a sample that is used twice is
added twice, where an exclusive-or would have hidden it. The epoch is not hashed: all complete epochs of a dataset have
one and the same digest, which anybody can compute from the dataset's length.

Each rank adds the samples that it trained on itself, so that a fault in the dealing shows. What the ranks added since
they last met is put together by `combine`, one small collective, at every checkpoint and at the end. A state holds the
combined sums, equal on all ranks, so any number of ranks goes on from there; what was added after the state was taken
is lost in a crash together with the work that it counted.

Source: Clarke, Devadas, van Dijk, Gassend and Suh 2003, "Incremental Multiset Hash Functions" (additive hashes);
Steele, Lea and Flood 2014 (splitmix64). It finds faults, not forgeries: the hash has no secret.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_names import communicator_over
from lockstep.errors import DataError
from lockstep.observe.profile.notes import note, takes_notes
from lockstep.observe.tally import CHUNK, Ids, Tally, bins_of, coverage_fields, tally_from, tally_of, whole_tally

MAX_EPOCHS = 1 << 20  # of one state: a damaged one cannot ask for all memory


class Verdict(NamedTuple):
    """What the digest of an epoch proves."""

    epoch: int
    is_exact: bool  # every sample once, apart from the repeats and omissions that the tail policy says
    words: str

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.words}"


class Tail(NamedTuple):
    """Samples that the tail policy uses a second time, and those that it leaves out."""

    repeated: Tally = Tally()
    dropped: Tally = Tally()


@final
class Coverage:
    """Which samples were used, epoch by epoch, as digests.

    length: samples in an epoch; world_size: ranks that add to it, each in an object of its own.

    In a training loop: `add` after every step, `combine(comm)` before every `state_dict()`. One rank alone need not
    combine.
    """

    def __init__(self, length: int, world_size: int = 1) -> None:
        self.length = length
        self.world_size = world_size
        self._met: dict[int, Tally] = {}  # of all ranks, as of the last meeting
        self._own: dict[int, Tally] = {}  # of this rank, since then
        self._unhashed, self._unhashed_epoch = array("q"), 0  # the last of its own: many small lists at once
        self._given: dict[int, Tally] = {}  # this rank's part of what met, since the state was loaded
        self._tails: dict[int, Tail] = {}
        self._bins: dict[int, npt.NDArray[np.int64]] = {}  # of its own: how many in each part of the epoch
        self._told: tuple[int, Tally] | None = None  # what was written down last
        self._unknown_through = -1  # epochs whose beginning was not counted: a state without sums was loaded

    def add(self, ids: Ids, epoch: int = 0) -> None:
        """This rank has trained on `ids`."""
        if epoch != self._unhashed_epoch or len(self._unhashed) >= CHUNK:
            self._hash()
            self._unhashed_epoch = epoch
        if isinstance(ids, list):
            self._unhashed.fromlist(ids)
        else:
            self._unhashed.frombytes(np.asarray(ids, dtype=np.int64).tobytes())

    def _hash(self) -> None:
        if self._unhashed:
            ids, epoch = np.frombuffer(self._unhashed, dtype=np.int64), self._unhashed_epoch
            self._own[epoch] = self._own.get(epoch, Tally()) + tally_of(ids)
            self._bins[epoch] = self._bins.get(epoch, 0) + bins_of(ids, self.length)
            self._unhashed = array("q")

    def restart(self, epoch: int, start: int = 0) -> None:
        """A pass over `epoch` begins, after `start` samples; what an earlier pass from there has added is forgotten.

        start: other than 0 only where a state was loaded that has used up so many.
        """
        self._hash()
        self._tails.pop(epoch, None)
        self._bins.pop(epoch, None)
        if start:
            self._own[epoch] = Tally() - self._given.get(epoch, Tally())
        else:
            for sums in (self._met, self._own, self._given):
                sums.pop(epoch, None)

    def end(self, epoch: int, repeated: Ids = (), dropped: Ids = ()) -> None:
        """The tail of `epoch`, over all ranks: samples used once more to fill a round, and samples left out."""
        self._tails[epoch] = Tail(tally_of(repeated), tally_of(dropped))

    def combine(self, comm: Communicator | None = None) -> None:
        """Put together what every rank has added since the last meeting; the record of the run has it then.

        comm: the ranks; None is those of torch's default group.
        Collective: every rank; blocks.
        """
        self._hash()
        if self.world_size > 1:
            self._meet(communicator_over() if comm is None else comm)
        self._note()

    def _meet(self, comm: Communicator) -> None:
        own = [[epoch, tally.count, f"{tally.total:x}"] for epoch, tally in self._own.items()]
        for rank, part in enumerate(comm.all_gather_object(own, label="coverage")):
            for epoch, count, total in part:
                added = Tally(count, int(total, 16))
                self._met[epoch] = self._met.get(epoch, Tally()) + added
                if rank == comm.rank:
                    self._given[epoch] = self._given.get(epoch, Tally()) + added
        self._own.clear()

    def _note(self) -> None:
        """Write down what is known of the epochs of which samples were used since the last time."""
        newest = max(self._bins, default=0)
        for epoch, bins in self._bins.items() if takes_notes() else ():
            own = self._given.get(epoch, Tally()) + self._own.get(epoch, Tally())
            used, tail = self.tally(epoch), self._tails.get(epoch, Tail())
            total: dict[str, Any] = {"samples": used.count, "digest": used.digest().hex()}
            right = self.length + tail.repeated.count - tail.dropped.count
            if used.count < right:
                total["verdict"] = f"{used.count} of {right} samples so far"
            else:
                verdict = self.verdict(epoch)
                total |= {"verdict": "exact" if verdict.is_exact else verdict.words, "words": verdict.words}
            if self._told == (epoch, used):
                continue
            self._told = epoch, used
            later = partial(coverage_fields, self.length, own, bins)
            note("coverage", later, epoch=epoch, total=total, repeated=tail.repeated.count, dropped=tail.dropped.count)
        self._bins = {epoch: bins for epoch, bins in self._bins.items() if epoch == newest}

    @property
    def is_combined(self) -> bool:
        """True where the sums are those of all ranks."""
        self._hash()
        return self.world_size == 1 or all(tally == Tally() for tally in self._own.values())

    @property
    def epochs(self) -> list[int]:
        """The epochs of which samples were used."""
        self._hash()
        return sorted(epoch for epoch in {*self._met, *self._own} if self.tally(epoch) != Tally())

    def tally(self, epoch: int = 0) -> Tally:
        """What is known on this rank: what all ranks had at the last meeting, and its own since."""
        self._hash()
        return self._met.get(epoch, Tally()) + self._own.get(epoch, Tally())

    def digest(self, epoch: int = 0) -> bytes:
        """The 24 bytes of `epoch`."""
        return self.tally(epoch).digest()

    def expected(self, epoch: int = 0) -> Tally:
        """What `epoch` has once it is complete. Every sample is hashed, once per length."""
        tail = self._tails.get(epoch, Tail())
        return whole_tally(self.length) + tail.repeated - tail.dropped

    def verdict(self, epoch: int = 0, expected: Tally | None = None) -> Verdict:
        """Whether every sample of `epoch` was used exactly once, in words.

        expected: None is a complete epoch.
        """
        if epoch <= self._unknown_through:
            return Verdict(epoch, False, "not known: a state was saved before the ranks had combined their coverage")
        if not self.is_combined:
            return Verdict(epoch, False, "not known yet: call combine(comm) on every rank")
        used, right = self.tally(epoch), self.expected(epoch) if expected is None else expected
        what = f"{used.count} samples were used where {right.count} should be"
        if used == right:
            words = f"each of {right.count} samples exactly once" if expected else self._complete_in_words(epoch)
        elif used.count < right.count:
            words = f"{what}: {right.count - used.count} or more are missing"
        elif used.count > right.count:
            words = f"{what}: {used.count - right.count} or more came twice"
        else:
            words = f"{used.count} samples were used, the right number, but not the right ones"
        return Verdict(epoch, used == right, words)

    def _complete_in_words(self, epoch: int) -> str:
        tail, words = self._tails.get(epoch, Tail()), f"each of {self.length} samples exactly once"
        if tail.repeated.count:
            words += f", {tail.repeated.count} once more to fill the last round"
        if tail.dropped.count:
            words += f", except {tail.dropped.count} left out at the end"
        return words

    def verdicts(self) -> list[Verdict]:
        """One for each epoch begun, the last of which may still be going on."""
        return [self.verdict(epoch) for epoch in self.epochs]

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """JSON values, equal on all ranks: call `combine` first.

        Where that was not done, the state says so, and a run that goes on from it cannot judge the epochs so far.
        epoch: the one that the run is in.
        """
        if not self.is_combined:
            return {"length": self.length, "epochs": [], "unknown_through": max(epoch, self._unknown_through)}
        rows: list[list[Any]] = []
        for begun in self.epochs:
            tail = self._tails.get(begun, Tail())
            marks = [self.digest(begun).hex(), *(part.digest().hex() if part.count else "" for part in tail)]
            if rows and rows[-1][1] == begun - 1 and rows[-1][2:] == marks:
                rows[-1][1] = begun
            else:
                rows.append([begun, begun, *marks])
        return {"length": self.length, "epochs": rows, "unknown_through": self._unknown_through}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, also with another number of ranks. Every rank loads the same one.

        Raises: DataError where it is of another length or damaged.
        """
        if not isinstance(state, dict):
            raise DataError(f"this is no state of a coverage but a {type(state).__name__}")
        if state.get("length") != self.length:
            raise DataError(f"the coverage is of {state.get('length')!r} samples, here there are {self.length}")
        met, tails = {}, {}
        try:
            for first, last, *digests in state["epochs"]:
                used, repeated, dropped = (tally_from(bytes.fromhex(d)) if d else Tally() for d in digests)
                if not 0 <= last - first < MAX_EPOCHS - len(met):
                    raise DataError(f"epochs {first} to {last}")
                met.update(dict.fromkeys(range(first, last + 1), used))
                if repeated.count or dropped.count:
                    tails.update(dict.fromkeys(range(first, last + 1), Tail(repeated, dropped)))
            unknown_through = int(state["unknown_through"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the coverage in the state is damaged: {error}") from error
        self._met, self._tails, self._unknown_through = met, tails, unknown_through
        self._own, self._given, self._bins, self._unhashed = {}, {}, {}, array("q")
