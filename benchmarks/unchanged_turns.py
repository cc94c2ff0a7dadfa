"""One rank of `unchanged_script.py` that steps when it is told to, with what lockstep puts into torch and without.

    lockstep run --nproc-per-node 2 benchmarks/unchanged_turns.py FOLDER KIND

It reads three bytes from the pipe FOLDER/go-RANK and does as many steps as the first says, with all of it if the second
is 1 and without if it is 0, and writes to FOLDER/done-RANK what each took: seconds on the clock, of its main thread's
processor, and of the guard's. If the third is 1, the guard looks at these as at later steps of a run, else as at the
first. It ends with the pipe.

Both kinds of steps are those of one process: where a process finds its memory makes its steps longer or shorter for all
of its life, by as much as is looked for.
"""

from __future__ import annotations

import gc
import inspect
import operator
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
import torch.optim.optimizer as optimizers
from torch import nn

from lockstep.observe import pace
from lockstep.observe import patches as replaced
from lockstep.observe.patches import Patches
from unchanged_script import begin

FIGURES = struct.Struct("ddd")
_FIRST = 30  # steps, until nothing more is put in
_LEAST = 10  # things that are put in, or they were not found


@final
class Exchange:
    """What lockstep has put into torch."""

    def __init__(self, model: nn.Module) -> None:
        """All of it, now that `model` has been trained for some steps."""
        hooks: list[Any] = [param._backward_hooks for param in model.parameters()]
        hooks += [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        self._hooks = {id(one): (one, dict(one)) for one in hooks if one}  # which are exchanged in steps only counted
        patches = [one for one in gc.get_objects() if isinstance(one, Patches)]
        undo = [call for one in patches for call in one._undo if inspect.isfunction(call)]
        found = [inspect.getclosurevars(call).nonlocals for call in undo]
        ours = [each["new"] for each in found if "new" in each]
        self._replaced = [  # owner, name, what lay there, what is there now
            (each["owner"], each["name"], each["old"], vars(each["owner"])[each["name"]])
            for each in found
            if "new" in each and not any(each["old"] is one for one in ours)  # else it was replaced twice
        ]
        self._are_in = True
        assert len(self._replaced) + len(self._hooks) >= _LEAST, (self._replaced, self._hooks)

    def put(self, *, in_: bool) -> None:
        """Have it in torch, or not."""
        if in_ == self._are_in:
            return
        self._are_in = in_
        for key, (hooks, all_) in self._hooks.items():
            if not in_:
                self._hooks[key] = hooks, dict(hooks)
            hooks.clear()
            hooks.update(all_ if in_ else {})
        for owner, name, before, ours in self._replaced:
            if not in_ and before is replaced._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, ours if in_ else before)


def main(folder: Path, kind: str, rank: str) -> None:
    """Be that rank."""
    pace.FIRST = sys.maxsize
    model, step = begin(kind)
    for _ in range(_FIRST):
        step()
    exchange = Exchange(model)
    (guard,) = [thread.ident or 0 for thread in threading.enumerate() if thread.name == "lockstep-guard"]
    guards = time.pthread_getcpuclockid(guard)

    def now() -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), time.clock_gettime(guards)

    with (folder / f"go-{rank}").open("rb", 0) as go, (folder / f"done-{rank}").open("wb", 0) as done:
        while told := go.read(3):
            steps, is_in, is_later = told
            exchange.put(in_=is_in > 0)
            pace.FIRST = 1 if is_later else sys.maxsize
            for _ in range(steps):
                before = now()
                step()
                done.write(FIGURES.pack(*map(operator.sub, now(), before)))
    exchange.put(in_=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], os.environ["RANK"])
