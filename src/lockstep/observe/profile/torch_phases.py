"""The phases of a program that is not ours: torch's data loader, DDP's forward, backward and optimizers tell them.

Where no DistributedDataParallel says when its forward runs, all that a step does before its backward counts as forward.
What DDP has not sent when backward is through, it waits for in C++, where nobody can look: that time begins when
autograd has computed the last gradient, and ends when backward returns. No torch is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.profile.step_clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, TAIL, Step, StepClock
from lockstep.observe.torch_import import when_imported


def attach_phases(clock: StepClock) -> Callable[[], None]:
    """Let `clock` follow what torch does in this thread, from its import on. The result ends that."""
    phases = TorchPhases(clock)
    undo = [
        when_imported("torch.utils.data.dataloader", phases.watch_data),
        when_imported("torch.nn.parallel.distributed", phases.watch_forward),
        when_imported("torch.autograd", phases.watch_backward),
        when_imported("torch.optim.optimizer", phases.watch_optimizers),
    ]

    def detach() -> None:
        for call in undo:
            call()
        phases.close()

    return detach


@final
class TorchPhases:
    """Replaces what begins and ends a phase. One per process."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        # The thread does a phase; what it did before, to be given back to `switch`
        self._enter: Callable[[int], int] = self._begin
        self._has_ddp = False
        self._tail: int | None = None  # since when the backward that runs waits
        self._undo: list[Callable[[], None]] = []
        clock.rest = FORWARD

    def close(self) -> None:
        """Put back what was replaced; what somebody else has wrapped meanwhile stays, and does nothing any more."""
        self._enter = lambda phase: -1
        while self._undo:
            self._undo.pop()()

    def _begin(self, phase: int) -> int:
        """The first phase begins a step."""
        self._enter = self._clock.switch
        self._clock.restart()
        return self._enter(phase)

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        old = vars(owner)[name]
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old) if vars(owner)[name] is new else None)

    def watch_data(self) -> None:
        """Waiting for the next batch, and for the workers of a loader to start."""
        loaders = sys.modules["torch.utils.data.dataloader"]
        for owner, name in ((loaders._BaseDataLoaderIter, "__next__"), (loaders.DataLoader, "__iter__")):
            self._replace(owner, name, self._waiting(vars(owner)[name], is_batch=name == "__next__"))

    def _waiting(self, old: Callable[..., Any], *, is_batch: bool) -> Callable[..., Any]:
        clock = self._clock

        def wait(loader: Any) -> Any:
            before = self._enter(DATA)
            try:
                batch = old(loader)
            finally:
                clock.switch(clock.rest if before == OTHER else before)  # FORWARD, also of a second microbatch
            if is_batch and before >= 0:
                clock.count(samples_in(batch))
            return batch

        return wait

    def watch_forward(self) -> None:
        """Forward of DistributedDataParallel."""
        clock, ddp = self._clock, sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
        old = ddp.forward

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._has_ddp = True
            clock.rest = OTHER
            before = self._enter(FORWARD)
            try:
                return old(module, *args, **kwargs)
            finally:
                clock.switch(OTHER if before == FORWARD else before)

        self._replace(ddp, "forward", forward)

    def watch_backward(self) -> None:
        """Backward, and what it waits for at its end."""
        clock, autograd = self._clock, sys.modules["torch.autograd"]
        old = autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._enter(BACKWARD)
            if before in (-1, BACKWARD):  # of another thread, or inside of one, as checkpointing does it
                return old(tensors, *args, **kwargs)
            root = tensors if self._has_ddp and getattr(tensors, "requires_grad", False) else None
            hook = None if root is None else root.register_hook(self._backward_began)
            try:
                return old(tensors, *args, **kwargs)
            finally:
                if hook is not None:
                    hook.remove()
                if self._tail is not None:
                    clock.tail_site = call_site()
                    clock.waited(TAIL, self._tail, monotonic_ns())
                    self._tail = None
                clock.switch(before if before == OPTIMIZER else OTHER)

        self._replace(autograd, "backward", backward)

    def _backward_began(self, gradient: Any) -> None:
        """To be called back before DDP is, which asks for it only when its last gradient is there."""
        sys.modules["torch.autograd"].Variable._execution_engine.queue_callback(self._gradients_are_there)

    def _gradients_are_there(self) -> None:
        self._tail = monotonic_ns()

    def watch_optimizers(self) -> None:
        """Steps of any optimizer."""
        clock, optimizers = self._clock, sys.modules["torch.optim.optimizer"]
        befores: list[int] = []  # a step may run another one

        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            befores.append(self._enter(OPTIMIZER))

        def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
            before = befores.pop() if befores else -1
            if before >= 0:
                clock.switch(clock.rest if before in (FORWARD, OTHER) else before)

        self._undo.append(optimizers.register_optimizer_step_pre_hook(begins).remove)
        self._undo.append(optimizers.register_optimizer_step_post_hook(ends).remove)


def forwards_found(step: Step) -> Step:
    """What lies between two backwards is the second one's forward, where nobody says when that runs."""
    marks = list(step.marks)
    if not marks or marks[0][0] != FORWARD:  # a step begins with what the thread does where nothing is known
        return step
    for at in range(1, len(marks) - 1):
        if (marks[at - 1][0], marks[at][0], marks[at + 1][0]) == (BACKWARD, OTHER, BACKWARD):
            marks[at] = FORWARD, marks[at][1]
    return step._replace(marks=marks)


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch, as loaders nest them; 0 where there is none."""
    while not hasattr(batch, "shape"):
        if isinstance(batch, dict):
            batch = list(batch.values())
        if not isinstance(batch, list | tuple) or not batch:
            return 0
        batch = batch[0]
    return int(batch.shape[0]) if len(batch.shape) else 1
