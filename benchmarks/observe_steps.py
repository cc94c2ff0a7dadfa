"""The steps that `bench_observe.py` measures: as `lockstep train` has them, and the same without lockstep."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, CommOp, Work
from lockstep.comm.transport import Transport
from lockstep.errors import CommError
from lockstep.observe import pace
from lockstep.observe.guard import Guard
from lockstep.observe.pace import PACE
from lockstep.observe.profile.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER
from lockstep.observe.profile.session import Profile

COLLECTIVES = 8
BUCKET = 16_384  # elements of each
Variant = Callable[[int], dict[str, float]]


@final
class Arithmetic:
    """Matrix products for so long of this thread's processor time, out of the caches of the operations between.

    Not a number of them: by how much a machine that others share is slower from one moment to the next is many times
    what is looked for. Where the thread is held up it takes longer all the same.
    """

    def __init__(self, milliseconds: float) -> None:
        self.done, self.spent_s = 0, 0.0  # so many products, in so much time
        self._due_s = milliseconds / 1e3
        self._matrix = torch.randn(160, 160)

    def __call__(self) -> None:
        began_s = now_s = time.thread_time()
        until_s, matrix, done = began_s + self._due_s, self._matrix, 0
        while now_s < until_s:
            torch.mm(matrix, matrix)
            now_s, done = time.thread_time(), done + 1
        self.done, self.spent_s = self.done + done, self.spent_s + now_s - began_s


def buckets_of(comm: Communicator) -> list[Tensor]:
    """The same for steps of all kinds: where a tensor lies makes its operations longer or shorter, for good."""
    return [comm.empty(BUCKET).zero_() for _ in range(COLLECTIVES)]


def averaging(comm: Communicator, buckets: Sequence[Tensor], work: Callable[[], None]) -> Callable[[], None]:
    """A piece of arithmetic before each operation; every second one is waited for after the next piece."""

    def average() -> None:
        pending = None
        for number, bucket in enumerate(buckets):
            work()
            if pending is not None:
                pending.wait()
                pending = None
            if number % 2:
                comm.all_reduce(bucket, "mean", label="bucket")
            else:
                pending = comm.all_reduce(bucket, "mean", async_op=True, label="bucket")

    return average


@final
class Nothing(Transport):
    """Moves nothing: what is left of an operation is what it takes to ask for it."""

    def __init__(self, beside: Transport) -> None:
        self.name, self.rank, self.world_size = "nothing", beside.rank, beside.world_size
        self.global_ranks, self.device, self.timeout_s = beside.global_ranks, beside.device, beside.timeout_s

    def submit(self, op: CommOp) -> Work:
        return DONE

    def split(self, groups: Sequence[Sequence[int]]) -> None:
        return None

    def abort(self, error: CommError) -> None:
        pass

    def close(self) -> None:
        pass


@final
class Hooks:
    """What lockstep has put into torch's optimizers and backward."""

    def __init__(self) -> None:
        hooks: list[dict[int, Any]] = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        self._hooks = [(each, dict(each)) for each in hooks]
        self._backward = torch.autograd.backward
        self._stock = inspect.unwrap(self._backward)
        self._are_there = True
        assert self._stock is not self._backward
        assert all(there for _, there in self._hooks)

    def hang(self, *, are_there: bool) -> None:
        """Have them there, or torch as it comes."""
        if are_there == self._are_there:
            return
        self._are_there = are_there
        torch.autograd.backward = self._backward if are_there else self._stock
        for hooks, there in self._hooks:
            if are_there:
                hooks.update(there)
            else:
                there.update(hooks)  # they are exchanged for steps that are only counted
                hooks.clear()


@final
class Loop:
    """Steps of a training loop, with a backward and an optimizer of one number."""

    def __init__(self, guard: Guard, profile: Profile) -> None:
        self._recorder, self._profile = guard.recorder, profile
        self._hooks = Hooks()
        self._weight = torch.ones((), requires_grad=True)
        self._optimizer = torch.optim.SGD([self._weight], 1e-6)
        self._is_on, self._first = True, pace.FIRST
        self._guard, self._act = guard, guard.act
        guard.act = self._act_if_on

    def _act_if_on(self) -> None:
        """What the guard's thread does each time: steps of torch alone have none beside them.

        The rank lives in these too: of one that does not, the others read the whole record.
        """
        if self._is_on:
            self._act()
        else:
            self._recorder.live()

    def bare(self, average: Callable[[], object]) -> Callable[[], None]:
        """A step of torch alone."""

        def step() -> None:
            self._weight.square().backward()
            average()
            self._optimizer.step()

        return step

    def marked(self, average: Callable[[], object]) -> Callable[[], None]:
        """The same with its phases marked, and its end told, as `lockstep train` does it."""
        clock, recorder = self._recorder.clock, self._recorder

        def step() -> None:
            clock.switch(DATA)
            clock.switch(OTHER)
            clock.switch(FORWARD)
            loss = self._weight.square()
            clock.switch(BACKWARD)
            loss.backward()
            average()
            clock.switch(OTHER)
            clock.switch(OPTIMIZER)
            self._optimizer.step()
            clock.switch(OTHER)
            self._profile.step_done(recorder.step + 1, tokens=1)

        return step

    def variants(self, off: Variant, on: Variant) -> dict[str, Variant]:
        """Steps of torch alone; of the first, which are looked at closely; of later ones."""

        def turn(run: Variant, *, is_on: bool, is_first: bool) -> Variant:
            def block(number: int) -> dict[str, float]:
                PACE.turn(is_brief=False)  # while the hooks are there, of which it exchanges some
                self._hooks.hang(are_there=is_on)
                pace.FIRST, self._is_on = sys.maxsize if is_first else 1, is_on
                try:
                    return run(number)
                finally:
                    self._is_on = True

            return block

        return {
            "off": turn(off, is_on=False, is_first=True),
            "first": turn(on, is_on=True, is_first=True),
            "later": turn(on, is_on=True, is_first=False),
        }

    def end(self) -> None:
        """All is there again."""
        self._hooks.hang(are_there=True)
        self._guard.act = self._act
        pace.FIRST = self._first
