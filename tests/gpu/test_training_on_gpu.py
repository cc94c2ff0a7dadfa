"""Two NCCL ranks train to the bits of one process, whatever is cut; and what every transport must do, NCCL does."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runs import ended, start

pytestmark = [pytest.mark.gpu, pytest.mark.limit_s(120)]

# Two ranks add two numbers: in either order the same. Half of a number and an eighth of it are exact.
_HEAD = """
import copy
import lockstep

def halves(step):
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(step)).to(GPU).chunk(2)

def loss_of(model, batch):
    return model(batch).float().square().mean()

def train(model, optimizer, steps, microbatches=1):
    for step in steps:
        *before, last = halves(step)[RANK].chunk(microbatches)
        for part in before:
            with model.no_sync():
                (loss_of(model, part) / microbatches).backward()
        (loss_of(model, last) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

def train_alone(model, optimizer, steps, microbatches=1, dtype=torch.float32):
    for step in steps:
        sums = []
        for half in halves(step):
            used = copy.deepcopy(model).to(dtype)
            for part in half.to(dtype).chunk(microbatches):
                (loss_of(used, part) / microbatches).backward()
            sums.append([parameter.grad.float() / 2 for parameter in used.parameters()])
        for parameter, *grads in zip(model.parameters(), *sums):
            parameter.grad = grads[0] + grads[1]
        optimizer.step()
        optimizer.zero_grad()

def is_as(model, alone, same=torch.equal):
    whole = lockstep.whole_state_dict(model)
    assert RANK > 0 or whole.keys() == alone.state_dict().keys()
    wrong = [name for name, one in whole.items() if not same(one.cpu(), alone.state_dict()[name].cpu())]
    assert not wrong, wrong

def adam(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-3, **options)

def eighth(parameters):
    return torch.optim.SGD(parameters, lr=0.125)

alone = layers()
"""
_STRATEGY = """
with lockstep.init(device=GPU, verbose=False) as comm:
    model = lockstep.parallelize(layers(), "{sharding}", mesh=comm)
    train(model, lockstep.optimizer_for(model, torch.optim.AdamW, lr=1e-3), range(10))
    train_alone(alone, adam(alone.parameters(), fused=True), range(10))
    is_as(model, alone)
"""
_SHARDED = """
with lockstep.init(device=GPU, verbose=False) as comm:
    model = layers()
    for part in (*model[::2], model):
        lockstep.fully_shard(part, {arguments})
    train(model, {kind}(model.parameters()), range(10))
    train_alone(alone, {kind}(alone.parameters()), range(10), {more})
    is_as(model, alone)
"""
_BFLOAT16 = "mp_policy=lockstep.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
_PROGRAMS = {
    **{f"strategy {each}": _STRATEGY.format(sharding=each) for each in ("none", "optimizer", "gradients", "full")},
    "fully_shard": _SHARDED.format(arguments="mesh=comm", kind="adam", more=""),
    "fully_shard, kept": _SHARDED.format(arguments="reshard_after_forward=False", kind="adam", more=""),
    "fully_shard, offloaded": _SHARDED.format(
        arguments="offload_policy=lockstep.CPUOffloadPolicy()", kind="eighth", more=""
    ),
    "fully_shard, bfloat16": _SHARDED.format(arguments=_BFLOAT16, kind="eighth", more="dtype=torch.bfloat16"),
    "FullyShardedDataParallel": """
with lockstep.init(device=GPU, verbose=False) as comm:
    model = lockstep.FullyShardedDataParallel(layers(), device_id=GPU, use_orig_params=True)
    train(model, adam(model.parameters()), range(10))
    train_alone(alone, adam(alone.parameters()), range(10))
    is_as(model, alone)
""",
    "accumulated": """
with lockstep.init(device=GPU, verbose=False) as comm:
    model = lockstep.DistributedDataParallel(layers(), device_ids=[0])
    train(model, adam(model.parameters()), range(10), 2)
    train_alone(alone, adam(alone.parameters()), range(10), 2)
    is_as(model, alone)
""",
    "our backend beside NCCL": """
dist.init_process_group("cpu:lockstep,cuda:nccl")
model = DDP(layers(), device_ids=[0])
train(model, adam(model.parameters()), range(10))
train_alone(alone, adam(alone.parameters()), range(10))
assert all(map(torch.equal, model.parameters(), alone.parameters()))
dist.all_reduce(total := torch.ones(3))
assert total.tolist() == [2, 2, 2]
dist.destroy_process_group()
""",
    "SyncBatchNorm": """
def normed():
    torch.manual_seed(0)
    parts = [torch.nn.Linear(256, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 8)]
    return torch.nn.Sequential(*parts).to(GPU)

with lockstep.init(device=GPU, verbose=False) as comm:
    model = lockstep.DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(normed()), device_ids=[0])
    train(model, eighth(model.parameters()), range(10))
    alone = normed()
    optimizer = eighth(alone.parameters())
    for step in range(10):
        loss_of(alone, torch.cat(halves(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    is_as(model, alone, lambda *both: torch.allclose(*both, rtol=1e-4, atol=1e-5))
""",
    "scaled and clipped": """
with lockstep.init(device=GPU, verbose=False) as comm:
    model = layers()
    for part in (*model[::2], model):
        lockstep.fully_shard(part)
    scaler = lockstep.GradScaler("cuda", init_scale=2.0**40)
    own_scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    optimizer, own = eighth(model.parameters()), eighth(alone.parameters())
    for step in range(40):
        with torch.autocast("cuda", dtype=torch.float16):
            scaler.scale(loss_of(model, halves(step)[RANK])).backward()
            for half in halves(step):
                own_scaler.scale(loss_of(alone, half)).backward()
            for parameter in alone.parameters():
                parameter.grad /= 2
        scaler.unscale_(optimizer)
        own_scaler.unscale_(own)
        norm = lockstep.clip_grad_norm_(model.parameters(), 0.01)
        own_norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        assert norm.isfinite() == own_norm.isfinite(), (step, norm, own_norm)
        if norm.isfinite():
            torch.testing.assert_close(norm, own_norm, rtol=1e-2, atol=1e-5)
        scaler.step(optimizer)
        own_scaler.step(own)
        scaler.update()
        own_scaler.update()
        assert scaler.get_scale() == own_scaler.get_scale()
        optimizer.zero_grad()
        own.zero_grad()
    assert scaler.get_scale() < 2.0**40 and norm.isfinite()
""",
    "saved and loaded": """
with lockstep.init(device=GPU, verbose=False) as comm, lockstep.Checkpointer("checkpoints", comm) as checkpointer:
    model = lockstep.DistributedDataParallel(layers(), device_ids=[0])
    optimizer = adam(model.parameters(), fused=True)
    train(model, optimizer, range(5))
    pending = checkpointer.save_async(5, {"train": lockstep.TrainState(model, optimizer)})
    train(model, optimizer, range(5, 10))  # meanwhile
    pending.wait()
    train_alone(alone, adam(alone.parameters(), fused=True), range(10))
    is_as(model, alone)
    for sharding in ("none", "optimizer", "full"):
        again = lockstep.parallelize(layers(), sharding, mesh=comm)
        optimizer = lockstep.optimizer_for(again, torch.optim.AdamW, lr=1e-3)
        assert checkpointer.load({"train": lockstep.TrainState(again, optimizer)}).step == 5
        train(again, optimizer, range(5, 10))
        is_as(again, alone)
""",
}
_TABLE = """
import lockstep
import pytest
sys.path.insert(0, {tests!r})
import comm_cases
from lockstep.errors import ConfigError

torch.set_default_device(GPU)
with lockstep.init(device=GPU, verbose=False, timeout_s=20) as comm:
    other, one = 1 - RANK, torch.ones(1)
    both = [comm.send_op(one, other), comm.recv_op(one, other, 1)]
    tagged = [lambda: comm.send(one, other, 1), lambda: comm.recv(one, other, 1), lambda: comm.batch_send_recv(both)]
    for call in tagged:
        with pytest.raises(ConfigError, match="tag 1: NCCL knows no tags"):
            call()
    with pytest.raises(ConfigError, match="cannot receive from any rank"):
        comm.recv(one)
    for name, case in comm_cases.CASES.items():
        if name not in ("messages_by_tag", "messages_from_any_rank"):
            case(comm)
"""


@pytest.mark.parametrize("name", _PROGRAMS)
def test_two_ranks_are_as_one(name: str, tmp_path: Path) -> None:
    said = ended(start(tmp_path, _HEAD + _PROGRAMS[name]), 0)
    assert not [line for line in said.splitlines() if line.startswith("lockstep: ") and "report:" not in line], said


def test_every_case(tmp_path: Path) -> None:
    ended(start(tmp_path, _TABLE.format(tests=str(Path(__file__).parents[1]))), 0)
