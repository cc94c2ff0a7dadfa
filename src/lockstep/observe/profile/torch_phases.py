"""The phases of a program that is not ours: torch's data loader, DDP's forward, backward and optimizers tell them.

Where no DistributedDataParallel says when its forward runs, all that a step does before its backward counts as forward.
What DDP has not sent when backward is through, it waits for in C++, where nobody can look: that time begins when
autograd has computed the last gradient, and ends when backward returns. No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from lockstep.observe.patches import Patches, around
from lockstep.observe.profile.phases import DATA, FORWARD, OTHER
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_batches import BATCHES
from lockstep.observe.torch_optimizers import OPTIMIZERS


def attach_phases(clock: StepClock) -> Callable[[], None]:
    """Let `clock` follow what torch does in this thread, from its import on. The result ends that."""
    phases = TorchPhases(clock)
    BACKWARDS.phases = BATCHES.phases = OPTIMIZERS.phases = phases
    undo = [BACKWARDS.attach(), BATCHES.attach(), OPTIMIZERS.attach()]

    def detach() -> None:
        BACKWARDS.phases = BATCHES.phases = OPTIMIZERS.phases = None
        for call in undo:
            call()
        phases.close()

    return detach


@final
class TorchPhases:
    """Replaces what begins and ends a phase, but for batches, backwards and steps. One per process."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.owner = clock.owner  # the thread whose phases these are; none once this is over
        self._patches = Patches()
        clock.rest = FORWARD
        clock.restart()
        clock.begins_with_mark = True
        replace_in = self._patches.replace_in
        replace_in("torch.utils.data.dataloader", "DataLoader", "__iter__", around(self._start_workers))
        replace_in("torch.nn.parallel.distributed", "DistributedDataParallel", "forward", self._passing)
        # of our own class what it calls first and last: torch.compile looks into all between
        replace_in("lockstep.parallel.ddp", "DistributedDataParallel", "_pre_forward", self._beginning)
        replace_in("lockstep.parallel.ddp", "DistributedDataParallel", "_post_forward", self._ending)

    def close(self) -> None:
        """Put back what was replaced; what somebody else has wrapped meanwhile stays, and does nothing any more."""
        self.owner = 0
        self._patches.undo()

    def _start_workers(self, old: Callable[..., Any], loader: Any) -> Any:
        """DataLoader.__iter__, which waits for them."""
        before = self.enter(DATA)
        try:
            return old(loader)
        finally:
            self.clock.switch(self.clock.rest if before == OTHER else before)

    def enter(self, phase: int) -> int:
        """As `StepClock.switch`."""
        return self.clock.switch(phase) if self.owner else -1

    def _passing(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """Forward of DistributedDataParallel."""
        clock = self.clock

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            before = clock.switch(FORWARD) if self.owner else -1
            if before < 0:
                return old(module, *args, **kwargs)
            clock.rest = OTHER
            try:
                return old(module, *args, **kwargs)
            finally:
                clock.switch(OTHER if before == FORWARD else before)

        return forward

    def _beginning(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def begin(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.clock.rest = OTHER
            self.enter(FORWARD)
            return old(module, *args, **kwargs)

        return begin

    def _ending(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def end(module: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return old(module, *args, **kwargs)
            finally:
                self.enter(OTHER)

        return end
