"""Stock torch training on the backend "lockstep" gives the bits that it gives on Gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from backend_groups import default_group, equal_on_both
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lockstep.testing.worlds import run_processes


class Branches(nn.Module):
    """Two layers, of which the odd ranks use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        hidden = self.norm(self.first(x).tanh())
        return self.third(hidden if skip else self.second(hidden).tanh())


def train(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, steps: int = 3, **kwargs: Any) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6), **kwargs).pow(2).mean().backward()
        optimizer.step()


def ddp_in_every_form() -> list[Any]:
    results = []
    rank = dist.get_rank()
    for kwargs in (
        {},
        {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "broadcast_buffers": False},
        {"static_graph": True},
    ):
        model = DistributedDataParallel(Branches(), **kwargs)
        skip = {"skip": rank % 2 == 1} if kwargs.get("find_unused_parameters") else {}
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **skip)
        results.append(dict(model.module.state_dict()))
    return results


def ddp_hooks() -> list[Any]:
    results = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001)
        model.register_comm_hook(None, hook)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
        results.append(dict(model.module.state_dict()))
    return results


def ddp_uneven_inputs() -> dict[str, Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns, which fails a test's own process

    model = DistributedDataParallel(Branches(), broadcast_buffers=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with model.join():
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2 + dist.get_rank())
    train(model, optimizer)
    return dict(model.module.state_dict())


def sharded(mesh_shape: tuple[int, ...], **kwargs: Any) -> dict[str, Any]:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 5))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **kwargs)
    torch.manual_seed(10 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def fsdp() -> list[Any]:
    """On 4 ranks as 2 x 2: a sum of two numbers has one order only, so that the bits must be equal."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shape = (2, 2) if dist.get_world_size() == 4 else (2,)
    return [sharded(shape, mp_policy=policy) for policy in (MixedPrecisionPolicy(), bf16)]


def dtensors() -> list[Tensor]:
    W = dist.get_world_size()
    mesh = init_device_mesh("cpu", (W,))
    whole = torch.arange(35.0).reshape(7, 5)
    results = []
    for source in (Shard(0), Shard(1), Replicate()):
        placed = distribute_tensor(whole, mesh, [source])
        for target in (Shard(1), Shard(0), Replicate()):
            moved = placed.redistribute(mesh, [target])
            results += [moved.to_local(), moved.full_tensor()]
    partial = DTensor.from_local(torch.randn(7, 5), mesh, [Partial()], run_check=False)
    results += [partial.redistribute(mesh, [place]).to_local() for place in (Replicate(), Shard(0), Shard(1))]
    a, b = (distribute_tensor(torch.randn(8, 8), mesh, [place]) for place in (Shard(1), Shard(0)))
    results.append((a @ b).full_tensor())
    return results


def tensor_parallel() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = model(torch.randn(5, 6))
    output.sum().backward()
    grads = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    return [output.detach(), *grads]


def groups() -> list[Any]:
    """Groups of some ranks, twice the same, a mesh of two dimensions, and the end of one of them."""
    rank, W = dist.get_rank(), dist.get_world_size()
    results: list[Any] = []
    for ranks in ([0], [0, W - 1], [W - 1, 0], list(range(1, W))):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.tensor([rank + 1.0])
            dist.all_reduce(tensor, group=group)
            everyone: list[Any] = [None] * len(set(ranks))
            dist.all_gather_object(everyone, rank, group=group)
            results += [tensor, everyone, dist.get_process_group_ranks(group), dist.get_rank(group)]
            dist.destroy_process_group(group)
    local = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier(group=local)
    mesh = init_device_mesh("cpu", (1, W), mesh_dim_names=("a", "b"))
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=mesh.get_group("b"))
    subgroup, _ = dist.new_subgroups(group_size=1)
    dist.barrier(group=subgroup)
    return [*results, tensor, mesh["b"].get_local_rank(), mesh["a"].size()]


CASES = (ddp_in_every_form, ddp_hooks, ddp_uneven_inputs, fsdp, dtensors, tensor_parallel, groups)


def run_case(rank: int, world_size: int, folder: str, case: Callable[[], Any]) -> None:
    equal_on_both(rank, world_size, folder, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training_equals_gloo(case: Callable[[], Any], tmp_path: Path) -> None:
    run_processes(2, run_case, 2, str(tmp_path), case, connect=False)


def test_hybrid_sharding_on_a_mesh(tmp_path: Path) -> None:
    run_processes(4, run_case, 4, str(tmp_path), fsdp, connect=False)


def train_with_power_sgd(rank: int, world_size: int, folder: str) -> list[float]:
    """Its hook awaits an operation in the callback of another one's future. On Gloo some runs hang or abort."""
    with default_group("lockstep", folder, rank, world_size):
        model = DistributedDataParallel(Branches())
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=5)
        return [float(parameter.sum()) for parameter in model.parameters()]


def test_a_hook_that_waits_in_a_callback(tmp_path: Path) -> None:
    first, second = run_processes(2, train_with_power_sgd, 2, str(tmp_path), connect=False)
    assert first == second


def save_and_load(rank: int, world_size: int, folder: str) -> None:
    with default_group("lockstep", folder, rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        model = nn.Sequential(nn.Linear(6, 33), nn.Linear(33, 5))
        other = copy.deepcopy(model)
        for each in (model, other):
            fully_shard(each, mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/sync")
        dcp.async_save(get_model_state_dict(model), checkpoint_id=f"{folder}/async").result()
        for name in ("sync", "async"):
            for parameter in other.parameters():
                nn.init.zeros_(parameter)
            loaded = get_model_state_dict(other)
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
            set_model_state_dict(other, loaded)
            for theirs, ours in zip(model.parameters(), other.parameters(), strict=True):
                assert isinstance(theirs, DTensor)
                assert isinstance(ours, DTensor)
                assert torch.equal(theirs.full_tensor(), ours.full_tensor())


def test_distributed_checkpoint(tmp_path: Path) -> None:
    run_processes(2, save_and_load, 2, str(tmp_path), connect=False)
