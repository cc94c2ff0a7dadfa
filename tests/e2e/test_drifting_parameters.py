"""Parameters that nobody averages, in real runs: which are named, and which are each rank's own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from command_runs import Run, complaints

pytestmark = pytest.mark.limit_s(90)

_HEAD = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

def batch(step):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(7 * step + rank))

def steps(model, optimizer, number=2000, average=lambda: None):
    for step in range(number):
        optimizer.zero_grad()
        model(step)(batch(step)).square().sum().backward()
        average()
        optimizer.step()
        if number > 99:
            time.sleep(0.02)
"""
_BESIDE = """
body, head = DDP(torch.nn.Linear(3, 5)), torch.nn.Linear(5, 2)
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
steps(lambda step: lambda x: head(body(x)), optimizer)
"""
_BY_HAND = """
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
def average():
    for name, param in model.named_parameters():
        if name != "1.bias":
            dist.all_reduce(param.grad)
steps(lambda step: model, torch.optim.SGD(model.parameters(), 1e-4), average=average)
"""
_GATHERED = _BY_HAND.replace(
    "            dist.all_reduce(param.grad)\n",
    """            every = [torch.empty_like(param.grad) for _ in range(2)]
            dist.all_gather(every, param.grad)
            param.grad.copy_(sum(every) / 2)
""",
)
_HOOK = """
def hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / dist.get_world_size())
    return future
ddp = DDP(torch.nn.Linear(3, 2))
ddp.register_comm_hook(None, hook)
steps(lambda step: ddp, torch.optim.SGD(ddp.parameters(), 1e-4), 60)
"""
_PERIOD = _HOOK.replace(
    "1e-4), 60)",
    """1e-4), 60, average)
""",
).replace(
    "def hook",
    """calls = []
def average():
    calls.append(0)
    for param in ddp.parameters() if len(calls) % 25 == 0 else ():
        dist.all_reduce(param.data)
        param.data /= dist.get_world_size()

def hook""",
)
_PAST = """
ddp = DDP(torch.nn.Linear(3, 2))
steps(lambda step: ddp.module if rank == 1 and step >= 5 else ddp, torch.optim.SGD(ddp.parameters(), 1e-4))
"""
_ONCE = """
model, calls = torch.nn.Linear(3, 2), []
def average():
    calls.append(0)
    if rank == 1 and len(calls) == 12:
        return dist.all_reduce(model.weight.grad.clone()), dist.all_reduce(model.bias.grad)
    dist.all_reduce(model.weight.grad)
    dist.all_reduce(model.bias.grad)
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
steps(lambda step: model, optimizer, 30, average)
optimizer.zero_grad()
dist.destroy_process_group()
"""
_LOCAL = """
model, calls = torch.nn.Linear(3, 2), []
def average():
    calls.append(0)
    if len(calls) <= 10:
        dist.all_reduce(model.weight.grad)
        dist.all_reduce(model.bias.grad)
    elif len(calls) == 20:
        dist.all_reduce(model.weight.data)
        dist.all_reduce(model.bias.data)
    dist.all_reduce(torch.ones(2))  # a metric
optimizer = torch.optim.SGD(model.parameters(), 1e-4)
steps(lambda step: model, optimizer, 30, average)
optimizer.zero_grad()
"""
_SAID = {  # name -> ranks, program, what is said
    "beside what DDP wraps": (
        2,
        _BESIDE,
        # Adam may have moved the bias alike in its first step
        r"UNAVERAGED gradients of [12] parameters?, seen after step 1\.\n  parameter '2 of group 0'(?s:.*)began alike",
    ),
    "left out by hand": (
        2,
        _BY_HAND,
        r"UNAVERAGED gradients of 1 parameter, seen after step 1\.\n  parameter '1\.bias' began alike on all ranks",
    ),
    "left out where others are gathered": (
        2,
        _GATHERED,
        r"UNAVERAGED gradients of 1 parameter, (?s:.*)'1\.bias' began",
    ),
    "a hook that sends nothing": (2, _HOOK, r"UNAVERAGED gradients of 2 parameters, (?s:.*)the comm hook gave each"),
    "by hand, in all steps but one": (
        2,
        _ONCE,
        r"REPLICAS differ after step 30, equal after step 8\.  Culprits: ranks 0,1",
    ),
    "past DDP on one rank": (
        3,
        _PAST,
        r"PAST DDP on some ranks only, since step 6\.  Culprit: rank 1 (?s:.*)"
        r"rank 1: in step 6 a backward went past DistributedDataParallel, at train\.py:\d+ steps\n",
    ),
}


@pytest.mark.parametrize("name", _SAID)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    ranks, body, pattern = _SAID[name]
    (tmp_path / "train.py").write_text(_HEAD + body)
    words = ("run", "--record=off", f"--nproc-per-node={ranks}", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_EVIDENCE="")) as run:
        run.await_text(pattern)


# other ones from the start, beside those that DDP averages, in one optimizer that keeps a state of each
_OWN = _BESIDE.replace("body, head", "torch.manual_seed(rank)\nbody, head").replace("optimizer)", "optimizer, 25)")


@pytest.mark.parametrize("body", [_OWN, _LOCAL, _PERIOD], ids=["own", "averaged at first", "averaged now and then"])
def test_parameters_of_each_rank_s_own_are_left_alone(body: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_HEAD + body)
    words = ("run", "--record=off", "--nproc-per-node=2", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_EVIDENCE="")) as run:
        assert complaints(run.end(0)) == []
