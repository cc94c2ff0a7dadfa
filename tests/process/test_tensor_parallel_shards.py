"""Sharded around tensor parallelism: our own tools, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lockstep
from lockstep.checkpoint.foreign.export import export_checkpoint
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import is_dtensor
from lockstep.errors import PeerFailed, ShardingError, UnsupportedArgument
from lockstep.parallel.train_state import ModelState, OptimizerState
from lockstep.testing.worlds import run_processes
from shard_sides import ADAMW, Side, seeded, to_local
from tp_models import Llama, loss_of, tensor_parallel
from tp_sides import Grid, grid_of, mesh_of, steps, wholes


def over(comm: Communicator, *shape: int) -> Grid:
    return grid_of(Side("ours", comm), shape)


def trained(grid: Grid, make_optimizer: Callable[[Any], Any] = ADAMW) -> tuple[Any, Any]:
    """A model and its optimizer after two steps."""
    model = grid.model()
    optimizer = make_optimizer(model.parameters())
    steps(grid, model, 2, lambda _: optimizer)
    return model, optimizer


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(wholes(model).items(), wholes(other).values(), strict=True):
        assert name.startswith("grad ") or torch.equal(a, b), name


# ------------------------------------------------------------------ checkpoints


def saved_and_loaded(comm: Communicator, folder: str) -> None:
    """At one layout of ranks, loaded at others, and as one file."""
    model, optimizer = trained(over(comm, 2, 2))
    checkpointer = lockstep.Checkpointer(folder, comm)
    path = checkpointer.save(1, {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)})
    expected = states_of(model, optimizer)
    others = [over(comm, 2, 2).model(), over(comm, 1, 2, 2).model(), seeded(Llama), seeded(Llama)]
    lockstep.fully_shard(others[2], mesh=comm)
    for other in others:
        for param in other.parameters():
            to_local(param).zero_() if param.requires_grad and hasattr(param, "placements") else param.data.zero_()
        its = ADAMW(other.parameters())
        checkpointer.load({"model": ModelState(other), "optimizer": OptimizerState(other, its)})
        assert_same(model, other)
        found = states_of(other, its)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[path], tensor) for path, tensor in expected.items())
    if comm.rank == 0:
        with open_checkpoint(path) as reader:
            export_checkpoint(reader, Path(folder) / "whole.safetensors", form="safetensors")
        written, whole = load_file(Path(folder) / "whole.safetensors"), others[-1].state_dict()
        assert all(torch.equal(written[name], whole[name]) for name in whole)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that the optimizer keeps, whole, by name. Collective."""
    entries = OptimizerState(model, optimizer).state_dict()["state"]
    return {
        f"{name} {key}": value.full_tensor() if is_dtensor(value) else value
        for name, entry in entries.items()
        for key, value in entry.items()
    }


def test_a_checkpoint_is_loaded_at_any_layout(tmp_path: Path) -> None:
    run_processes(4, saved_and_loaded, str(tmp_path))


# ------------------------------------------------------------------ the meta device


def filled(comm: Communicator, folder: str) -> None:
    """By its own initialisers, and from a file."""
    expected = lockstep.materialize(on_meta(), seed=5)
    for shape in ((2, 2), (1, 2, 2)):
        assert_same(lockstep.materialize(over(comm, *shape).model(on_meta), seed=5), expected)
    path = Path(folder) / "model.safetensors"
    if comm.rank == 0:
        save_file(dict(expected.state_dict()), path)
    comm.barrier()
    model = over(comm, 2, 2).model(on_meta)
    lockstep.load_safetensors(model, path)
    assert_same(model, expected)


def on_meta() -> Any:
    with torch.device("meta"):
        return Llama()


def test_first_values_are_those_of_one_process(tmp_path: Path) -> None:
    run_processes(4, filled, str(tmp_path))


# ------------------------------------------------------------------ the older wrapper


def wrapped(comm: Communicator) -> None:
    """It trains alike, and its state dict is whole along both axes."""
    grid = over(comm, 2, 2)
    model = grid.model()
    older = lockstep.FullyShardedDataParallel(tensor_parallel(seeded(Llama), grid.tp), device_mesh=grid.dp)
    assert steps(grid, older) == steps(grid, model)
    state = older.state_dict()
    assert all(torch.equal(state[name], tensor.full_tensor()) for name, tensor in model.state_dict().items())


def test_the_older_wrapper() -> None:
    run_processes(4, wrapped)


# ------------------------------------------------------------------ the sharded optimizer


def stepped(comm: Communicator) -> None:
    """Like the class it runs; its state goes on from where it was."""
    grid = over(comm, 2, 2)
    model, optimizer = trained(grid, lambda params: lockstep.ShardedOptimizer(params, torch.optim.AdamW, lr=1e-2))
    assert_same(model, trained(grid, lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))[0])
    whole = optimizer.state_dict()
    for state in whole["state"].values():
        state.update({key: value.full_tensor() for key, value in state.items() if hasattr(value, "placements")})
    other = grid.model()
    other.load_state_dict(model.state_dict())
    others = lockstep.ShardedOptimizer(other.parameters(), torch.optim.AdamW, lr=1e-2)
    others.load_state_dict(whole)
    for each, its_optimizer in ((model, optimizer), (other, others)):
        steps(grid, each, 1, lambda _, o=its_optimizer: o)
    assert_same(model, other)


def test_sharded_optimizer() -> None:
    run_processes(4, stepped)


# ------------------------------------------------------------------ the gradient scaler


def scaled(comm: Communicator) -> None:
    """One rank finds a number that is not finite: all leave the step out."""
    grid = over(comm, 2, 2)
    model = grid.model()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), lockstep.GradScaler("cpu", init_scale=4.0)
    tokens = grid.tokens(0)
    scaler.scale(loss_of(model(tokens), tokens)).backward()
    if comm.rank == 3:
        to_local(model.layers[1].feed_forward.w1.weight.grad).view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(model, seeded(Llama))


def test_gradient_scaler() -> None:
    run_processes(4, scaled)


# ------------------------------------------------------------------ errors


def an_exception(comm: Communicator) -> None:
    """On all ranks of one tensor parallel group: the others along dp hear of it, and the next step is in order."""
    grid = over(comm, 2, 2)
    model = grid.model()
    tokens = grid.tokens(0)
    loss_of(model(tokens), tokens).backward()
    expected = wholes(model)
    model.zero_grad()
    fails = grid.dp.get_local_rank() == 0
    handle = model.layers[1].register_forward_pre_hook(raise_error) if fails else None
    with pytest.raises(ZeroDivisionError if fails else PeerFailed):
        loss_of(model(tokens), tokens).backward()
    if handle is not None:
        handle.remove()
    loss_of(model(tokens), tokens).backward()
    found = wholes(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def raise_error(*_: object) -> None:
    raise ZeroDivisionError


def test_a_rank_that_raises() -> None:
    run_processes(4, an_exception)


def refused(comm: Communicator) -> None:
    mesh = mesh_of(comm, (2, 2))
    dp, tp = (mesh[name] for name in mesh.mesh_dim_names or ())
    cases: list[tuple[Any, nn.Module, str]] = [
        (comm, cut_by(tp), "Slice both from one"),
        (None, cut_by(tp), "Slice both from one"),
        (init_device_mesh("cpu", (4,)), cut_by(tp), "Slice both from one"),
        (tp, cut_by(tp), "overlapping"),
        (dp, spread_over(mesh_of(comm, (1, 2, 2))), "over 3 axes"),
    ]
    for given, module, reason in cases:
        with pytest.raises(ShardingError, match=f"'Linear.weight' is a DTensor .*{reason}"):
            lockstep.fully_shard(module, mesh=given)
    dp, tp = (mesh_of(comm, (4, 1))[name] for name in mesh_of(comm, (4, 1)).mesh_dim_names or ())
    with pytest.raises(UnsupportedArgument, match=r"reshard_after_forward=2 .*tensor parallelism"):
        lockstep.fully_shard(cut_by(tp), mesh=dp, reshard_after_forward=2)


def cut_by(tp: Any) -> nn.Module:
    return parallelize_module(nn.Linear(4, 4), tp, ColwiseParallel())


def spread_over(mesh: Any) -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)] * 3))
    return linear


def test_meshes_that_do_not_go_together() -> None:
    run_processes(4, refused)
