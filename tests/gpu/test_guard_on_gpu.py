"""What goes wrong between two NCCL ranks is named: who, where, and in which step; and every such run ends."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from gpu_runs import ended, line_of, start

pytestmark = [pytest.mark.gpu, pytest.mark.limit_s(120)]

_TRAIN = """
dist.init_process_group("nccl")
model = DDP(layers())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = torch.randn(16, 256, device=GPU)
for step in range(1, 41):
    if step == 20 and RANK == 1:
        {fault}
    loss = model(batch).square().mean()
    loss.backward()  # backward
    optimizer.step()
    optimizer.zero_grad()
    loss.item()  # item
    time.sleep(0.02)
dist.destroy_process_group()
"""
_COLLECTIVES = """
dist.init_process_group("nccl")
for step in range(1, 41):
    tensor = torch.ones(8, device=GPU)
    if step == 20 and RANK == 1:
        {fault}
    dist.all_reduce(tensor)  # all
    if step % 10 == 0:
        tensor[0].item()  # item
    time.sleep(0.01)
tensor[0].item()
dist.destroy_process_group()
"""
_SLEEPS = """\
for step in range(1, 41):
    if RANK == 1 and step == 20:
        time.sleep(600)  # fault
    loss = model(torch.randn(8, 256, device=GPU)).square().mean()  # forward
    loss.backward()  # backward
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
"""
_STUCK = "waits for a GPU that is at what it was given before: at "
_NOT_THERE = r"HANG.* in step 20\..*Culprit: rank 1(?s:.*)rank 1 is not there: at {fault}"
_IN_TRAINING = {
    "sleeps": ("time.sleep(600)  # fault", _NOT_THERE, "stack of rank 0: {item}"),
    "keeps its GPU": ("keep_busy(100_000)", r"HANG.* in step 21\..*Culprit: rank 1", f"rank 1 {_STUCK}{{item}}"),
    "raises": ("raise ValueError('bad batch')  # fault", "RAISED in step 20.*Culprit: rank 1", "ValueError: bad batch"),
    "leaves": ("break", "FINISHED too early, in step 20.*Culprit: rank 1", "rank 0 wanted .*{backward}"),
    "has no memory": (
        "torch.empty(1 << 46, device=GPU)  # fault",
        "RAISED in step 20.*Culprit: rank 1",
        r"OutOfMemoryError: CUDA out of memory\. Tried to allocate",
    ),
    "asserts": (
        "batch = batch[torch.tensor([99], device=GPU)]",
        "RAISED in step 20.*Culprit: rank 1",
        "AcceleratorError: CUDA error: device-side assert triggered",
    ),
    "crashes": ("import ctypes; ctypes.string_at(0)", r"rank 1 \(pid \d+\) .*SIGSEGV"),
    "calls once more": (
        "dist.all_reduce(torch.ones(3, device=GPU))  # fault",
        "MISMATCH in step 20, group WORLD.*Culprit: rank 1",
        r"rank 1 alone issued all_reduce float32 \[3\] sum at {fault}",
    ),
    "leaves one out": (
        "optimizer.step(); continue",
        "MISMATCH in step 20.*Culprit: rank 1",
        "rank 1 skipped .*{backward}",
    ),
    "has a bit flipped": (
        "with torch.no_grad(): model.module[2].weight.view(-1)[3:4] += 0.5",
        "REPLICAS differ",
        r"parameter '2\.weight' is [0-9a-f]+ on rank 0",
    ),
}
_IN_COLLECTIVES = {
    "sleeps": ("time.sleep(600)  # fault", r"HANG.*Culprit: rank 1(?s:.*)rank 1 is not there: at {fault}"),
    "keeps its GPU": ("keep_busy(100_000)", r"HANG.*Culprit: rank 1", f"rank 1 {_STUCK}{{item}}"),
    "has another shape": ("tensor = torch.ones(4, device=GPU)", "MISMATCH", "they differ in shape"),
    "has another dtype": ("tensor = tensor.int()", "MISMATCH", "they differ in dtype"),
    "broadcasts": ("dist.broadcast(tensor, 0); continue", "MISMATCH", "they differ in kind"),
    "takes the maximum": ("dist.all_reduce(tensor, op=dist.ReduceOp.MAX); continue", "MISMATCH", "reduction"),
    "leaves one out": ("continue", "FINISHED too early.*Culprit: rank 1", "rank 0 wanted a 40th .*{all}"),
    "calls once more": ("dist.all_reduce(tensor)", "FINISHED too early.*Culprit: rank 0", "rank 1 wanted a 41st"),
}
_OTHERS = {
    "ends with collectives under way": (
        "dist.init_process_group('nccl')\n"
        "for step in range(5):\n"
        "    if RANK == 1 and step == 4:\n"
        "        time.sleep(600)  # fault\n"
        "    dist.all_reduce(torch.ones(4, device=GPU))  # all\n",
        r"HANG.*Culprit: rank 1(?s:.*)rank 1 is not there: at {fault}",
        r"rank 0 waits in all_reduce float32 \[4\] sum #4 of group WORLD, {all}",
    ),
    "copies to memory that is not pinned": (
        "dist.init_process_group('nccl')\n"
        "for step in range(40):\n"
        "    if RANK == 1 and step == 30:\n"
        "        time.sleep(600)  # fault\n"
        "    tensor = torch.ones(4, device=GPU)\n"
        "    dist.all_reduce(tensor, async_op=True).wait()\n"
        "    tensor.cpu()  # copy\n",
        r"HANG.*Culprit: rank 1(?s:.*)rank 1 is not there: at {fault}",
        "stack of rank 0: {copy}",
    ),
    "both receive": (
        "dist.init_process_group('nccl')\n"
        "tensor = torch.zeros(4, device=GPU)\n"
        "dist.recv(tensor, src=1 - RANK)  # receive\n"
        "dist.send(tensor, dst=1 - RANK)\n",
        "DEADLOCK in step 1: rank 0 -> rank 1 -> rank 0",
        "rank 0 waits in recv .* from rank 1 tag 0, {receive}",
    ),
    "both receive in a batch": (
        "dist.init_process_group('nccl')\n"
        "tensor = torch.zeros(4, device=GPU)\n"
        "for step in range(3):\n"
        "    both = [dist.P2POp(dist.isend, tensor + 1, 1 - RANK), dist.P2POp(dist.irecv, tensor, 1 - RANK)]\n"
        "    for work in dist.batch_isend_irecv(both[step == 2:]):  # batch\n"
        "        work.wait()\n"
        "tensor[0].item()\n",
        "DEADLOCK in step 1: rank 0 -> rank 1 -> rank 0|HANG: no match of messages",
        "rank 0 waits in recv .* from rank 1 tag 0, {batch}",
    ),
    "groups in other order": (
        "dist.init_process_group('nccl')\n"
        "groups = [dist.new_group([0, 1]) for _ in range(2)]\n"
        "for group in groups[:: 1 - 2 * RANK]:\n"
        "    dist.all_reduce(torch.ones(4, device=GPU), group=group)  # all\n",
        "DEADLOCK in step 1: groups in different order",
        "rank 0 waits in all_reduce .* of group 1 .*{all}",
    ),
    "raises with many under way": (
        "dist.init_process_group('nccl')\n"
        "for step in range(1000):\n"
        "    if RANK == 1 and step == 500:\n"
        "        raise ValueError('label 7')  # fault\n"
        "    dist.all_reduce(torch.ones(4, device=GPU))  # all\n",
        "RAISED in step 1.*Culprit: rank 1",
        "ValueError: label 7",
    ),
    "is ended within its own finally": (
        "dist.init_process_group('nccl')\n"
        "try:\n"
        "    for step in range(100):\n"
        "        if RANK == 1 and step == 50:\n"
        "            raise ValueError('label 7')  # fault\n"
        "        dist.all_reduce(torch.ones(4, device=GPU))\n"
        "finally:\n"
        "    dist.destroy_process_group()\n",
        "RAISED in step 1.*Culprit: rank 1",
        "ValueError: label 7",
    ),
    "fully_shard": (
        "from torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('nccl')\n"
        "model = layers()\n"
        "for part in (*model, model):\n"
        "    fully_shard(part)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        f"{_SLEEPS}",
        r"HANG.* in step 20\..*Culprit: rank 1(?s:.*)rank 1 is not there: at {fault}",
    ),
    "lockstep's own": (
        "import lockstep\n"
        "with lockstep.init(device='cuda:0') as comm:\n"
        "    model = lockstep.DistributedDataParallel(layers())\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        f"{textwrap.indent(_SLEEPS, '    ')}",
        r"HANG.* in step 20\..*Culprit: rank 1(?s:.*)rank 1 is not there: at {fault}",
        r"issued last: all_reduce int32 .* {backward}",
        r"rank 0 waits in all_reduce .* {backward}",
    ),
    "lockstep's own fully_shard": (
        "import lockstep\n"
        "with lockstep.init(device='cuda:0') as comm:\n"
        "    model = layers()\n"
        "    for part in (*model[::2], model):\n"
        "        lockstep.fully_shard(part)\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        f"{textwrap.indent(_SLEEPS, '    ')}",
        r"HANG.* in step 20\..*Culprit: rank 1(?s:.*)rank 1 is not there: at {fault}",
        r"rank 0 waits in all_gather int32 .* {forward}",
    ),
}
_PROGRAMS = {f"in training, {name}": (_TRAIN.format(fault=one[0]), *one[1:]) for name, one in _IN_TRAINING.items()}
_PROGRAMS |= {name: (_COLLECTIVES.format(fault=one[0]), *one[1:]) for name, one in _IN_COLLECTIVES.items()}
_PROGRAMS |= _OTHERS


def said_by(program: str, folder: Path, exit_code: int = 1) -> str:
    """What its run has said, without torch's own lines from C++."""
    said = ended(start(folder, program), exit_code)
    return re.sub(r"(?m)^(\[rank\d\]:\[|frame #|Exception raised from ).*\n", "", said)


@pytest.mark.parametrize("name", _PROGRAMS)
def test_who_did_it_is_named(name: str, tmp_path: Path) -> None:
    program, *says = _PROGRAMS[name]
    said = said_by(program, tmp_path)
    marks = {mark: re.escape(line_of(tmp_path, mark)) for mark in re.findall(r"# (\w+)$", program, re.MULTILINE)}
    for pattern in says:
        assert re.search(re.sub(r"\{(\w+)\}", lambda found: marks[found[1]], pattern), said), f"{pattern}\n{said}"
    assert "GUARD of rank" not in said


_RIGHT = {
    "training": _TRAIN.format(fault="pass"),
    "a long kernel": (
        "dist.init_process_group('nccl')\n"
        "for step in range(6):\n"
        "    if step == 4:\n"
        "        keep_busy(5000)\n"
        "    dist.all_reduce(tensor := torch.ones(4, device=GPU))\n"
        "    tensor[0].item()\n"
    ),
    "a long evaluation of one": (
        "dist.init_process_group('nccl')\n"
        "model = DDP(layers())\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(12):\n"
        "    loss = model(torch.randn(8, 256, device=GPU)).square().mean()\n"
        "    loss.backward(); optimizer.step(); optimizer.zero_grad(); loss.item()\n"
        "    until = time.monotonic() + 6 * (step == 8 and RANK == 0)\n"
        "    while time.monotonic() < until:\n"
        "        model.module(torch.randn(8, 256, device=GPU)).sum().item()\n"
    ),
    "all kinds": (
        "dist.init_process_group('nccl')\n"
        "for step in range(10):\n"
        "    tensor, both = torch.ones(10, device=GPU) * (RANK + 1), torch.empty(20, device=GPU)\n"
        "    dist.all_reduce(tensor)\n"
        "    assert tensor[0].item() == 3\n"
        "    for work in [dist.all_reduce(tensor, async_op=True) for _ in range(5)]:\n"
        "        work.wait()\n"
        "    dist.all_gather_into_tensor(both, tensor)\n"
        "    dist.reduce_scatter_tensor(tensor, both)\n"
        "    dist.broadcast(tensor, src=1)\n"
        "    dist.all_to_all_single(torch.empty_like(tensor), tensor)\n"
        "    ops = [dist.P2POp(dist.isend, tensor, 1 - RANK), dist.P2POp(dist.irecv, both[:10], 1 - RANK)]\n"
        "    for work in dist.batch_isend_irecv(ops):\n"
        "        work.wait()\n"
        "    dist.send(tensor, 1) if RANK == 0 else dist.recv(tensor, 0)\n"
        "    with dist._coalescing_manager(device=GPU, async_ops=True) as together:\n"
        "        for _ in range(3):\n"
        "            dist.all_reduce(torch.ones(4, device=GPU))\n"
        "    together.wait()\n"
        "    dist.all_gather_object([None, None], {'rank': RANK})\n"
        "    dist.barrier()\n"
        "dist.destroy_process_group()\n"
    ),
    "a graph": (
        "model = layers()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "batch = torch.randn(8, 256, device=GPU)\n"
        "def train():\n"
        "    optimizer.zero_grad(set_to_none=True)\n"
        "    model(batch).square().mean().backward()\n"
        "    for parameter in model.parameters():\n"
        "        dist.all_reduce(parameter.grad)\n"
        "    optimizer.step()\n"
        "dist.init_process_group('nccl')\n"
        "side = torch.cuda.Stream()\n"
        "side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side):\n"
        "    for _ in range(12):\n"
        "        train()\n"
        "torch.cuda.current_stream().wait_stream(side)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    train()\n"
        "for _ in range(50):\n"
        "    graph.replay()\n"
        "torch.cuda.synchronize()\n"
        "del graph  # NCCL waits for it where its communicator ends\n"
        "dist.destroy_process_group()\n"
    ),
}


@pytest.mark.parametrize("name", _RIGHT)
def test_what_is_right_is_not_spoken_of(name: str, tmp_path: Path) -> None:
    said = said_by(_RIGHT[name], tmp_path, 0)
    assert not [line for line in said.splitlines() if line.startswith("lockstep: ") and "report:" not in line], said


def test_messages_that_nccl_takes_for_each_other_are_named(tmp_path: Path) -> None:
    program = (
        "dist.init_process_group('nccl')\n"
        "tensors = [torch.full((4,), 1.0 + tag, device=GPU) for tag in range(2)]\n"
        "for tag in (0, 1)[:: 1 - 2 * RANK]:\n"
        "    dist.send(tensors[tag], 1, tag=tag) if RANK == 0 else dist.recv(tensors[tag], 0, tag=tag)  # message\n"
        "assert RANK == 0 or [tensor[0].item() for tensor in tensors] == [2, 1]\n"
        "dist.destroy_process_group()\n"
    )
    said = said_by(program, tmp_path, 0)
    assert "TAGS of messages differ in step 1.  Culprits: ranks 0,1" in said
    assert f"rank 1: recv float32 [4] tagged 1 from rank 0 tag 0 at {line_of(tmp_path, 'message')}" in said


def test_who_is_killed_is_named_with_what_it_did(tmp_path: Path) -> None:
    program = _TRAIN.format(fault="import signal; os.kill(os.getpid(), signal.SIGKILL)")
    said = said_by(program, tmp_path)
    assert re.search(r"lockstep: rank 1 \(pid \d+\) was killed by SIGKILL; rank 0 was ended by the launcher", said), (
        said
    )
    assert re.search("GONE in step 20.*Culprit: rank 1", said), said


def test_sums_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    """Our own training on NCCL: two ranks, with half of the batch each, end with the same parameters."""
    program = (
        "import lockstep\n"
        "with lockstep.init(device='cuda:0') as comm:\n"
        "    model = lockstep.DistributedDataParallel(layers())\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for step in range(20):\n"
        "        batch = torch.randn(16, 256, generator=torch.Generator().manual_seed(step)).chunk(2)[RANK].to(GPU)\n"
        "        model(batch).square().mean().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "    total = [parameter.detach().double().sum().item() for parameter in model.parameters()]\n"
        "    print(f'rank {RANK} has', total)\n"
    )
    said = said_by(program, tmp_path, 0)
    totals = dict(re.findall(r"rank (\d) has (\[.*\])", said))
    assert totals["0"] == totals["1"], said
