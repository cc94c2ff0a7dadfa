"""Every batch that a DataLoader hands out in this process, seen in one place: its time, its size, its pass.

Whoever wants to know of them attaches `BATCHES`. One replacement of the iterators' `__next__` is for all, as in
`torch_backward`. No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

from lockstep.observe.patches import SharedPatches
from lockstep.observe.profile.phases import DATA, OTHER
from lockstep.observe.profile.step_clock import StepClock

PASS = "_lockstep_pass"  # of an iterator: what the one pass over its loader is kept as, see `torch_data`


class Timed(Protocol):
    """Whose time it is: see `StepClock`."""

    clock: StepClock
    owner: int  # 0 once that is over


@final
class Batches(SharedPatches):
    """Those of one process. Nothing is done unless somebody has attached it."""

    def _end(self) -> None:
        self.phases: Timed | None = None

    def _begin(self) -> None:
        self._patches.replace_in("torch.utils.data.dataloader", "_BaseDataLoaderIter", "__next__", self._seeing)
        # ours asks no iterator of torch's, where it has no workers
        self._patches.replace_in("lockstep.data.dataloader", "BatchIterator", "__next__", self._seeing)

    def _seeing(self, old: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def next_batch(iterator: Any) -> Any:
            phases = self.phases
            clock = phases.clock if phases is not None and phases.owner else None
            before = -1 if clock is None else clock.switch(DATA)
            passed = getattr(iterator, PASS, None) if self._users else None
            try:
                batch = old(iterator)
            except StopIteration:
                if passed is not None:
                    passed.ended()
                raise
            finally:
                if clock is not None:
                    clock.switch(clock.rest if before == OTHER else before)  # also of a second microbatch
            if clock is not None and before not in (-1, DATA):  # else another one counts it, which has asked this one
                first = batch[0] if type(batch) is list and batch else batch
                shape: Any = getattr(first, "shape", ())
                clock.samples += int(shape[0]) if len(shape) else samples_in(batch)
            if passed is not None:
                passed.batches += 1
                if passed.batches >= passed.asks_at:
                    passed.reached(iterator, batch)
            return batch

        return next_batch


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch, as loaders nest them; 0 where there is none."""
    while not hasattr(batch, "shape"):
        if isinstance(batch, dict):
            batch = list(batch.values())
        if not isinstance(batch, list | tuple) or not batch:
            return 0
        batch = batch[0]
    return int(batch.shape[0]) if len(batch.shape) else 1


BATCHES = Batches()
