"""What a rank records of a random program: to be told by the methods in C and by those in Python, and to be compared.

    python native_stories.py FOLDER SEEDS

Prints whether the methods are those in C, then a story a line.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Work
from lockstep.errors import PeerLost
from lockstep.observe.account import Account
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.lookout import Lookout
from lockstep.observe.profile.phases import PHASES
from lockstep.observe.recording import GuardLayer
from lockstep.observe.scene import Limits
from lockstep.observe.step_ends import StepEnds
from recorded_ranks import Silent, Watcher, leave_one

_ACTS = 250


class OfTorch:
    """A group of torch's, whose numbers C++ raises, and what the guard knows of it."""

    def __init__(self, told: list[object]) -> None:
        self.number = self.seen = 0
        self.is_there, self.inside, self._told = True, False, told

    def group(self) -> OfTorch | None:
        return self if self.is_there else None

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def catch_up(self, number: int, site: str, *, step: int, now_ns: int) -> None:
        self.seen = number
        self._told.append(["started", number, site, step, now_ns > 0])


class Story:
    """One rank alone, over a transport that moves nothing; `told` is what the program itself has seen."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.watcher, self.transport = Watcher(folder, 0, 2), Silent(2)
        self.recorder, self.clock = self.watcher.recorder, self.watcher.recorder.clock
        self.comm = Communicator(GuardLayer(self.transport, self.watcher))
        self.tensors = [torch.ones(2, 3), torch.ones(4), torch.ones(3, 2).t(), torch.ones(4, dtype=torch.int64)]
        self.works: list[Work] = []
        self.told: list[object] = []
        if self.random.random() < 0.7:
            self.clock.close_reader = lambda: None
        self.account = Account(self.recorder)
        nobody: Any = SimpleNamespace(rank=0)
        self.lookout = Lookout(0, self.account, nobody, nobody, Limits(), 1.0)
        self.of_torch: list[Any] = [OfTorch(self.told) for _ in range(self.random.randrange(3))]
        self.ends = StepEnds(self.recorder, self.account, self.lookout, nobody)
        self.passed = self.ends.passing(self.of_torch)

    def reduce(self) -> None:
        tensor, label = self.random.choice(self.tensors), self.random.choice(["", "bucket", "grad_norm"])
        reduce: Any = self.random.choice(["sum", "max"])
        if self.random.random() < 0.5:
            self.works.append(self.comm.all_reduce(tensor, reduce, async_op=True, label=label))
        else:
            self.comm.all_reduce(tensor, reduce, label=label)

    def resize(self) -> None:
        """The same tensor, of another shape."""
        self.tensors[1].resize_(self.random.choice([4, 5, 6])).zero_()

    def another_kind(self) -> None:
        self.comm.broadcast(self.tensors[0], src=self.random.randrange(2))
        self.comm.send(self.tensors[1], dst=1, tag=self.random.randrange(3))

    def wait(self) -> None:
        if self.works:
            work = self.random.choice(self.works)  # maybe for a second time
            work.wait(self.random.choice([None, 1.0]))

    def drop(self) -> None:
        if self.works:
            self.works.pop(self.random.randrange(len(self.works)))

    def look(self) -> None:
        self.transport.works[-1].done = True
        self.told.append([work.is_done() for work in self.works])

    def break_(self) -> None:
        """What is started from now on fails in some way, or does not."""
        errors = [None, None, PeerLost("rank 1 is gone", 1), KeyboardInterrupt("Ctrl-C"), ValueError("no")]
        self.transport.error = self.random.choice(errors)
        refusal = self.random.choice([None, None, ConnectionError("refused"), PeerLost("rank 1 is gone", 1)])
        self.transport.refuses = refusal

    def elsewhere(self) -> None:
        """From a thread of the program's own, whose operations belong to no step."""
        thread = threading.Thread(target=self.act, args=(self.reduce,))
        thread.start()
        thread.join()

    def end_step(self) -> None:
        self.recorder.set_step(self.recorder.step + 1)
        self.told.append([phase for phase, _ in self.clock.marks])
        self.told.append([number for number, *_ in self.clock.waits])
        self.clock.step_done(self.recorder.step, self.recorder.started, is_brief=self.random.random() < 0.5)

    def pass_step(self) -> None:
        """It ends one that was only counted, or that the program has marked."""
        for one in self.of_torch:
            one.number += self.random.randrange(3)
            one.inside = self.random.random() < 0.2
            one.is_there = self.random.random() < 0.95
        self.account.activities[:] = ["evaluate"] * (self.random.random() < 0.1)
        found: Any = self.random.choice([None] * 9 + ["found"])
        self.lookout.finding = found
        self.clock.summed_ns = (1,) * len(PHASES) if self.random.random() < 0.05 else ()
        self.clock.values = self.random.choice([None, None, None, lambda step: None])
        self.clock.begins_with_mark = self.random.random() < 0.05
        self.clock.samples = self.random.randrange(4)
        named, marks = self.random.choice([0, 0, 7]), len(self.clock.marks)
        self.told.append([self.passed(self.random.choice(["", "train.py:3 step"]), named, 5), marks, self.clock.step])
        self.told.append([self.clock.samples, len(self.clock.marks), self.clock.began_ns == self.clock.marks[0][1]])
        self.told.append([self.watcher.record.header().step, len(self.recorder.left), len(self.account.ended_ns)])
        steps = [self.clock.steps.popleft() for _ in range(len(self.clock.steps))]
        self.told.append([self.ends.operations, *([one.samples, one.operations, one.tokens] for one in steps)])
        self.told.append([self.clock.is_brief, len(self.clock.waits)])
        self.told += [[one.is_brief, one.together, [number for number, *_ in one.waits]] for one in steps]

    def switch(self) -> None:
        self.told.append(self.clock.switch(self.random.randrange(-1, len(PHASES))))

    def leave_for_later(self) -> None:
        leave_one(self.recorder)

    def act(self, do: Callable[[], None]) -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001
            self.told.append([repr(error), repr(error.__cause__)])

    def give_back(self) -> None:
        self.account.close()
        self.watcher.give_back()

    def tell(self) -> str:
        often = [self.reduce] * 6 + [self.wait] * 4 + [self.switch] * 3
        seldom = [self.resize, self.another_kind, self.drop, self.look, self.break_, self.elsewhere, self.end_step]
        acts = [*often, *seldom, self.pass_step, self.leave_for_later]
        for _ in range(_ACTS):
            self.act(self.random.choice(acts))
        self.works.clear()
        records = [
            one._replace(entered_ns=one.entered_ns > 0, left_ns=one.left_ns > 0) for one in self.watcher.records()
        ]
        lost = [repr(error) for error in self.watcher.asked]
        self.give_back()
        return json.dumps([records, self.told, lost, self.recorder.started])


if __name__ == "__main__":
    print(hasattr(FlightRecorder.enter, "__wrapped__"))
    for number in range(int(sys.argv[2])):
        here = Path(sys.argv[1], str(number))
        here.mkdir()
        print(Story(here, number).tell())
