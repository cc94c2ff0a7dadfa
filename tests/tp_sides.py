"""A model that is tensor parallel and sharded, on the sides of `shard_sides`; one process alone has it whole."""

from __future__ import annotations

import copy
import uuid
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lockstep.comm.communicator import Communicator
from lockstep.parallel.shard_context import ShardContext, context_of, unit_of
from shard_sides import ADAMW, Side, placed, seeded, to_local
from tp_models import LENGTH, VOCABULARY, Llama, loss_of, tensor_parallel

_meshes: weakref.WeakKeyDictionary[Communicator, dict[tuple[int, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


class Grid(NamedTuple):
    """The axes of one mesh, and the side as ranks with batches of their own see it: those along `dp`."""

    side: Side
    dp: DeviceMesh
    tp: DeviceMesh

    def tokens(self, step: int) -> Tensor:
        """What this rank trains with."""
        return self.side.tokens(step, VOCABULARY, 2, LENGTH)

    def model(
        self, make: Callable[[], nn.Module] = Llama, sequence: bool = True, sharing: bool = True, **kwargs: Any
    ) -> Any:
        """A model with every block as a unit."""
        model: Any = seeded(make)
        if self.side.shards:
            tensor_parallel(model, self.tp, sequence)
            for layer in model.layers:
                self.side.shard(layer, mesh=self.dp, **kwargs)
            self.side.shard(model, mesh=self.dp, **kwargs)
        if self.side.is_ours:
            _context(model).wholes.sharing = sharing
        return model


def _context(model: nn.Module) -> ShardContext:
    unit = unit_of(model)
    assert unit is not None
    return context_of(unit)


def is_shared(model: nn.Module) -> bool:
    """Whether the ranks along dp have one copy of the whole parameters."""
    (found,) = {group.is_shared for group in _context(model).groups}
    return found


def grid_of(side: Side, shape: tuple[int, ...]) -> Grid:
    """The ranks of `side` as (dp, tp), or (replicas, shards, tp)."""
    mesh = mesh_of(side.comm, shape)
    names = mesh.mesh_dim_names
    assert names is not None
    places = (mesh.get_coordinate() or [])[:-1]
    own = copy.copy(side)
    own.rank, own.world_size = 0, 1
    for place, name in zip(places, names[:-1], strict=True):
        own.rank, own.world_size = own.rank * mesh[name].size() + place, own.world_size * mesh[name].size()
    return Grid(own, mesh[names[:-1]], mesh[names[-1]])


def mesh_of(comm: Communicator, shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of the ranks of `comm` for `shape`; kept by `comm`, for it holds the process groups.

    Its names are its own: DTensor keeps what it has found out for a mesh, and takes one of an earlier job, with process
    groups that are gone, for equal to it.
    """
    meshes = _meshes.setdefault(comm, {})
    if shape not in meshes:
        tag = comm.broadcast_object(uuid.uuid4().hex)
        names = tuple(f"{name}_{tag}" for name in ("replica", "dp", "tp")[-len(shape) :])
        meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return meshes[shape]


def whole(tensor: Tensor | None) -> Tensor | None:
    """By torch's own code, from the pieces of all ranks."""
    return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor


def wholes(model: nn.Module) -> dict[str, Any]:
    """Parameters, and gradients."""
    state = {name: whole(param.detach()) for name, param in model.named_parameters()}
    return {**state, **{f"grad {name}": whole(param.grad) for name, param in model.named_parameters()}}


def pieces(model: nn.Module) -> dict[str, Any]:
    """What this rank has, and where it says that it lies."""
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        for key, tensor in ((name, param), (f"grad {name}", param.grad)):
            assert isinstance(tensor, DTensor), f"{key} is a {type(tensor).__name__}"
            found[key] = [placed(tensor), to_local(tensor).clone()]
    return found


def steps(grid: Grid, model: Any, count: int = 2, make_optimizer: Callable[[Any], Any] = ADAMW) -> list[Tensor]:
    """The usual loop; this rank's losses."""
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(count):
        tokens = grid.tokens(step)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
