"""Clipping of DTensors on real processes: any placements on any meshes in one call, and units."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_groups import default_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.parallel import grad_pieces
from lockstep.parallel.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from lockstep.parallel.fully_shard import fully_shard
from lockstep.testing.worlds import run_processes

SHARDERS: dict[str, Any] = {"torch": torch_fully_shard, "ours": fully_shard}
NORM_TYPES = (2.0, math.inf, 1.0, 0.5)
GRIDS = {1: ((1, 1),), 2: ((1, 2), (2, 1)), 3: ((3, 1),), 4: ((2, 2),)}


def layouts(world_size: int) -> Iterator[tuple[DeviceMesh, tuple[Placement, ...]]]:
    """Several meshes over the same ranks, over some of them, and of two dimensions."""
    world, again = (init_device_mesh("cpu", (world_size,)) for _ in range(2))
    yield from [(world, (Shard(0),)), (world, (Shard(1),)), (again, (Shard(0),)), (world, (Replicate(),))]
    for shape in GRIDS[world_size]:
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        for placements in (
            (Replicate(), Shard(0)),
            (Shard(1), Replicate()),
            (Shard(0), Shard(1)),
            (Shard(0), Shard(0)),
            (Replicate(), Replicate()),
        ):
            yield grid, placements
        yield from ((grid[name], (Shard(0),)) for name in ("outer", "inner"))


def whole_gradients(count: int) -> list[Tensor]:
    """Uneven ones, and some with fewer rows than ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 3), (7, 2), (1, 4), (2, 3), (9, 9)]
    return [torch.randn(shapes[i % 5], generator=generator) * (1 + i) for i in range(count)]


def laid_out(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Parameter:
    param = Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placements, src_data_rank=None))
    param.grad = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)  # it may keep what it gets
    return param


def clip_everything(comm: Communicator) -> list[float]:
    """All layouts in one call, checked against one process; the norms of what every world has alike."""
    found = list(layouts(comm.world_size))
    wholes = whole_gradients(len(found) + 2)
    for norm_type in NORM_TYPES:
        params = [laid_out(whole, *layout) for whole, layout in zip(wholes[2:], found, strict=True)]
        params += [Parameter(torch.zeros_like(whole)) for whole in wholes[:2]]
        params[-2].grad, params[-1].grad = wholes[0].clone(), wholes[1].clone()
        alone = [Parameter(torch.zeros_like(whole, dtype=torch.float64)) for whole in (*wholes[2:], *wholes[:2])]
        for param, whole in zip(alone, (*wholes[2:], *wholes[:2]), strict=True):
            param.grad = whole.double()
        want = torch.nn.utils.clip_grad_norm_(alone, 2.0, norm_type).item()
        measured = get_total_norm([param.grad for param in params if param.grad is not None], norm_type)
        norm = clip_grad_norm_(params, 2.0, norm_type)
        assert type(norm) is Tensor
        assert norm.item() == pytest.approx(want, rel=1e-6)
        assert measured.item() == norm.item()
        for param, other in zip(params, alone, strict=True):
            grad: Any = param.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(whole.double(), other.grad, rtol=1e-6, atol=0)
        assert clip_grad_norm_(params, 1e9, norm_type).item() == pytest.approx(2.0, rel=1e-5)
    # the same gradients for each world size
    return [
        clip_grad_norm_([laid_out(whole, *found[0]) for whole in wholes[:6]], 1.0, norm_type).item()
        for norm_type in NORM_TYPES
    ]


def test_every_placement_on_every_mesh_in_one_call() -> None:
    bits = {tuple(found) for world_size in GRIDS for found in run_processes(world_size, clip_everything)}
    assert len(bits) == 1, "the same bits on every rank of every world"


def clip_what_is_to_be_summed(comm: Communicator) -> tuple[float, float, list[float]]:
    """A gradient that tensor parallelism left as a sum to be made, and one laid out otherwise than its parameter."""
    mesh = init_device_mesh("cpu", (comm.world_size,))
    whole = torch.arange(6.0).view(2, 3)
    params = [Parameter(distribute_tensor(torch.zeros(2, 3), mesh, [Replicate()])) for _ in range(2)]
    params[0].grad = DTensor.from_local(whole / comm.world_size, mesh, [Partial()])
    params[1].grad = distribute_tensor(whole, mesh, [Shard(1)])
    partial = get_total_norm([params[0].grad])
    norm = clip_grad_norm_(params, 1.0)
    grads: list[Any] = [param.grad for param in params]
    return partial.item(), norm.item(), [grad.full_tensor().norm().item() for grad in grads]


def test_gradients_that_are_not_laid_out_like_their_parameters() -> None:
    one = 55**0.5
    half = [pytest.approx(0.5**0.5)] * 2
    for found in run_processes(2, clip_what_is_to_be_summed):
        assert found == (pytest.approx(one), pytest.approx(110**0.5), half)


class Uneven(nn.Module):
    """Sizes that no world divides, a parameter smaller than any, one that is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.scale).square().sum()


def train(model: nn.Module, clip: Any, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).backward()
        norms.append(clip(list(model.parameters()), 0.5).item())
        optimizer.step()
    return norms


def train_in_units(comm: Communicator, sharder: str) -> tuple[list[float], list[Tensor]]:
    """A mesh of two dimensions for one unit, of one for the others, and a part that stays whole."""
    _clear_sharding_prop_cache()  # else torch gives parameters an equal mesh of an earlier test, whose groups are gone
    world = comm.world_size
    grid = init_device_mesh("cpu", GRIDS[world][0], mesh_dim_names=("replica", "shard"))
    model = Uneven()
    shard = SHARDERS[sharder]
    shard(model.layers[0], mesh=grid)
    shard(model.layers[1])
    shard(model, ignored_params=set(model.unused.parameters()))
    norms = train(model, clip_grad_norm_)
    weights: list[Any] = list(model.parameters())
    return norms, [w.full_tensor() if isinstance(w, DTensor) else w.detach() for w in weights]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("sharder", SHARDERS)
def test_training_in_units_is_that_of_one_process(sharder: str, world_size: int) -> None:
    alone = Uneven()
    norms = train(alone, torch.nn.utils.clip_grad_norm_)
    assert min(norms) > 0.5, "every step is clipped"
    for found, weights in run_processes(world_size, train_in_units, sharder):
        assert found == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(weights, [w.detach() for w in alone.parameters()], rtol=1e-4, atol=1e-6)


def clip_after_torch(comm: Communicator) -> float:
    """Torch's norm, which is a DTensor, can be handed on."""
    mesh = init_device_mesh("cpu", (comm.world_size,))
    params = [laid_out(torch.full((4,), 2.0), mesh, (Shard(0),))]
    total = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
    assert isinstance(total, DTensor)
    clip_grads_with_norm_(params, 1.0, total)
    return clip_grad_norm_(params, 1.0).item()


def test_torchs_own_norm_can_be_used() -> None:
    assert run_processes(2, clip_after_torch) == [pytest.approx(1.0)] * 2


def clip_over(rank: int, backend: str, folder: str) -> float:
    with default_group(backend, folder, rank, 2):
        param = Parameter(DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,)), [Shard(0)]))
        param.grad = DTensor.from_local(torch.full((2,), 2.0), param.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
        return clip_grad_norm_([param], 1.0).item()


def communicators(rank: int) -> int:
    gc.collect()
    return len(grad_pieces._comms)


def test_communicators_are_forgotten_with_their_groups(tmp_path: Path) -> None:
    before = run_processes(2, communicators, connect=False)  # torch's fully_shard leaves groups behind
    for backend in ("gloo", "lockstep"):
        assert run_processes(2, clip_over, backend, str(tmp_path), connect=False) == [4.0, 4.0]
    assert run_processes(2, communicators, connect=False) == before
