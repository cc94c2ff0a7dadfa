"""Faults and waits that are not in the table: who is named, and what is not said."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from command_runs import Run, complaints

pytestmark = pytest.mark.limit_s(90)

_HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""
_TRAIN = """
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(1, 41):
    try:
        if rank == 1 and step == 1:
            raise ValueError("broken sample")
        ddp(torch.randn(8, 4)).square().mean().backward()
    except ValueError:
        pass
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""
_EPOCHS = """
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for epoch in range(3):
    dist.broadcast(torch.ones(9), 0)
    for batch in range(8):
        loss = ddp(torch.randn(8, 4)).square().mean()
        if epoch == {epoch} and batch == 2 and rank == {guilty}:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
_TWICE = (
    r"MISMATCH in step \d+, .*Culprit: (rank \d) (?s:.*)\n  \1 called its model 2 times in step (3|11): was a backward"
)
_CUT = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(5 + (rank == {guilty}))
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))
for layer in model:
    fully_shard(layer)  # here
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
_RING = """
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 9):
    is_odd, P2POp, last = step == 4 and rank == GUILTY, dist.P2POp, dist.get_world_size() - 1
    send = P2POp(dist.isend, torch.ones(4), 0 if rank == last else rank + 1, tag=3)
    recv = P2POp(dist.irecv, torch.ones(4), last if rank == 0 else rank - 1, tag=7 if is_odd and ODD_TAG else 3)
    works = dist.batch_isend_irecv([send] if is_odd and not ODD_TAG else [send, recv])  # here
    for work in works:
        work.wait()
    weight.grad = torch.ones(3)
    dist.all_reduce(weight.grad)
    optimizer.step()
"""
_PAIR = """
for turn in range(9):
    message = torch.ones(4)
    for is_send in (rank == 0, rank != 0):
        if is_send and not (rank == 0 and turn == 5):
            dist.send(message, 1 - rank)  # here
        elif not is_send:
            dist.recv(message, 1 - rank)
"""
_IN_A_THREAD = """
import threading
ddp = DDP(torch.nn.Linear(4, 2))
def backward(loss):
    loss.backward()  # here
for turn in range(5 - rank):
    thread = threading.Thread(target=backward, args=(ddp(torch.randn(8, 4)).sum(),))
    thread.start()
    thread.join()
"""
_PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
stage = PipelineStage(torch.nn.Linear(4, 4), rank, 3, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.MSELoss())
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
for step in range(1, 9):
    if rank == 1 and step == 5:
        schedule._n_microbatches = 6
        for infos in (stage.args_recv_info, stage.grad_recv_info):
            infos.update({number: infos[0] for number in (4, 5)})
    given = {0: (torch.ones(8, 4),)}.get(rank, ())
    schedule.step(*given, **({"target": torch.ones(8, 4)} if rank == 2 else {}))  # here
    optimizer.step()
"""
_DROPPED = """
dist.barrier()
for step in range(2):
    if rank == 0:
        dist.isend(torch.ones(4), 1)  # here
    else:
        time.sleep(0.7)
        dist.recv(torch.ones(4), 0)
dist.barrier()
"""
_STAGES = """
last = dist.get_world_size() - 1
for step in range({sends} if rank == 0 else {asks} if rank == last else 0):
    if rank == 0:
        dist.send(torch.ones(4, dtype={dtype}), last)
    else:
        dist.recv(torch.ones(4), 0)
"""
_APART = (
    r"HANG: no match of messages for .* in step 4\.  Culprit: rank {0} (?s:.*)\n  rank \d waits in send float32 \[4\] "
)
_APART += (
    r"to rank {0} tag 3, train\.py:HERE .*\n    not asked for by rank {0}; its last: recv .* tag {1} at .* \(step {2}\)"
)
_SEEDS = r"REPLICAS differ: built from different seeds\.  "
_OF = r"  parameter '0\.weight' is \w+ on ranks? [\d, ]+, \w+ on rank \d\n(?s:.*): cut at train\.py:HERE <module>\n"
_COMES_LATE = "import lockstep\ndist.all_reduce(torch.ones(3))\ntime.sleep(60 * rank)\n"
_MEETS = (
    r"HANG: .*Culprit: rank 1 (?s:.*)rank 1 is not there: at train\.py:\d+ .*\n(?s:.*)"
    r"\n  rank 0 waits in all_gather .* of group lockstep 0 meets, train\.py:HERE "
)
_SAID = {  # name -> ranks, program, what is said
    "a model of another dtype, whose rank Gloo aborts": (
        2, "DDP(torch.nn.Linear(4, 4, dtype=torch.float64 if rank == 0 else torch.float32))  # here\ntime.sleep(1)",
        r"MODELS differ.*Culprits: ranks 0,1\n.*'weight'(?s:.*)wrapped at train\.py:HERE",
    ),
    "other buffers": (
        4, "norm = torch.nn.BatchNorm1d(4, track_running_stats=rank != 3)\nmodel = torch.nn.Sequential(norm)\n"
        "DDP(model)  # here\ntime.sleep(1)",
        r"MODELS differ.*Culprit: rank 3 (?s:.*)wrapped at train\.py:HERE",
    ),
    "one call too many at the end of a step": (
        3, "weight = torch.nn.Parameter(torch.ones(2, 4))\noptimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for step in range(1, 80):\n    weight.grad = torch.ones(2, 4)\n    dist.all_reduce(weight.grad)\n"
        "    if rank == 1 and step == 50:\n        dist.all_reduce(torch.ones(3))  # here\n"
        "    optimizer.step()\n    time.sleep(0.01)",
        r"MISMATCH in step 50.*Culprit: rank 1 "
        r"(?s:.*)rank 1 alone issued all_reduce float32 \[3\] sum at train\.py:HERE",
    ),
    "a call of a few ranks that one skips": (
        3, "group = dist.new_group([1, 2])\nweight = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\nfor step in range(1, 60):\n    dist.all_reduce(torch.ones(2))\n"
        "    if rank == 1 or rank == 2 and step != 10:\n        dist.all_reduce(torch.ones(5), group=group)  # here\n"
        "    weight.grad = torch.ones(3)\n    optimizer.step()",
        r"DEADLOCK in step 10:.*Culprit: rank 2\n(?s:.*)rank 1 waits in .* of group 1 \[1, 2\], train\.py:HERE"
        r"(?s:.*)rank 2 is in step 11 already",
    ),
    "a step of one of two models that a rank skips": (  # Gloo aborts rank 0, which gets more than it asked for
        2, "models = [DDP(torch.nn.Linear(8, size)) for size in (64, 16)]\n"
        "optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]\nfor step in range(40):\n"
        "    models[0](torch.randn(4, 8)).mean().backward()\n    optimizers[0].step()\n"
        "    if rank == 1 and step == 20:\n        continue\n"
        "    models[1](torch.randn(4, 8)).mean().backward()  # here\n    optimizers[1].step()",
        r"GONE in step 2\d.*Culprit: rank 0 .*\n  rank 0 \(pid \d+\) was killed by SIGABRT at train\.py:HERE\n"
        r"(?s:.*)rank 1 waits in collective .*, train\.py:11(?s:.*)did the ranks make other calls"
        r"(?s:.*)rank 0 has left its stacks:\nFatal Python error: Aborted",
    ),
    "a shape of two ranks before the third has come": (  # Gloo aborts rank 2, which gets more than it asked for
        3, "time.sleep(9.0 * (rank == 1))\ndist.broadcast(torch.ones(20 if rank == 0 else 10), 0)  # here",
        r"MISMATCH in step 1, .*Culprits: ranks 0,2\n.*: they differ in shape\n"
        r"    rank 0: broadcast float32 \[20\] root=0 at train\.py:HERE (?s:.*)rank 2: broadcast float32 \[10\] root",
    ),
    "a crash in native code": (
        2, "import ctypes\nfor step in range(9):\n    dist.all_reduce(torch.ones(3))\n    if rank == 1 and step == 5:\n"
        "        ctypes.string_at(0)  # here",
        r"PeerFailed: GONE(?s:.*)rank 1 \(pid \d+\) was killed by SIGSEGV at train\.py:HERE; rank 0",
    ),
    "groups made for other ranks": (
        3, "dist.new_group([0, 1] if rank != 1 else [1, 2])  # here",
        r"MISMATCH.*Culprit: rank 1 (?s:.*)differ in ranks\n(?s:.*)rank 1: new_group \[1, 2\] at train\.py:HERE",
    ),
    "a backward that is left out in the first step": (  # by whichever a guard sees first: the model is another at once
        3, _TRAIN, r"lockstep: (STEPS differ since|REPLICAS differ after) step 1\b.*Culprit: rank 1 "
    ),
    "two ranks that end early": (
        4, "for step in range(20):\n    if step == 10 and rank in (0, 3):\n        sys.exit(0)\n"
        "    dist.all_reduce(torch.ones(4))  # here\n    time.sleep(0.02)",
        r"FINISHED too early.*Culprits: ranks 0,3\n(?s:.*)rank \d wanted an 11th \(all_reduce, train\.py:HERE",
    ),
    "a batch that rank 0 of two leaves out, in the first epoch": (2, _EPOCHS.format(epoch=0, guilty=0), _TWICE),
    "a batch that rank 1 of two leaves out, in the second epoch": (2, _EPOCHS.format(epoch=1, guilty=1), _TWICE),
    "a batch too many on rank 0 of two, in the third epoch": (
        2, _EPOCHS.format(epoch=9, guilty=1).replace("range(3)", "range(4)").replace(
            "range(8)", "range(8 + (epoch == 2 and rank == 0))"
        ),
        r"MISMATCH in step 25.*Culprit: rank 0 (?s:.*)rank 1: broadcast float32 \[9\] root=0 at train\.py",
    ),
    "a batch too many on rank 1 of two, in the first epoch": (
        2, _EPOCHS.format(epoch=9, guilty=1).replace("range(8)", "range(8 + (epoch == 0 and rank == 1))"),
        r"MISMATCH in step 9.*Culprits: ranks 0,1\n",
    ),
    "statistics of BatchNorm, soon": (
        2, "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))\n"
        "ddp = DDP(model, broadcast_buffers=False)\noptimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)\n"
        "for step in range(10):\n    ddp(torch.randn(8, 4) + rank).square().mean().backward()\n"
        "    optimizer.step()\ntime.sleep(60)",
        r"BUFFERS differ on ranks 0,1",
    ),
    "another seed on rank 1 of two, then cut": (2, _CUT.format(guilty=1), _SEEDS + r"Culprits: ranks 0,1\n" + _OF),
    "another seed on rank 0 of three, then cut": (3, _CUT.format(guilty=0), _SEEDS + r"Culprit: rank 0 .*\n" + _OF),
    "another seed on rank 2 of three, then cut": (3, _CUT.format(guilty=2), _SEEDS + r"Culprit: rank 2 .*\n" + _OF),
    "a message of another dtype": (
        3, _STAGES.format(dtype="torch.float64 if step == 1500 else torch.float32", sends=1600, asks=1600),
        r"MISMATCH in step 1\.  Culprits: ranks 0,2\n  rank 2 asked for less than was sent, in their 1501st message:"
        r"\n    rank 0: send float64 \[4\] to rank 2 tag 0 at train\.py:1\d .*\n    rank 2: recv float32 \[4\] from",
    ),
    "a message of another dtype, of as many bytes": (
        3, _STAGES.format(dtype="torch.int32 if step == 850 else torch.float32", sends=900, asks=900),
        r"MISMATCH in step 1\.  Culprits: ranks 0,2\n  rank 2 asked for another dtype than was sent, in their 851st "
        r"message:\n    rank 0: send int32 \[4\] to rank 2 tag 0 at train\.py:1\d .*\n    rank 2: recv float32 \[4\] ",
    ),
    "a send whose Work nobody keeps": (
        2, _DROPPED,
        r"HANG for a lost message, for \d.* in step 1\.  Culprit: rank 0 .*\n  rank 1 waits in recv float32 \[4\] "
        r"(?s:.*)rank 0 had dropped the Work of \d by then, the last: send float32 \[4\] to rank 1 tag 0 "
        r"at\s+train\.py:HERE\s",
    ),
    "a message too few": (
        3, _STAGES.format(dtype="None", sends=1200, asks=1201),
        r"FINISHED too early.*Culprit: rank 0 (?s:.*)\n  rank 0 sent 1200, the last at .*\n  rank 2 asked for 1201, ",
    ),
    "a message too many": (
        2, _STAGES.format(dtype="None", sends=13, asks=12),
        r"FINISHED too early.*Culprit: rank 1 (?s:.*)\n  rank 0 sent 13, the last at .*\n  rank 1 asked for 12, ",
    ),
    "two ranks that are killed at once": (
        4, "pids = [None] * 4\ndist.all_gather_object(pids, os.getpid())\n"
        "for step in range(9):\n    if (step, rank) == (5, 1):\n"
        "        os.kill(pids[2], signal.SIGKILL)\n        os.kill(pids[1], signal.SIGKILL)\n"
        "    dist.all_reduce(torch.ones(4))\n    time.sleep(0.02)",
        # a guard may look when a process that was killed has ended and the other still has to be given time for it
        r"GONE.*(Culprits: ranks 1,2\n|Culprit: rank [12] )(?s:.*)lockstep: rank ([12]) .* was killed by SIGKILL; "
        r"so was rank (?!\2)[12] \(pid \d+\)[^;]*; ",
    ),
    "a barrier in a finally, which an error of one rank has come to": (
        2, "try:\n    for step in range(10):\n        if rank == 1 and step == 5:\n"
        "            raise FileNotFoundError('shard-5')  # here\n        dist.all_reduce(torch.ones(4))\n"
        "finally:\n    dist.barrier()",
        r"MISMATCH.*Culprit: rank 1 (?s:.*)rank 1 was handling FileNotFoundError: shard-5, at .*train\.py:HERE\n(?s:.*)"
        r"FileNotFoundError: shard-5\n(?s:.*)During handling of the above exception, another exception occurred",
    ),
    "a group that one rank has destroyed": (
        3, "pair = dist.new_group([0, 1])\nfor step in range(10):\n    if rank < 2 and pair is not None:\n"
        "        dist.all_reduce(torch.ones(4), group=pair)\n    if rank == 1 and step == 6:\n"
        "        dist.destroy_process_group(pair)  # here\n        pair = None\n    dist.all_reduce(torch.ones(4))",
        r"FINISHED too early.*Culprit: rank 1 (?s:.*)rank 1 destroyed group 1 \[0, 1\] at train\.py:HERE",
    ),
    "a send that is left out where no steps are counted": (
        2, _PAIR,
        r"DEADLOCK in step 1: .*\.  Culprit: rank 0\n  rank 0 made recv float32 \[4\] from rank 1 (?s:.*), where it "
        r"made send float32 \[4\]\s+to rank 1 tag 0 at train\.py:HERE <module> before\n",
    ),
    "a call of two ranks that one skips before all meet": (
        4, "group = dist.new_group([0, 1])\nfor turn in range(6):\n    if rank < 2 and not (rank == 1 and turn == 3):\n"
        "        dist.all_reduce(torch.ones(4), group=group)  # here\n    dist.barrier()",
        r"DEADLOCK in step 1: .*\.  Culprit: rank 1\n  rank 1 made barrier of group WORLD at (?s:.*)where it made"
        r"(?s:.*)\[0,\s+1\]\s+at\s+train\.py:HERE\s+<module>\s+before\n",
    ),
    "a backward too few, where another thread runs it": (
        2, _IN_A_THREAD,
        r"FINISHED too early(?s:.*)rank 0 waits in collective started by .* of group WORLD, train\.py:HERE backward",
    ),
    "a pipeline with other microbatches on one rank": (
        3, _PIPELINE,
        r"DEADLOCK in step 5: .*\.  Culprit: rank 1\n  rank 1 made recv float32 \[2, 4\] from rank 0 (?s:.*)"
        r"    not sent by rank 0: it is the 5th in step 5, rank 0 sent 4, the last at train\.py:HERE <module>\n",
    ),
    "a tag of rank 1 of two": (2, _RING.replace("GUILTY", "1").replace("ODD_TAG", "True"), _APART.format(1, 7, 4)),
    "a receive of rank 0 of two that is left out": (
        2, _RING.replace("GUILTY", "0").replace("ODD_TAG", "False"), _APART.format(0, 3, 3),
    ),
    "a receive of rank 2 of three that is left out": (
        3, _RING.replace("GUILTY", "2").replace("ODD_TAG", "False"), _APART.format(2, 3, 3),
    ),
    "a rank that does not come to where a model is wrapped by ours": (
        2, _COMES_LATE + "lockstep.DistributedDataParallel(torch.nn.Linear(4, 4))  # here", _MEETS,
    ),
    "a wait that is cut into slices": (
        2, "from datetime import timedelta\ndist.all_reduce(torch.ones(3))\ntime.sleep(60 * rank)\n"
        "work = dist.all_reduce(torch.ones(4), async_op=True)  # here\nwhile not work.is_completed():\n"
        "    try:\n        work.wait(timedelta(seconds=0.5))\n    except RuntimeError:\n        pass",
        r"HANG: .*Culprit: rank 1 (?s:.*)\n  rank 0 waits in all_reduce .* train\.py:HERE ",
    ),
    "a wait that asks in a loop without a pause": (
        2, "dist.all_reduce(torch.ones(3))\ntime.sleep(60 * rank)\n"
        "work = dist.all_reduce(torch.ones(4), async_op=True)  # here\n"
        "while not work.is_completed():\n    pass",
        r"HANG: .*Culprit: rank 1 (?s:.*)\n  rank 0 waits in all_reduce .* train\.py:HERE ",
    ),
    "a rank that sleeps within Join": (
        2, "ddp = DDP(torch.nn.Linear(4, 4))\nwith ddp.join():\n    for batch in range(10 - 7 * rank):\n"
        "        time.sleep(60 * (rank == 0 and batch == 5))  # here\n        ddp(torch.ones(2, 4)).sum().backward()",
        r"HANG: .*Culprit: rank 0 (?s:.*)rank 0 is not there: at train\.py:HERE ",
    ),
    "a rank that does not come to lockstep.init": (2, _COMES_LATE + "lockstep.init()  # here", _MEETS),
}  # fmt: skip


@pytest.mark.parametrize("name", _SAID)
def test_what_is_said(name: str, tmp_path: Path) -> None:
    ranks, body, pattern = _SAID[name]
    source = _HEAD + body + "\n"
    (tmp_path / "train.py").write_text(source)
    here = [number for number, line in enumerate(source.splitlines(), 1) if "# here" in line]
    words = ("run", "--record=off", f"--nproc-per-node={ranks}", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="2", LOCKSTEP_EVIDENCE="")) as run:
        run.await_text(pattern.replace("HERE", "".join(map(str, here))))


def test_a_process_forked_off_that_crashes_says_so_itself(tmp_path: Path) -> None:
    body = """
for turn in range(2):  # one after the other: what two write at the same time is mixed
    if turn == rank:
        if (child := os.fork()) == 0:
            os.abort()
        os.waitpid(child, 0)
    dist.all_reduce(torch.ones(3))
"""
    (tmp_path / "train.py").write_text(_HEAD + body)
    with contextlib.closing(Run(tmp_path, "run", "--record=off", "--nproc-per-node=2", "train.py", warm=True)) as run:
        said = run.end(0)
    assert said.count("Fatal Python error: Aborted") == 2
    assert "has left its stacks" not in said


_MADE_ONE = """
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))

def cut(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

source = cut(build())
save(get_model_state_dict(source), checkpoint_id="saved")
torch.manual_seed(5 + rank)
model, whole = cut(build()), build().state_dict() if rank == 0 else {}
set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
train(model)
model = cut(build())
state = get_model_state_dict(model)
load(state, checkpoint_id="saved")
train(model)
model = cut(build())
model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)
train(model)
model = cut(build())
for mine, given in zip(model.parameters(), source.parameters()):
    mine.to_local().data.copy_(given.to_local())
train(model)
model = build()
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
train(cut(model))
with torch.device("meta"):
    model = cut(build())
model.to_empty(device="cpu")
for parameter in model.parameters():
    torch.nn.init.normal_(parameter.to_local().detach())
train(model)
model = cut(build())
with torch.no_grad():
    model(torch.randn(8, 4))
model.load_state_dict(source.state_dict())
train(model)
"""
_MESSAGES = """
other, comes = 1 - rank, []
def sent(index, dtype=torch.float32):
    return torch.full((4,), index, dtype=dtype)
for index in range(1, 21):
    if rank == 1:
        received = torch.zeros(4)
        comes.append((dist.irecv(received, 0, tag=index), received, index))
    dist.barrier()
    if rank == 0:
        dist.isend(sent(index), 1, tag=index)  # dropped, but the other rank is ready
        dist.send_object_list(["an object", {"of": index}], 1)
        works = [dist.isend(sent(tag), 1, tag=tag) for tag in (50, 40, 60)]
    else:
        objects = [None, None]
        dist.recv_object_list(objects, 0)
        assert objects == ["an object", {"of": index}]
        tagged = torch.zeros(4)
        for tag in (40, 60, 50):
            dist.recv(tagged, 0, tag=tag)
            assert tagged.tolist() == [tag] * 4
        works = []
    both = [torch.ones(3, dtype=torch.int64) * rank, torch.zeros(3, dtype=torch.int64)]
    works += dist.batch_isend_irecv([dist.P2POp(dist.isend, both[0], other), dist.P2POp(dist.irecv, both[1], other)])
    for work in works:
        work.wait()
    assert both[1].tolist() == [other] * 3
    if rank == 0:
        dist.send(sent(1).view(torch.uint8), 1)
        dist.send(torch.ones(2, dtype=torch.complex64), 1)
        dist.send(torch.empty(0), 1)
    else:
        for values in (torch.zeros(4), torch.zeros(2, 2), torch.empty(0, dtype=torch.int64)):
            dist.recv(values, 0)
for work, received, index in comes:
    work.wait()
    assert received.tolist() == [index] * 4
time.sleep(1.5)
"""
_FROM_ANY = """
for index in range(1200):  # the first, which is soon forgotten, counts for the sender alone: their numbers are no pairs
    values = torch.ones(2, dtype=torch.int64 if index % 2 else torch.float32)
    if rank == 0:
        dist.send(values, 1)
    else:
        dist.recv(values, 0 if index else None)
"""
_QUIET = {
    "accumulation that waits for each sample": (
        "ddp = DDP(torch.nn.Linear(4, 2))\nfor _ in range(2):\n    with ddp.no_sync():\n        for _ in range(5):\n"
        "            ddp(torch.randn(8, 4)).square().mean().backward(); time.sleep(0.7 * rank)\n"
        "    ddp(torch.randn(8, 4)).square().mean().backward()"
    ),
    "a checkpoint into what takes nothing for long": (
        "import subprocess\nif rank == 0:\n"
        "    to = subprocess.Popen(['sh', '-c', 'sleep 5; cat > /dev/null'], stdin=subprocess.PIPE)\n"
        "    torch.save({'weights': torch.zeros(3_000_000)}, to.stdin)\ndist.barrier()"
    ),
    "models of other seeds that are cut, and then made one": _MADE_ONE,
    "messages that are waited for late, or never and arrive all the same; tags, objects, bytes": _MESSAGES,
    "messages from any rank, then from one": _FROM_ANY,
}


@pytest.mark.parametrize("name", _QUIET)
def test_nothing_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{_HEAD}{_QUIET[name]}\ndist.destroy_process_group()\n")
    words = ("run", "--record=off", "--nproc-per-node=2", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="1", LOCKSTEP_EVIDENCE="")) as run:
        assert complaints(run.end(0)) == []


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_slow_batch_is_said_to_be_waited_for_and_then_to_have_come(guilty: int, tmp_path: Path) -> None:
    body = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, index):
        time.sleep(5 * (rank == GUILTY and index == 11))  # here
        return torch.ones(4) * index
ddp = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
for batch in torch.utils.data.DataLoader(Data(), batch_size=4):
    ddp(batch).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
    source = f"{_HEAD}{body}".replace("GUILTY", str(guilty))
    (tmp_path / "train.py").write_text(source)
    (here,) = [number for number, line in enumerate(source.splitlines(), 1) if "# here" in line]
    words = ("run", "--nproc-per-node=2", "train.py")  # with a record, which tells that it loads
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_HANG_S="2", LOCKSTEP_EVIDENCE="")) as run:
        text = run.end(0)
    head = rf"lockstep: HANG: no batch for \d\.\d s in step 3\.  Culprit: rank {guilty} .*\n"
    where = rf"  rank {guilty} is loading data: at train\.py:{here} __getitem__, unmoved for "
    assert len(re.findall(head + where, text)) == 1, text
    assert "DEADLOCK" not in text, text
    assert re.search(rf"lockstep: HANG, above, is over: rank {guilty} goes on", text), text
