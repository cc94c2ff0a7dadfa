"""What modules, optimizers and checkpoints see of a parameter that a group cuts and gathers as a plain tensor.

                       piece, and gradient             whole
    plain              DTensor over (dp)               plain tensor
    DTensor over tp    DTensor over (dp, tp)           DTensor over (tp)

Under tensor parallelism a group deals with what one rank of tp has of a parameter. What lies beside it is cut by the
groups of the other ranks of tp, in the same way: only the faces know that there is more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.errors import ShardingError
from lockstep.parallel.dtensors import (
    DeviceMesh,
    DTensor,
    DTensorSpec,
    Placement,
    as_dtensor,
    joined_mesh,
    local_tensor,
    shard_within,
)
from lockstep.parallel.shard_layout import Shape
from lockstep.parallel.shard_mesh import ShardMesh

_MOST_AXES = 2  # of a parameter's own mesh, as in torch's FSDP: tensor parallel, or experts and tensor parallel


@dataclass(frozen=True)
class Face:
    """How one parameter appears.

    Collective: `settled`, for a spread parameter, on every rank of its own mesh.
    """

    shape: Shape  # of what is cut and gathered
    full_shape: Shape  # of what the pieces on all ranks are of
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    spread: DTensorSpec | None  # how it lay over other ranks before it was cut

    def piece(self, local: Tensor) -> DTensor:
        """This rank's piece, of the parameter, its gradient or its state. Memory: the same."""
        return as_dtensor(local, self.mesh, self.placements, self.full_shape)

    def whole(self, local: Tensor, requires_grad: bool) -> Parameter:
        """What modules compute with, around the gathered tensor [shape]. Memory: the same."""
        if self.spread is not None:
            local = as_dtensor(local, self.spread.mesh, self.spread.placements, self.full_shape)
        return Parameter(local, requires_grad=requires_grad)

    def settled(self, grad: Tensor) -> Tensor:
        """A gradient of the whole, laid out as the whole is: tensor parallelism leaves some to be summed."""
        if self.spread is None:
            return grad
        assert isinstance(grad, DTensor), "autograd gives a DTensor's gradient as one"
        if grad.placements != self.spread.placements:
            with torch.no_grad():
                grad = grad.redistribute(placements=self.spread.placements)
        return grad


def face_of(param: Tensor, dim: int, mesh: ShardMesh, fqn: str) -> Face:
    """How `param`, cut along `dim` over `mesh`, is going to appear.

    Raises: ShardingError for a DTensor whose mesh has nothing to do with `mesh`.
    """
    if not isinstance(param, DTensor):
        shape = tuple(param.shape)
        return Face(shape, shape, mesh.device_mesh, mesh.placements(dim), None)
    spread = param._spec
    *replicated, _ = mesh.placements(dim)
    cut = shard_within(spread.mesh, spread.placements, dim)
    placements = (*replicated, cut, *spread.placements)
    return Face(
        tuple(local_tensor(param).shape), tuple(param.shape), _joined(mesh.device_mesh, spread, fqn), placements, spread
    )


def _joined(mesh: DeviceMesh, spread: DTensorSpec, fqn: str) -> DeviceMesh:
    """The axes of `mesh`, then those of a parameter's own."""
    axes = f"{mesh.mesh_dim_names} of {mesh.mesh.tolist()}, {spread.mesh.mesh_dim_names} of {spread.mesh.mesh.tolist()}"
    if spread.mesh.ndim > _MOST_AXES:
        raise ShardingError(f"parameter {fqn!r} is a DTensor over {spread.mesh.ndim} axes, {axes}: 1 or 2 are possible")
    try:
        return joined_mesh([mesh, spread.mesh])
    except (ValueError, RuntimeError) as error:
        raise ShardingError(
            f"parameter {fqn!r} is a DTensor already, over a mesh that fully_shard's cannot be joined with: {axes} "
            f"({error}). Slice both from one: mesh = init_device_mesh(..., mesh_dim_names=('dp', 'tp')), "
            "parallelize_module(model, mesh['tp'], plan), fully_shard(model, mesh=mesh['dp'])"
        ) from error
