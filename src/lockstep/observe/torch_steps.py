"""When a step of a program ends: which of its optimizers counts, so that all ranks count alike."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.native import read_in_c
from lockstep.observe.pace import PACE
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_optimizers import params_of

if TYPE_CHECKING:
    from lockstep.observe.guard import Guard
    from lockstep.observe.step_ends import Started
    from lockstep.observe.torch_groups import TorchGroups

_TAKES_OVER = 2  # steps of another optimizer without one of the leading one between them
_TAKES_OVER_UNSEEN = 4  # the same, where the leader's parameters are shared and the other's are not known to be

_averaged: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # parameters, by id


def mark_averaged(params: Iterable[Any]) -> None:
    """The ranks average the gradients of `params`, by calls of ours that no guard sees."""
    _averaged.update((id(param), param) for param in params)


def is_averaged(optimizer: Any) -> bool:
    """Whether `mark_averaged` was told of parameters of `optimizer`."""
    return bool(_averaged) and any(_averaged.get(id(param)) is param for param in params_of(optimizer))


@final
class StepCounter:
    """Follows one optimizer: the first to step whose parameters the ranks share.

    So several optimizers, and a model that one rank trains for itself, do not count twice. `is_shared` tells whether an
    optimizer's parameters belong to DistributedDataParallel or to a sharded model. Where none do, the ranks may still
    average gradients by calls of their own: then an optimizer leads from its first step on if there was an operation
    since its backward began, or from its second if there was one between the two. One that stands still while another
    goes on among the ranks hands over, and the steps of the other that were waited for are counted then. Whether it is
    still there is not asked: a rank lets go of an optimizer when its collector comes, and all have to count alike.
    """

    def __init__(self, is_shared: Callable[[Any], bool], *, is_alone: bool = False) -> None:
        """is_alone: there is no other rank."""
        self._is_shared, self._is_alone = is_shared, is_alone
        self._shared: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.leads_alone = False  # no other has stepped since the leader has
        self.leader: weakref.ref[Any] = weakref.ref(self)
        self._needed = 1, 1  # steps, before another leads: one whose parameters are shared, or are not known to be
        self._trained: Callable[[], Any] = lambda: None  # the leader's first parameter
        self._led = -1  # operations, at the leader's last step; -1 before there was one
        # by optimizer, those of the leader's own parameters by `self`: steps, and operations at the last
        self._others: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def stepped(self, optimizer: Any, operations: int, led: int = -1, begun: int | None = None) -> int:
        """How many steps to count now that `optimizer` has stepped.

        A leader that `leads_alone` counts one, and nobody has to ask. operations: started so far by this rank.
        led: at the end of the last step, where the leader may have counted that without asking. begun: when the last
        backward began, where the ranks share no parameters that anybody knows of; else None.
        """
        if self._led >= 0:
            self._led = max(self._led, led)
        if self.leader() is optimizer:
            return self._follow(1, operations)
        self.leads_alone = False
        if optimizer not in self._shared:
            self._shared[optimizer] = self._is_shared(optimizer)
        is_shared, trained = self._shared[optimizer], self._trained()
        is_made_anew = trained is not None and any(param is trained for param in params_of(optimizer))
        key = self if is_made_anew else optimizer
        steps, since = self._others.get(key, (0, self._led if is_shared else begun))
        is_among = since is not None and operations > since
        if is_shared:
            # a rank may go on with its copy of the model for itself; what our own class does is not seen here
            is_among |= self._is_alone or is_averaged(optimizer)
            steps += is_among
        else:
            steps = steps + 1 if is_among else 1
        self._others[key] = steps, operations
        if not is_among or steps < self._needed[not is_shared]:
            return 0
        self.leader, params = weakref.ref(optimizer), params_of(optimizer)
        self._trained = weakref.ref(params[0]) if params else lambda: None
        self._needed = (_TAKES_OVER, _TAKES_OVER_UNSEEN) if is_shared else (1, _TAKES_OVER)
        return self._follow(steps, operations)

    def _follow(self, steps: int, operations: int) -> int:
        self._led = operations
        self.leads_alone = True
        self._others.clear()
        return steps


@final
@read_in_c
class TorchSteps:
    """When a step of this rank ends."""

    __slots__ = ("__dict__", "__weakref__", "_recorder", "clock", "guard")

    def __init__(self, guard: Guard, groups: TorchGroups) -> None:
        self.guard, self._recorder, self.groups = guard, guard.recorder, groups
        self.clock = guard.recorder.clock
        self.counter = StepCounter(self._is_shared, is_alone=guard.world_size == 1)
        self._reduced: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # parameters, by id
        self._begun: int | None = None  # operations, when the last backward began before any step was counted
        self._has_counted = False
        BACKWARDS.once.append(self._backward_begins)

    def _backward_begins(self) -> None:
        """What was started by now has not averaged the gradients of this backward."""
        if not (self._has_counted or BACKWARDS.are_shared):
            self._begun = self._recorder.started
            BACKWARDS.once.append(self._backward_begins)

    def share(self, params: Iterable[Any]) -> None:
        """DistributedDataParallel averages the gradients of `params`."""
        self._reduced.update((id(param), param) for param in params)
        BACKWARDS.are_shared = True

    def stepped(self, optimizer: Any, started: Sequence[Started]) -> bool:
        """`optimizer` has, by when C++ has started that: whether a step of the rank has ended. As `Guard.step_done`."""
        recorder = self._recorder
        for watched, number, line in started:
            watched.catch_up(number, line)
        recorder.take_up()
        begun = None if self._has_counted or BACKWARDS.are_shared else self._begun
        if begun is not None and all(one.is_message for one in self.guard.records(begun, recorder.started)):
            begun = recorder.started  # nothing was averaged: only some stages of a pipeline send behind their backward
        counted = self.counter.stepped(optimizer, recorder.started, self.guard.step_ends.operations, begun)
        self._has_counted |= counted > 0
        for _ in range(counted):
            self.guard.step_done()
        return counted > 0

    def plan(self) -> None:
        """A step has ended that was looked at closely: whether the next one is."""
        is_marked = self.clock.is_marked
        self._has_counted |= is_marked
        if (is_marked or self.counter.leads_alone) and self.guard.settings.mode == "on":
            PACE.plan(self._recorder.step, monotonic_ns())
            if PACE.is_brief and not is_marked:  # else who ends its steps says it
                self.clock.time_batches_only()

    def look_closely(self) -> None:
        """From the step on that begins."""
        PACE.turn(is_brief=False)
        self.clock.time_all()

    def _is_shared(self, optimizer: Any) -> bool:
        """Whether the ranks share parameters of `optimizer`."""
        if self.guard.world_size == 1:
            return True
        params = params_of(optimizer)
        if is_averaged(optimizer) or any(self._reduced.get(id(param)) is param for param in params):
            return True
        tensor = sys.modules.get("torch.distributed.tensor")
        kinds = () if tensor is None else (tensor.DTensor,)
        return any(isinstance(param, kinds) or getattr(param, "_is_flat_param", False) for param in params)
