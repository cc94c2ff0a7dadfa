"""What is recorded of a random program that calls torch.distributed: as `native_stories.py`, of one rank of one.

    python torch_stories.py FOLDER SEEDS

Prints whether the calls are tried in C, then a story a line; then how many blocks Python holds more after many calls,
and how many functions of lockstep's a call from the user's line has called, one from torch's, one with its wait, and a
backward with the step of an optimizer that ends one of the first of the rank's.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.guard import Guard
from lockstep.observe.pace import FIRST, PACE
from lockstep.observe.profile.torch_phases import TorchPhases
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import flight_path
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_gradients import GradientFacts
from lockstep.observe.torch_optimizers import OPTIMIZERS
from lockstep.observe.torch_watch import attach
from recorded_ranks import leave_one

_ACTS = 200
_DEEP = 5  # calls of torch's between the user's line and that of an operation
_CALLS = "def through(call, *more):\n    return call(*more)\n"


def torchs(name: str) -> Callable[..., Any]:
    """A function of torch's, that calls what it is given."""
    made: dict[str, Any] = {}
    exec(compile(_CALLS, str(Path(torch.__file__).with_name(f"made_{name}.py")), "exec"), made)
    return made["through"]


class Story:
    """One rank alone, over Gloo."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.recorder = FlightRecorder(flight_path(folder, 0), 0, 1)
        self.guard = Guard(self.recorder, Board(folder, self.recorder, range(1)), GuardSettings("on", evidence=""))
        self.told: list[object] = []
        self.guard.saw = lambda error: self.told.append(f"saw {type(error).__name__}")
        self.undo = [attach(self.guard), BACKWARDS.attach()]
        BACKWARDS.failed = self.guard.saw
        BACKWARDS.phases = self.random.choice([None, None, TorchPhases(self.recorder.clock)])
        self.looks = OPTIMIZERS.looks = GradientFacts(self.guard, lambda optimizer: [])
        OPTIMIZERS.phases = self.random.choice([None, None, TorchPhases(self.recorder.clock)])
        BACKWARDS.are_shared = self.random.random() < 0.8  # else somebody waits for each backward
        PACE.reset()
        if self.random.random() < 0.7:
            self.recorder.clock.close_reader = lambda: None
        self.tensors = [torch.ones(2, 3), torch.ones(4), torch.ones(3, 2).t(), torch.ones(4, dtype=torch.int64)]
        self.works: list[Any] = []
        self.groups: list[Any] = [None, dist.new_group([0])]
        self.deep = [torchs(name) for name in "abcdefgh"]

    def keep(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    def reduce(self) -> None:
        tensor, group, is_async = self.random.choice(self.tensors), self.random.choice(self.groups), self.is_async()
        op = self.random.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX])
        if self.random.random() < 0.5:
            self.keep(dist.all_reduce(tensor, op, group, is_async))
        else:
            self.keep(dist.reduce(tensor, 0, op, group, is_async))

    def is_async(self) -> bool:
        return self.random.random() < 0.5

    def spread(self) -> None:
        tensor, is_async = self.random.choice(self.tensors), self.is_async()
        self.keep(dist.broadcast(tensor, 0, async_op=is_async))

    def gather(self) -> None:
        """Into what does not fit, now and then: that raises, at once or where it is waited for."""
        is_async, (more, kind) = (
            self.is_async(),
            self.random.choice([(0, torch.float32)] * 3 + [(0, torch.float64), (1, torch.float32)]),
        )
        into = torch.empty(
            self.tensors[1].numel() + more * (not is_async), dtype=kind
        )  # a second wait may not raise it
        self.keep(dist.all_gather_into_tensor(into, self.tensors[1], async_op=is_async))

    def scatter(self) -> None:
        part = torch.empty_like(self.tensors[1])
        self.keep(dist.reduce_scatter_tensor(part, self.tensors[1], async_op=self.is_async()))

    def from_torch(self) -> None:
        """From a line of torch's, as fully_shard does it, by ways of some lengths up to two lines of ours."""
        call: Callable[..., Any] = partial(dist.all_reduce, self.random.choice(self.tensors), async_op=self.is_async())
        for through in self.random.sample(self.deep[:6], self.random.choice([1, _DEEP])):
            call = partial(through, call)
        self.keep(self.deep[6](call) if self.random.random() < 0.5 else self.deep[7](call))

    def otherwise(self) -> None:
        """Not by one of torch's functions, or not of one tensor."""
        group, tensor = dist.group.WORLD, self.random.choice(self.tensors)
        assert group is not None
        others: list[Callable[[], Any]] = [
            lambda: group.allreduce([tensor]).wait(),
            lambda: group.broadcast(tensor, 0).wait(),
            lambda: dist.barrier(),
            lambda: dist.all_gather([torch.empty_like(tensor)], tensor),
            lambda: dist._broadcast_coalesced(group, [tensor], 1 << 20, 0),  # started by C++
            lambda: dist.all_reduce(tensor.view(*[1] * 7, -1)),
            lambda: dist.all_reduce(tensor=tensor),
            lambda: dist.all_reduce(torch.nn.Parameter(torch.ones(2))),
        ]
        self.random.choice(others)()

    def resize(self) -> None:
        self.tensors[1] = torch.zeros(self.random.choice([4, 5, 6]))

    def wait(self) -> None:
        if self.works:
            work = self.random.choice(self.works)  # maybe for a second time
            self.told.append(work.wait(*self.random.choice([(), (), (torch.distributed.default_pg_timeout,)])))

    def drop(self) -> None:
        if self.works:
            self.works.pop(self.random.randrange(len(self.works))).wait()

    def backward(self) -> None:
        """Of a loss that is finite, or not, or no single number; some fail, and some are waited for by others."""
        weight = torch.ones(2, requires_grad=True, dtype=self.random.choice([torch.float32, torch.complex64]))
        if self.random.random() < 0.1:
            BACKWARDS.once.append(partial(self.told.append, "once"))
        if self.random.random() < 0.1:
            weight.register_hook(lambda grad: grad.sum() + self.random.choice([torch.ones(3, 4), "no tensor"]))
        loss = (weight * self.random.choice([1.0, 1.0, 2.5, math.inf, math.nan])).real.sum()
        if self.random.random() < 0.1:
            BACKWARDS.scaled, loss = (loss * 8, loss), loss * 8
        calls: list[Callable[[], Any]] = [
            loss.backward,
            lambda: loss.backward(retain_graph=True),
            lambda: self.deep[0](loss.backward),
            lambda: torch.autograd.backward([loss]),
            lambda: torch.autograd.backward(loss, inputs=[weight]),
            lambda: (weight * 2).real.backward(torch.ones(2)),
        ]
        PACE.is_brief = self.random.random() < 0.4
        try:
            for _ in range(2):  # the second fails, unless the graph was retained
                self.random.choice([*calls, *[loss.backward] * 5])()
        finally:
            losses = [(repr(value), site) for value, site in BACKWARDS.losses]
            self.told += [BACKWARDS.step_site, BACKWARDS.is_sound, losses, len(BACKWARDS.recent), PACE.is_brief]
            self.told.append([phase for phase, _ in self.recorder.clock.marks])
            if self.random.random() < 0.3:
                BACKWARDS.losses, BACKWARDS.recent, BACKWARDS.is_sound = [], [], None

    def optimize(self) -> None:
        """A step of an optimizer, in a loop that marks its own, or does not; some are looked at."""
        looks, weight = self.looks, torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        self.recorder.clock.is_marked = self.random.random() < 0.7
        PACE.is_brief = False
        if self.random.random() < 0.9:
            (weight * self.random.choice([1.0, 1.0, 1.0, math.nan])).sum().backward()
        BACKWARDS.own.extend([torch.ones(1)] * self.random.randrange(3))
        looks.due_ns = looks._due_ns = self.random.choice([0.0, math.inf, math.inf])
        for _ in range(self.random.choice([1, 1, 2])):
            optimizer.step()
            seen = [[step, repr(losses), len(own), applied] for step, losses, own, applied in looks.seen]
            self.told += [seen[-2:], len(seen), len(OPTIMIZERS._begun), OPTIMIZERS._is_unseen]
            self.told += [len(BACKWARDS.recent), len(BACKWARDS.own), BACKWARDS.is_sound, self.recorder.step]
            self.told.append(OPTIMIZERS._marked() is optimizer)
        if self.recorder.clock.is_marked:
            OPTIMIZERS.counted = lambda leader, has_ended: self.told.append([leader is optimizer, has_ended])
            PACE._seen = self.random.choice([0, 5, FIRST - 2, FIRST - 1])
            OPTIMIZERS.step_done()
            steps = OPTIMIZERS.steps
            self.told += [steps is not None and steps._has_counted, OPTIMIZERS._marked() is None]
            self.told += [PACE._seen, PACE._planned[0], PACE.until, PACE.is_brief]
            OPTIMIZERS.counted = None
        self.recorder.clock.is_marked = False

    def elsewhere(self) -> None:
        """In a thread of the program's own, whose operations belong to no step."""
        thread = threading.Thread(target=self.act, args=(self.reduce,))
        thread.start()
        thread.join()

    def end_step(self) -> None:
        self.recorder.clock.is_brief = self.random.random() < 0.5
        self.told.append([number for number, *_ in self.recorder.clock.waits])
        self.guard.step_done()

    def leave_for_later(self) -> None:
        leave_one(self.recorder)

    def act(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:  # noqa: BLE001
            self.told.append(type(error).__name__)

    def tell(self) -> str:
        often = [self.reduce] * 4 + [self.wait] * 4 + [self.spread, self.gather, self.scatter, self.from_torch] * 2
        often += [self.backward] * 3 + [self.optimize] * 2
        seldom = [self.resize, self.otherwise, self.drop, self.elsewhere, self.end_step, self.leave_for_later]
        for _ in range(_ACTS):
            self.act(self.random.choice([*often, *seldom]))
        for work in self.works:
            self.act(work.wait)
        self.works.clear()
        self.recorder.take_up()
        records = [one._replace(entered_ns=one.entered_ns > 0, left_ns=one.left_ns > 0) for one in self.guard.records()]
        self.give_back()
        return json.dumps([records, self.told, self.recorder.started])

    def give_back(self) -> None:
        for call in reversed(self.undo):
            call()
        self.guard.close()
        dist.destroy_process_group(self.groups[1])

    def blocks_after(self, times: int) -> int:
        """How many blocks Python holds after so many rounds of calls, of which some fail."""
        wrong, weight = torch.empty(5), torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        self.recorder.clock.is_marked = True
        BACKWARDS.once = []
        OPTIMIZERS.phases = BACKWARDS.phases = None
        OPTIMIZERS.counted = lambda *_: None
        for _ in range(times):
            optimizer.step()
            PACE._seen = 0
            OPTIMIZERS.step_done()
            weight.sum().backward()
            for tensor in self.tensors:
                dist.all_reduce(tensor)
                dist.broadcast(tensor, 0, async_op=True).wait()
            try:
                dist.all_gather_into_tensor(wrong, self.tensors[1])
            except (RuntimeError, ValueError):
                self.told.clear()
            self.recorder.clock.waits.clear()
            BACKWARDS.losses.clear()
            self.looks.seen.clear()
        gc.collect()
        return sys.getallocatedblocks()

    def calls_of_python(self) -> list[int]:
        """Of calls that have been made before."""

        def made_asynchronously() -> None:
            dist.broadcast(self.tensors[0], 0, async_op=True).wait()

        def made_by_torch() -> None:
            call: Callable[..., Any] = partial(dist.all_reduce, self.tensors[0])
            for through in self.deep:
                call = partial(through, call)
            call()

        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        self.recorder.clock.is_marked, self.looks.due_ns = True, math.inf

        def backward() -> None:
            weight.sum().backward()
            optimizer.step()
            OPTIMIZERS.step_done()

        def count(frame: Any, event: str, _: object) -> None:
            counts[-1] += event == "call" and "/lockstep/observe/" in frame.f_code.co_filename

        counts: list[int] = []
        calls = lambda: dist.all_reduce(self.tensors[0]), made_by_torch, made_asynchronously, backward
        for call in calls:
            for _ in range(3):
                call()
            counts.append(0)
            sys.setprofile(count)
            call()
            sys.setprofile(None)
        return counts


def main(folder: Path, seeds: int) -> None:
    """Tell so many stories."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for number in range(seeds + 1):
        here = folder / str(number)
        here.mkdir()
        story = Story(here, number)
        if number == 0:
            print(
                type(vars(dist.ProcessGroup)["allreduce"]).__name__ == type(vars(dist.Work)["wait"]).__name__ == "Quick"
            )
        if number < seeds:
            print(story.tell())
            continue
        story.blocks_after(300)
        print(-story.blocks_after(100) + story.blocks_after(1000))
        print(*story.calls_of_python())
        story.give_back()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
