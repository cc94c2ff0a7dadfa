"""torch's own checkpoint tools, materialize and our sharded checkpoints, on torch's fully_shard and on ours alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.weights import load_safetensors
from lockstep.comm.communicator import Communicator
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.materialize import materialize
from lockstep.parallel.train_state import TrainState
from lockstep.testing.worlds import run_processes

SIDES: dict[str, Callable[..., Any]] = {"theirs": torch.distributed.fsdp.fully_shard, "ours": fully_shard}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """Rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.second(self.norm(self.first(x)).tanh()))


def build(side: str, seed: int, meta: bool = False, grid: tuple[int, ...] | None = None) -> nn.Module:
    with torch.device("meta"):
        model = Net()
    if not meta:
        materialize(model, seed=seed)
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", grid or (dist.get_world_size(),), mesh_dim_names=names[-len(grid or (1,)) :])
    for module in (model.first, model):
        SIDES[side](module, mesh=mesh)
    return model


def trained(side: str, grid: tuple[int, ...] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(side, 1, grid=grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(0)  # the same on all ranks: buffers are each rank's own
    model(torch.randn(4, 6)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def blank(side: str, grid: tuple[int, ...] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(side, 2, grid=grid)
    return model, torch.optim.AdamW(model.parameters(), lr=0.7)


def whole(tensors: Any) -> Any:
    """The same with whole tensors. Collective."""
    if isinstance(tensors, dict):
        return {key: whole(value) for key, value in tensors.items()}
    return tensors.full_tensor() if isinstance(tensors, DTensor) else tensors


def reference(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every number of both, whole, by name. Collective."""
    found = dict(whole(model.state_dict()))
    for name, state in whole(get_optimizer_state_dict(model, optimizer)["state"]).items():
        found |= {f"{name}/{key}": value for key, value in state.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def check_equals(file: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found, expected = reference(model, optimizer), load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert optimizer.param_groups[0]["lr"] == 0.1
    for param in model.parameters():  # the model still trains, and the optimizer's parameters are the model's
        assert not param.requires_grad or param in optimizer.state
    before = whole(model.state_dict())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(whole(model.state_dict())["first.weight"], before["first.weight"])


def keep_reference(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found = reference(model, optimizer)
    if dist.get_rank() == 0:
        save_file(found, f"{folder}/reference")


# ------------------------------------------------------------------ torch's tools


def dcp_save(comm: Communicator, side: str, folder: str) -> None:
    model, optimizer = trained(side)
    keep_reference(folder, model, optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")


def dcp_load(comm: Communicator, side: str, folder: str) -> None:
    model, optimizer = blank(side)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    check_equals(f"{folder}/reference", model, optimizer)


@pytest.mark.parametrize("side", SIDES)
def test_distributed_checkpoint_at_another_world_size(side: str, tmp_path: Path) -> None:
    run_processes(2, dcp_save, side, str(tmp_path))
    run_processes(3, dcp_load, side, str(tmp_path))


def full_state_dicts(comm: Communicator, side: str, folder: str) -> None:
    model, optimizer = trained(side)
    keep_reference(folder, model, optimizer)
    states = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    assert bool(states[0]) == (comm.rank == 0), "only rank 0 has them"
    for tensor in states[0].values():
        assert not isinstance(tensor, DTensor)
    other, its = blank(side)
    set_model_state_dict(other, states[0], options=BROADCAST)
    set_optimizer_state_dict(other, its, states[1], options=BROADCAST)
    check_equals(f"{folder}/reference", other, its)


@pytest.mark.parametrize("side", SIDES)
def test_full_state_dicts_and_their_broadcast(side: str, tmp_path: Path) -> None:
    run_processes(2, full_state_dicts, side, str(tmp_path))


def meta_workflow(comm: Communicator, side: str, folder: str) -> None:
    model, _ = trained(side)
    state = get_model_state_dict(model)
    expected = {name: tensor.clone() for name, tensor in whole(state).items()}
    for assign in (False, True):
        other = build(side, 2, meta=True)
        if not assign:
            other.to_empty(device="cpu")
        other.load_state_dict(state, assign=assign)
        for name, tensor in whole(other.state_dict()).items():
            assert torch.equal(tensor, expected[name]), name
        other(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize("side", SIDES)
def test_to_empty_and_load_state_dict(side: str, tmp_path: Path) -> None:
    run_processes(2, meta_workflow, side, str(tmp_path))


# ------------------------------------------------------------------ ours


def save_sharded(comm: Communicator, side: str, folder: str, grid: tuple[int, ...] | None) -> None:
    model, optimizer = trained(side, grid)
    keep_reference(folder, model, optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with Checkpointer(folder, comm) as checkpointer:
        checkpointer.save(1, {"torch": state, "ours": TrainState(model, optimizer)})


def load_sharded(comm: Communicator, side: str, folder: str, grid: tuple[int, ...] | None) -> None:
    """Into what torch's functions make, and into ours, which understands both."""
    checkpointer = Checkpointer(folder, comm)
    model, optimizer = blank(side, grid)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    loaded = checkpointer.load({"torch": state}, allow={"extra"})
    assert loaded is not None
    set_model_state_dict(model, loaded.state["torch"]["model"])
    set_optimizer_state_dict(model, optimizer, loaded.state["torch"]["optimizer"])
    check_equals(f"{folder}/reference", model, optimizer)
    for saved_by in ("torch", "ours"):
        model, optimizer = blank(side, grid)
        checkpointer.load({saved_by: TrainState(model, optimizer)}, allow={"extra"})
        check_equals(f"{folder}/reference", model, optimizer)


@pytest.mark.parametrize(("before", "after"), [("theirs", "ours"), ("ours", "theirs"), ("ours", "ours")])
def test_sharded_checkpoints_at_another_world_size(before: str, after: str, tmp_path: Path) -> None:
    run_processes(2, save_sharded, before, str(tmp_path), None)
    run_processes(3, load_sharded, after, str(tmp_path), None)


@pytest.mark.parametrize("side", SIDES)
def test_replicas_write_once_and_any_strategy_loads(side: str, tmp_path: Path) -> None:
    run_processes(4, save_sharded, side, str(tmp_path), (2, 2))
    with open_checkpoint(tmp_path / "step-00000001-g1") as reader:
        pieces = [reader.read("ours/model/first.weight"), reader.manifest.world_size]
    assert (pieces[0].shape, pieces[1]) == ((7, 6), 4)
    run_processes(2, load_sharded, side, str(tmp_path), None)


def materialized(comm: Communicator, side: str, folder: str) -> None:
    model, plain = build(side, 0, meta=True), Net()
    params = dict(model.named_parameters())
    materialize(model, seed=9)
    with torch.device("meta"):
        plain = Net()
    materialize(plain, seed=9)
    expected = plain.state_dict()
    for name, tensor in whole(model.state_dict()).items():
        assert torch.equal(tensor, expected[name]), name
    assert all(param is params[name] for name, param in model.named_parameters()), "the same objects"
    plain.eval(), model.eval()
    x = torch.randn(4, 6)
    torch.testing.assert_close(model(x), plain(x))
    if comm.rank == 0:
        save_file({name: tensor + 1 for name, tensor in expected.items()}, f"{folder}/weights")
    comm.barrier()
    other = build(side, 0, meta=True)
    for target in (model, other):  # one that was used, one on the meta device
        load_safetensors(target, f"{folder}/weights")
        for name, tensor in whole(target.state_dict()).items():
            assert torch.equal(tensor, expected[name] + 1), name
    torch.testing.assert_close(other.eval()(x), model(x))


@pytest.mark.parametrize("side", SIDES)
def test_materialize_and_load_safetensors(side: str, tmp_path: Path) -> None:
    run_processes(3, materialized, side, str(tmp_path))
