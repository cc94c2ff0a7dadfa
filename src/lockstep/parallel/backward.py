"""What a reducer remembers of one run of autograd, and of the other reducers that see the same parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

from torch.nn import Parameter


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
        """Autograd drops its end callback when a run dies of an exception, and only then without calling it."""
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
