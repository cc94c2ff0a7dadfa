"""Models that ranks have cut into pieces, each its own: said where the seeds were different, and else not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from command_runs import Run, complaints

pytestmark = pytest.mark.limit_s(90)

_HEAD = """
import sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, _init_utils
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
import lockstep

warnings.simplefilter("ignore")
_init_utils._check_module_states_for_sync_module_states = lambda states: None  # torch does not broadcast from a CPU
dist.init_process_group("gloo")
rank, each, cpu = dist.get_rank(), ModuleWrapPolicy({nn.Linear}), torch.device("cpu")
torch.manual_seed(0)

def build():
    return nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 3))

def flat(model, **options):
    return FullyShardedDataParallel(model, device_id=cpu, **options)  # flat

def cut(model):
    for part in model:
        lockstep.fully_shard(part)  # cut
    return lockstep.fully_shard(model)

def ours(model):
    return lockstep.FullyShardedDataParallel(model, auto_wrap_policy=each)  # ours

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""
_ONE = r"built from different seeds\.  Culprit: rank 1 .*\n  parameter '0.weight' is \w+ on ranks 0, 2, \w+ on rank 1\n"
_TWO = r"built from different seeds\.  Culprits: ranks 0,1\n  parameter '0.weight' is \w+ on rank 0, \w+ on rank 1\n"
_LINE = r"(?s:.*)  ranks 0[-,]\d: cut at train\.py:HERE "


@pytest.mark.parametrize(
    ("ranks", "model", "pattern"),
    [
        (2, "flat(build(), auto_wrap_policy=each)", _TWO),
        (3, "flat(build(), use_orig_params=True)", _ONE),
        (3, "cut(build())", _ONE),
        (2, "ours(build())", _TWO),
    ],
)
def test_models_of_other_seeds_are_said(ranks: int, model: str, pattern: str, tmp_path: Path) -> None:
    name = model.partition("(")[0]
    (line,) = [number for number, text in enumerate(_HEAD.splitlines(), 1) if text.endswith(f"# {name}")]
    (tmp_path / "train.py").write_text(f"{_HEAD}torch.manual_seed(5 + (rank == 1))\ntrain({model})\n")
    words = ("run", "--record=off", f"--nproc-per-node={ranks}", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_EVIDENCE="")) as run:
        run.await_text(pattern + _LINE.replace("HERE", str(line)))


_FLAT = """
lines = init_device_mesh("cpu", (1, 3), mesh_dim_names=("replicate", "shard"))
train(flat(build(), device_mesh=lines, sharding_strategy=ShardingStrategy.HYBRID_SHARD))
train(flat(build(), sharding_strategy=ShardingStrategy.NO_SHARD))
train(flat(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), auto_wrap_policy=each))  # rank 2 has nothing of the last
source = flat(build())
torch.manual_seed(5 + rank)
train(flat(build(), auto_wrap_policy=each, sync_module_states=True))
for options in ({}, {"auto_wrap_policy": each}, {"use_orig_params": True}):
    model = flat(build(), **options)
    model.load_state_dict(source.state_dict())
    train(model)
for model in (build(), nn.Sequential(nn.Linear(4, 1), nn.LayerNorm((8, 1)))):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model = flat(model, use_orig_params=True)
    for value in state.values():
        dist.broadcast(value, 0)
    model.load_state_dict(state)  # which changes nothing on rank 0, nor where a rank has a piece of a norm alone
    train(model)
with torch.device("meta"):
    model = build()
model = flat(model, param_init_fn=lambda part: part.to_empty(device="cpu", recurse=False))
model.load_state_dict(source.state_dict())
train(model)
torch.manual_seed(3)
model = build()
torch.manual_seed(5 + rank)
model.add_module("own", nn.Linear(3, 3))
train(flat(model, ignored_modules=[model.own], use_orig_params=True))
"""
_OURS = """
train(cut(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))))
source = cut(build())
torch.manual_seed(5 + rank)
train(lockstep.FullyShardedDataParallel(build(), auto_wrap_policy=each, sync_module_states=True))
for assign in (False, True):
    model = cut(build())
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=assign)
    train(model)
with torch.device("meta"):
    model = cut(build())
train(lockstep.materialize(model, seed=3))
model = build()
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
train(cut(model))
model = nn.Sequential(nn.Linear(4, 1), nn.LayerNorm((8, 1)))
state = {name: value.clone() for name, value in model.state_dict().items()}
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(lockstep.fully_shard(model), state if rank == 0 else {}, options=options)
train(model)
torch.manual_seed(3)
model = build()
torch.manual_seed(5 + rank)
model.add_module("own", nn.Linear(3, 3))
train(lockstep.fully_shard(model, ignored_params={*model.own.parameters()}))
"""


@pytest.mark.parametrize("program", [_FLAT, _OURS], ids=["flat", "ours"])
def test_models_that_are_one_are_left_alone(program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{_HEAD}{program}dist.destroy_process_group()\n")
    words = ("run", "--record=off", "--nproc-per-node=3", "train.py")
    with contextlib.closing(Run(tmp_path, *words, warm=True, LOCKSTEP_EVIDENCE="")) as run:
        assert complaints(run.end(0)) == []
