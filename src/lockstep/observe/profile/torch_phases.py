"""The phases of a program that is not ours: torch's data loader, DDP's forward, backward and optimizers tell them.

Where no DistributedDataParallel says when its forward runs, all that a step does before its backward counts as forward.
What DDP has not sent when backward is through, it waits for in C++, where nobody can look: that time begins when
autograd has computed the last gradient, and ends when backward returns. No torch is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any, final

from lockstep.observe.patches import Patches
from lockstep.observe.profile.step_clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, TAIL, Step, StepClock
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_import import when_imported


def attach_phases(clock: StepClock) -> Callable[[], None]:
    """Let `clock` follow what torch does in this thread, from its import on. The result ends that."""
    phases = TorchPhases(clock)
    BACKWARDS.phases = phases
    undo = [
        BACKWARDS.attach(),
        when_imported("torch.utils.data.dataloader", phases.watch_data),
        when_imported("torch.nn.parallel.distributed", phases.watch_forward),
        when_imported("lockstep.parallel.ddp", phases.watch_our_forward),
        when_imported("torch.optim.optimizer", phases.watch_optimizers),
    ]

    def detach() -> None:
        BACKWARDS.phases = None
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
        self.has_ddp = False
        self._tail: int | None = None  # since when the backward that runs waits
        self._patches = Patches()
        clock.rest = FORWARD

    def close(self) -> None:
        """Put back what was replaced; what somebody else has wrapped meanwhile stays, and does nothing any more."""
        self._enter = lambda phase: -1
        self._patches.undo()

    def _begin(self, phase: int) -> int:
        """The first phase begins a step."""
        self._enter = self._clock.switch
        self._clock.restart()
        return self._enter(phase)

    def watch_data(self) -> None:
        """Waiting for the next batch, and for the workers of a loader to start."""
        loaders = sys.modules["torch.utils.data.dataloader"]
        self._patches.replace(loaders._BaseDataLoaderIter, "__next__", partial(self._waiting, is_batch=True))
        self._patches.replace(loaders.DataLoader, "__iter__", partial(self._waiting, is_batch=False))

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
        clock = self._clock

        def passing(old: Callable[..., Any]) -> Callable[..., Any]:
            def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
                self.has_ddp = True
                clock.rest = OTHER
                before = self._enter(FORWARD)
                try:
                    return old(module, *args, **kwargs)
                finally:
                    clock.switch(OTHER if before == FORWARD else before)

            return forward

        ddp = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
        self._patches.replace(ddp, "forward", passing)

    def watch_our_forward(self) -> None:
        """That of our own class, by what it calls first and last: torch.compile looks into all between."""
        clock = self._clock

        def beginning(old: Callable[..., Any]) -> Callable[..., Any]:
            def begin(module: Any, *args: Any, **kwargs: Any) -> Any:
                clock.rest = OTHER
                self._enter(FORWARD)
                return old(module, *args, **kwargs)

            return begin

        def ending(old: Callable[..., Any]) -> Callable[..., Any]:
            def end(module: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    return old(module, *args, **kwargs)
                finally:
                    clock.switch(OTHER)

            return end

        ddp = sys.modules["lockstep.parallel.ddp"].DistributedDataParallel
        self._patches.replace(ddp, "_pre_forward", beginning)
        self._patches.replace(ddp, "_post_forward", ending)

    # ------------------------------------------------------------------ backward: see `torch_backward.Phases`

    def backward_begins(self) -> int:
        """What this thread did before."""
        before = self._enter(BACKWARD)
        if before not in (-1, BACKWARD):
            self._tail = None
        return before

    def gradients_are_there(self) -> None:
        """Autograd is through; what DDP has not sent by now is waited for."""
        self._tail = monotonic_ns()

    def backward_ends(self, before: int, site: str) -> None:
        """And what it waited for at its end."""
        if before in (-1, BACKWARD):  # of another thread, or inside of one, as checkpointing does it
            return
        clock, tail = self._clock, self._tail
        if tail is not None:
            clock.tail_site = site
            clock.waited(TAIL, tail, monotonic_ns())
        clock.switch(before if before == OPTIMIZER else OTHER)

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

        self._patches.add(optimizers.register_optimizer_step_pre_hook(begins).remove)
        self._patches.add(optimizers.register_optimizer_step_post_hook(ends).remove)


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
