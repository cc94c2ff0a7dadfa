"""The guard's thread and the program's share locks: nobody waits for others in a circle, nor in a fork for nobody."""

from __future__ import annotations

import ast
import os
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from command_runs import Run

# before the interpreter knows of lockstep: a lock of its own notes which ones a thread has that takes it
_NOTING = """
import os
import sys
import threading

held, known, make = threading.local(), set(), {name: getattr(threading, name) for name in ("Lock", "RLock")}


class Noting:
    def __init__(self, lock, place):
        self.lock, self.place = lock, place

    def acquire(self, *args, **kwargs):
        got = self.lock.acquire(*args, **kwargs)
        if got:
            mine = vars(held).setdefault("locks", [])
            for other in () if self in mine else mine:
                pair = other.place, self.place
                if pair not in known:
                    known.add(pair)
                    with open(os.environ["LOCKS"], "a") as file:
                        file.write(repr(pair) + chr(10))
            mine.append(self)
        return got

    def release(self):
        vars(held)["locks"].reverse()
        vars(held)["locks"].remove(self)
        vars(held)["locks"].reverse()
        self.lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()


def making(name):
    def new():
        code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
        folder, _, file = code.co_filename.rpartition(os.sep)
        is_ours = f"{os.sep}lockstep{os.sep}observe" in folder
        return Noting(make[name](), f"{file}:{line}") if is_ours else make[name]()

    return new


for name in make:
    setattr(threading, name, making(name))
"""
_PROGRAM = """
import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(torch.ones(12, 4))
for backend in ("gloo", "lockstep", "gloo"):
    dist.init_process_group(backend)
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(data, 2, sampler=DistributedSampler(data)):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), f"model-{dist.get_rank()}.pt")
    for work in works:
        work.wait()
    del model, optimizer, works, work, group, other
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
"""
# every lock of the guard is held by another thread when this forks: in the child nobody ever lets go of one
_FORKING = """
import faulthandler
import gc
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.observe.process_guard import current_guard
from lockstep.observe.sights import FlightRecord

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard, kinds = current_guard(), (type(threading.Lock()), type(threading.RLock()))


def train(steps):
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def hold(held, has_all, is_over):
    ours = [each for each in gc.get_objects() if type(each).__module__.startswith("lockstep.observe")]
    fields = [field for each in ours for field in getattr(each, "__dict__", {}).values()]
    fields += [field._cond._lock for field in fields if isinstance(field, threading.Event)]
    locks = [*{id(field): field for field in fields if isinstance(field, kinds)}.values()]  # two may have one
    while len(held) < len(locks):
        lock = locks[len(held)]
        if lock.acquire(timeout=0.1):
            held.append(lock)
        while held and held[-1] is not lock:  # the guard's thread has it, and may wait for one of these
            held.pop().release()
    has_all.set()
    is_over.wait()
    for lock in reversed(held):
        lock.release()


train(3)
held, has_all, is_over = [], threading.Event(), threading.Event()
thread = threading.Thread(target=hold, args=(held, has_all, is_over))
thread.start()
has_all.wait()
pids = []
for way in ("leave", "train", "fail"):
    pids.append(os.fork())
    if not pids[-1]:
        faulthandler.dump_traceback_later(20, exit=True)
        if way == "train":
            model = model.module
            train(4)
        if way == "fail":
            raise ConnectionResetError("Connection reset by peer")
        sys.exit(7)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
step = FlightRecord(guard.recorder.path).header().step
is_over.set()
thread.join()
train(2)
print("locks", len(held) >= 7, "children", codes, "steps", step, guard.recorder.step)
dist.destroy_process_group()
"""


@pytest.mark.limit_s(90)
def test_no_two_threads_can_ever_wait_for_each_other(tmp_path: Path) -> None:
    """Of locks that are taken one within another there is an order, whoever takes them."""
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(_NOTING)
    (tmp_path / "script.py").write_text(_PROGRAM)
    found = tmp_path / "locks"
    path = os.pathsep.join([str(tmp_path / "early"), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = Run(tmp_path, "run", "--nproc-per-node", "2", "script.py", PYTHONPATH=path, LOCKS=str(found))
    assert "GUARD of rank" not in run.end(0)
    within: dict[str, set[str]] = {}
    for outer, inner in map(ast.literal_eval, found.read_text().splitlines()):
        within.setdefault(inner, set()).add(outer)
    assert any(outer.startswith("lookout.py") for outers in within.values() for outer in outers)
    tuple(TopologicalSorter(within).static_order())  # raises CycleError, which names the circle


@pytest.mark.limit_s(90)
def test_a_forked_process_waits_for_no_thread_of_its_parent_and_says_nothing_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_FORKING)
    said = Run(tmp_path, "run", "--nproc-per-node", "2", "script.py").end(0)
    assert said.count("locks True children [7, 7, 1] steps 3 5") == 2
    assert "lockstep: " not in said.replace("lockstep: report: ", "")
