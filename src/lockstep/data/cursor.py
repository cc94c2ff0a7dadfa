"""Which epoch a pass over a dataset is, and where in it: the sampler's rules of counting, without its samples."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from lockstep.errors import DataError

STATE_VERSION = 1
State = Mapping[str, Any]  # JSON values, by name


@final
@dataclass
class Pass:
    """One walk of one rank over the rest of an epoch."""

    epoch: int
    start: int  # positions of the global order used up before it
    positions: range  # what this rank gets
    world_size: int
    length: int  # samples of a whole epoch
    seeks: int  # of the cursor when it was made
    handed_out: int = 0  # samples in the chunks so far
    chunk: Iterator[int] = field(default_factory=lambda: iter(()))  # the chunk in use
    ended: bool = False
    used: int | None = None  # of those drawn, where a loader that draws ahead counts them
    fewest: int = field(init=False)  # samples that any rank uses

    def __post_init__(self) -> None:
        self.fewest = (self.positions.stop - self.start) // self.world_size

    def taken(self) -> int:
        """Samples this rank has drawn."""
        return self.handed_out - operator.length_hint(self.chunk)

    def done(self) -> int:
        """Samples that this rank has used, as far as is known here."""
        return self.taken() if self.used is None else self.used

    def is_complete(self) -> bool:
        """True once this rank has used all of its samples."""
        return self.done() == len(self.positions)

    def is_over(self) -> bool:
        """True where a pass made now is not this one again; the same on ranks that are equally far.

        A rank that has used its last sample does not know whether another one has one more to use.
        """
        return self.done() >= self.fewest

    def position(self, taken: int) -> int:
        """Positions of the epoch used up once every rank has drawn `taken`; all of them, with the tail, at the end."""
        rounds = len(range(self.start, self.positions.stop, self.world_size))  # of rank 0, which never has fewer
        if taken >= rounds or (self.ended and taken == len(self.positions)):
            return self.length
        return self.start + taken * self.world_size


@final
class EpochCursor:
    """Counts passes: from their first sample on, not from their `iter()`, which DataLoader may call and drop."""

    def __init__(self) -> None:
        self.epoch = 0
        self.start = 0  # belongs to `epoch`: kept until that epoch is complete or another one is sought
        self.current: Pass | None = None  # the pass begun last, since the last seek
        self.seeks = 0
        self._is_set = False  # the user names the epochs

    def seek(self, epoch: int) -> None:
        """Make the next pass `epoch`."""
        if epoch != self.epoch or (self.current is not None and self.current.is_over()):
            self.start = 0
        self.epoch, self.current, self._is_set = epoch, None, True
        self.seeks += 1

    def restore(self, epoch: int, start: int) -> None:
        """Make the next pass the rest of `epoch` from `start` on; where nothing is left of it, the next epoch."""
        self.epoch, self.start, self.current, self._is_set = epoch, start, None, False
        self.seeks += 1

    def next(self, length: int) -> tuple[int, int]:
        """Epoch and start of a pass made now."""
        if self.current is None:
            is_over = self.start >= length and not self._is_set
        else:
            is_over = self.current.is_over() or not self._is_set
        return (self.epoch + 1, 0) if is_over else (self.epoch, self.start)

    def begin(self, new: Pass) -> Pass | None:
        """Count `new`, which draws its first sample. Returns the pass that was left early for it, if one was."""
        if new.seeks != self.seeks:
            return None  # made before a seek and begun after it: it runs, as in torch, but is not the one that counts
        last = self.current
        self.epoch, self.start, self.current = new.epoch, new.start, new
        return last if last is not None and last.epoch != new.epoch and not last.is_complete() else None


def check_state(
    what: str, state: State, expected: State, counts: tuple[str, ...] = (), parts: tuple[str, ...] = ()
) -> None:
    """Refuse a state that was not taken from this data: `expected` must be equal, `counts` must be numbers >= 0.

    parts: what else must be there, for others to check.

    Raises: DataError naming both values.
    """
    if not isinstance(state, Mapping):
        raise DataError(f"this is no {what} state but a {type(state).__name__}")
    expected = {"version": STATE_VERSION, **expected}
    missing = [name for name in (*expected, *counts, *parts) if name not in state]
    if missing:
        raise DataError(
            f"this is no {what} state: {', '.join(missing)} missing, it has {', '.join(state) or 'nothing'}"
        )
    for name, value in expected.items():
        if state[name] != value:
            raise DataError(
                f"the {what} state was taken with {name}={state[name]!r}, here it is {value!r}: the samples would come "
                "in another order. Resume with the data and settings of the first run, or start without the state"
            )
    for name in counts:
        if type(state[name]) is not int or state[name] < 0:
            raise DataError(f"the {what} state is damaged: {name}={state[name]!r} is no count")
