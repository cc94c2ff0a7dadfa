"""Real runs in which nothing is wrong, though much of it looks so: the guard must not say a word.

Nothing may move for a second, and each of these makes ranks wait longer than that.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_runs import Run, complaints

pytestmark = pytest.mark.limit_s(120)

_HEAD = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()

def until(seconds, work):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()

def train(model, steps, lr=0.01):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

_SCRIPTS = {
    "slow checkpoint on rank 0": """
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
def save():
    with open("checkpoint.pt", "wb") as file:
        torch.save({"weights": torch.zeros(1_000_000)}, file)
        os.fsync(file.fileno())
if rank == 0:
    until(4, save)
dist.barrier()
train(ddp, 5)
""",
    "long evaluation on rank 0": """
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
if rank == 0:
    with torch.no_grad():
        until(4, lambda: ddp.module(torch.randn(512, 4)))
dist.barrier()
train(ddp, 5)
""",
    "compilation on rank 1": """
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
if rank == 1:  # stands still in a frame of torch's compiler, as it does while it waits for a C++ compiler
    import torch._dynamo.convert_frame as compiler
    exec(compile("time.sleep(4)", compiler.__file__, "exec"), {"time": time})
train(ddp, 5)
""",
    "C code that holds Python's lock on rank 1": """
dist.barrier()
if rank == 1:  # as json.loads and pickle.loads do: not even the guard runs meanwhile
    began = time.monotonic()
    sum(range(5_000_000))
    sum(range(int(5_000_000 * 4 / (time.monotonic() - began))))
dist.barrier()
""",
    "a wait that is cut into slices": """
from datetime import timedelta
time.sleep(1.2 * rank)
work = dist.all_reduce(torch.ones(4), async_op=True)
while not work.is_completed():
    try:
        work.wait(timedelta(milliseconds=300))
    except RuntimeError:
        pass
""",
    "uneven inputs with join": """
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
with ddp.join():
    for _ in range(30 - 20 * rank):
        ddp(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.15)
""",
    "gradient accumulation with no_sync": """
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for _ in range(3):
    with ddp.no_sync():
        for _ in range(3):
            ddp(torch.randn(8, 4)).square().mean().backward()
            time.sleep(0.6 * rank)  # in all more than the limit, at one place less
    ddp(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "groups of few ranks": """
groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2])]
for step in range(60):
    for number, group in enumerate(groups):
        if rank in ((0, 1), (1, 2), (2,))[number] and (step + number) % 3:
            dist.all_reduce(torch.ones(4 + number), group=group)
    if rank == 2:
        time.sleep(0.05)
dist.barrier()
""",
    "two ranks of three that go on by themselves, at one line": """
pair = dist.new_group([0, 1])
talk = [lambda: dist.all_reduce(torch.ones(4), group=pair)]
talk.append(lambda: dist.send(torch.ones(3), 0) if rank else dist.recv(torch.ones(3), 1))
for step in range(25 if rank < 2 else 0):
    (talk[step % 2](), time.sleep(0.2))
dist.barrier()
""",
    "GradScaler that meets infinity": """
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
for step in range(60):
    loss = ddp(torch.randn(8, 4)).square().mean() * (float("inf") if step % 10 == 5 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    time.sleep(0.03)
""",
    "one rank that sleeps shorter than the limit": """
for step in range(6):
    if rank == 1:
        time.sleep(0.7)
    dist.all_reduce(torch.ones(4))
""",
    "one slow rank from the first step on": """
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(5):
    ddp(torch.randn(8, 4)).square().mean().backward()
    if rank == 1:
        until(1.5, lambda: torch.randn(64, 64) @ torch.randn(64, 64))
    optimizer.step()
    optimizer.zero_grad()
""",
    "a debugger within rank 1": """
import io, pdb
class Slow(io.StringIO):
    def readline(self, *_):
        time.sleep(4)
        return "continue\\n"
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
if rank == 1:
    debugger = pdb.Pdb(stdin=Slow(), stdout=io.StringIO())
    debugger.use_rawinput = False
    debugger.set_trace()
train(ddp, 5)
""",
    "garbage collection on rank 1": """
import gc
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
if rank == 1:
    junk = [[i] for i in range(500_000)]
    for one, other in zip(junk, junk[1:]):
        one.append(other)
    until(4, gc.collect)
    del junk, one, other
dist.barrier()
train(ddp, 5)
""",
    "all ranks are stopped and go on": """
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
pids = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
dist.all_gather(pids, torch.tensor([os.getpid()]))
if rank == 0:  # as a laptop that sleeps, or Ctrl-Z
    import subprocess
    all_of_them = " ".join(str(pid.item()) for pid in pids)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {all_of_them}; sleep 4; kill -CONT {all_of_them}"])
for _ in range(60):
    train(ddp, 1)
    time.sleep(0.03)
""",
    "clocks that jump": """
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
day, steady, steady_ns = time.time, time.monotonic, time.monotonic_ns
time.time = lambda: day() + (3600 if rank else -3600)
time.monotonic = lambda: steady() + 60
time.monotonic_ns = lambda: steady_ns() + 60 * 10**9
for _ in range(40):
    train(ddp, 1)
    time.sleep(0.03)
""",
    "a loader that computes long on rank 1": """
from torch.utils.data import DataLoader, Dataset, DistributedSampler
class Slow(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        until(0.25 * rank, lambda: sum(range(1000)))
        return torch.full((4,), float(index))
data = Slow()
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-5)
for x in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
    ddp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "uneven work after training": """
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 20)
dist.destroy_process_group()
if rank == 0:
    time.sleep(3)
""",
}

# another process holds rank 1, as `gdb -p` or `py-spy` does
_DEBUGGED = """
import ctypes, subprocess
ddp = DDP(torch.nn.Linear(4, 2))
train(ddp, 5)
if rank == 1:
    libc = ctypes.CDLL(None)
    libc.prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # whoever asks may
    subprocess.run([sys.executable, "debugger.py", str(os.getpid())])
train(ddp, 5)
"""
_HANDLED = """
import lockstep
os.environ["LOCKSTEP_SHM"] = "off"
comm, kept = lockstep.init(verbose=False), dist.new_group()
part, stock, tensor = comm.split(0), dist.new_group(), torch.ones(3)
part.all_reduce(tensor)
dist.all_reduce(tensor, group=stock)
try:
    raise ValueError("handled")
except ValueError:
    works = [comm.all_reduce(tensor, async_op=True), dist.all_reduce(torch.ones(3), async_op=True)]
    part.close()
    dist.destroy_process_group(stock)
    for work in works:
        work.wait()
comm.all_reduce(tensor)
dist.all_reduce(tensor, group=kept)
"""
_DEBUGGER = """
import ctypes, os, sys, time
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
libc.ptrace.argtypes = [ctypes.c_long] * 4
if libc.ptrace(16, pid, 0, 0):  # attach
    sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
os.waitpid(pid, 0x40000000)
time.sleep(4)
libc.ptrace(17, pid, 0, 0)  # detach
"""
_END = """
print(f"rank {rank} is done\\n", end="")
if dist.is_initialized():
    dist.destroy_process_group()
"""
_RANKS = {name: 3 for name in _SCRIPTS if "groups of few ranks" in name or "of three" in name}


def _run(folder: Path, name: str, body: str, *, warm: bool = True) -> str:
    """The output of a run that ended well."""
    (folder / "train.py").write_text(_HEAD + body + _END)
    ranks = _RANKS.get(name, 2)
    variables = {"LOCKSTEP_HANG_S": "1", "LOCKSTEP_EVIDENCE": str(folder / "evidence")}
    run = Run(folder, "run", "--nproc-per-node", str(ranks), "train.py", warm=warm, **variables)
    try:
        output = run.end(0)
    finally:
        run.close()
    assert sorted(re.findall(r"rank (\d) is done", output)) == [str(rank) for rank in range(ranks)]
    return output


@pytest.mark.parametrize("name", _SCRIPTS)
def test_nothing_is_said(name: str, tmp_path: Path) -> None:
    output = _run(tmp_path, name, _SCRIPTS[name])
    assert complaints(output) == []
    assert not (tmp_path / "evidence").exists()


def test_groups_are_used_on_where_others_end_as_an_error_is_handled(tmp_path: Path) -> None:
    assert complaints(_run(tmp_path, "", _HANDLED)) == []


_WRAPS, _PREPARES = "ddp = DDP(torch.nn.Linear(4, 2))\n", "if rank == 1:\n    time.sleep(4)\n"


@pytest.mark.parametrize(
    ("body", "line", "last"),
    [
        (_PREPARES + _WRAPS, 21, "nothing yet|init_process_group .*"),
        (_WRAPS + _PREPARES, 22, r".*, train\.py:20 <module>"),
    ],
    ids=["before its first call", "before its first step"],
)
def test_a_rank_that_prepares_the_data_is_no_hang(tmp_path: Path, body: str, line: int, last: str) -> None:
    output = _run(tmp_path, "", body + "train(ddp, 5)\n")
    assert len(complaints(output)) == 1
    assert re.search(r"lockstep: waiting for rank 1 for \d\.\d s in step 1; no fault so far\n", output)
    at = rf"\n  rank 1 is still starting: at train\.py:{line} <module>, unmoved for .*\n    issued last: ({last})\n"
    assert re.search(at, output), output


def test_nothing_is_said_of_a_rank_that_a_debugger_holds(tmp_path: Path) -> None:
    (tmp_path / "debugger.py").write_text(_DEBUGGER)
    output = _run(tmp_path, "debugger", _DEBUGGED, warm=False)
    if "ptrace: " in output:
        pytest.skip("no process may debug another here")
    assert complaints(output) == []
