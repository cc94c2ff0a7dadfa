"""Which of a program's optimizers counts its steps, so that all ranks count alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, final

_TAKES_OVER = 2  # steps of another optimizer without one of the leading one between them

_averaged: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # parameters, by id


def mark_averaged(params: Iterable[Any]) -> None:
    """The ranks average the gradients of `params`, by calls of ours that no guard sees."""
    _averaged.update((id(param), param) for param in params)


def is_averaged(param: Any) -> bool:
    """Whether `mark_averaged` was told of it."""
    return _averaged.get(id(param)) is param


@final
class StepCounter:
    """Follows one optimizer: the first to step whose parameters the ranks share.

    So several optimizers, and a model that one rank trains for itself, do not count twice. `is_shared` tells whether an
    optimizer's parameters belong to DistributedDataParallel or to a sharded model. Where none do, the ranks may still
    average gradients by calls of their own: then an optimizer leads from its second step on, if there was an operation
    between the two. An optimizer that is gone, or that stands still while another goes on among the ranks, hands over.
    """

    def __init__(self, is_shared: Callable[[Any], bool], *, is_alone: bool = False) -> None:
        """is_alone: there is no other rank."""
        self._is_shared, self._is_alone = is_shared, is_alone
        self._shared: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._leader: weakref.ref[Any] = weakref.ref(self)
        self._led = -1  # operations, at the leader's last step; -1 before there was one
        self._others: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._begun: set[int] = set()  # ids of optimizers that are about to step

    def begins(self, optimizer: Any, *_: Any) -> None:
        """`optimizer` is about to step. One whose step calls that of its parent class begins twice, and ends twice."""
        self._begun.add(id(optimizer))

    def stepped(self, optimizer: Any, operations: int) -> int:
        """How many steps to count now that `optimizer` has stepped. operations: started so far by this rank."""
        if id(optimizer) not in self._begun:  # its parent class has, within this step, which was counted
            return 0
        self._begun.discard(id(optimizer))
        leader = self._leader()
        if leader is optimizer:  # as a rule, so here and now
            self._led = operations
            if self._others:
                self._others.clear()
            return 1
        is_free = leader is None or self._led < 0
        before = self._others.get(optimizer)
        if self._shares(optimizer):
            steps, since = before or (0, self._led)
            # a rank may go on with its copy of the model for itself; what our own class does is not seen here
            steps += operations > since or self._is_alone or bool(_averaged)
            self._others[optimizer] = steps, operations
            is_next = steps >= (1 if is_free or not self._shares(leader) else _TAKES_OVER)
            return self._follow(optimizer, 1, operations) if is_next else 0
        self._others[optimizer] = 1, operations
        if is_free and before is not None and operations > before[1]:
            return self._follow(optimizer, 2, operations)
        return 0

    def _shares(self, optimizer: Any) -> bool:
        if optimizer is None:
            return False
        if optimizer not in self._shared:
            self._shared[optimizer] = self._is_shared(optimizer)
        return self._shared[optimizer]

    def _follow(self, optimizer: Any, steps: int, operations: int) -> int:
        self._leader, self._led = weakref.ref(optimizer), operations
        self._others.clear()
        return steps
