"""One run of autograd: how it ends, what a reducer remembers of it, which other reducers see the same parameters."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch.autograd import Variable
from torch.nn import Parameter

from lockstep.errors import CommError, PeerFailed

_Run = TypeVar("_Run")


def when_autograd_ends(run: _Run, ended: Callable[[_Run], None], died: Callable[[_Run], None]) -> weakref.ref[Any]:
    """Have one of two methods called with `run` when autograd's outermost run is over. To be called inside of it.

    ended: at its end; the object stays alive till then. died: when an exception has ended it, but after `ended` too:
        autograd drops its end callback when a run dies, and only then without calling it.
    The result is dead when the run is over.
    """
    give_up = weakref.WeakMethod(died)

    def dropped(_: object) -> None:
        if (tell := give_up()) is not None:
            with torch.no_grad(), contextlib.suppress(CommError):  # what autograd raises says why
                tell(run)

    callback = functools.partial(ended, run)
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    return weakref.ref(callback, dropped)


def step_is_lost(rank: int, failed: Sequence[int], where: str) -> PeerFailed:
    """What rank `rank` raises where others have told that they `failed` in this forward or backward."""
    return PeerFailed(
        f"rank {rank}: rank {', '.join(map(str, failed))} raised in the middle of this {where} pass, see its own "
        "output for the reason. The step has no gradients on any rank (.grad is None). If the program goes on, all "
        "ranks must skip this step; the next one starts afresh."
    )


class BackwardPass:
    """One run of autograd's engine over the parameters of one reducer."""

    def __init__(self, sync: bool, num_params: int) -> None:
        self.sync = sync
        self.is_backward = False  # backward(), as far as one can tell, and not torch.autograd.grad
        self.hook_raised = False  # nothing more can be launched
        self.arrivals = [0] * num_params  # gradients per parameter; re-entrant checkpoints can bring several
        self.placed = bytearray(num_params)
        self.elsewhere: set[int] = set()  # placed here as zeros: another reducer averages these
        self.order: dict[int, None] = {}  # parameters as their last gradient arrived
        self.launched = 0  # buckets 0 .. launched-1 belong to the transport
        self.callback: weakref.ref[Any] = weakref.ref(type(self))

    def is_running(self) -> bool:
        """Whether autograd has still to come to this run's end, or to its death."""
        return self.callback() is not None

    def count_arrival(self, index: int) -> int:
        """A gradient of parameter `index` has arrived; how many have by now."""
        self.arrivals[index] += 1
        self.order.pop(index, None)
        self.order[index] = None
        return self.arrivals[index]


class Runs:
    """The run of autograd that goes on for one reducer, and those of the reducers that share parameters with it.

    Reducers share a parameter where a module is wrapped twice or is part of two wrapped ones.
    """

    _alive: ClassVar[weakref.WeakSet[Runs]] = weakref.WeakSet()

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.current: BackwardPass | None = None
        self._params = params
        self._others: dict[int, weakref.WeakKeyDictionary[Runs, int]] = {}
        mine = {id(param): i for i, param in enumerate(params)}
        for other in tuple(Runs._alive):
            for there, param in enumerate(other._params):
                here = mine.get(id(param))
                if here is not None:
                    self._others.setdefault(here, weakref.WeakKeyDictionary())[other] = there
                    other._others.setdefault(there, weakref.WeakKeyDictionary())[self] = here
        Runs._alive.add(self)

    def are_shared(self) -> bool:
        """Whether any parameter has another reducer, or had one."""
        return bool(self._others)

    def is_placed_elsewhere(self, index: int) -> bool:
        """Whether another reducer has this gradient in a bucket, in a backward that goes on right now."""
        if index not in self._others:
            return False
        passes = [(other.current, there) for other, there in self._others[index].items()]
        return any(run is not None and run.is_running() and run.placed[there] for run, there in passes)
