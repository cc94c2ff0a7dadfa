"""Whole tensors from the ranks' pieces, and this rank's piece of a whole one."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.tensor_parts import part_of
from lockstep.errors import ConfigError
from lockstep.parallel.dtensors import DTensor, as_dtensor, local_tensor
from lockstep.parallel.shard_slot import ShardSlot, slot_of


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded parameter; any other tensor itself. Collective: every rank that has pieces."""
    whole = gathered(tensor, tensor) if isinstance(tensor, DTensor) else tensor.detach()
    assert whole is not None
    return whole


@torch.no_grad()
def gathered(piece: Tensor, param: Tensor, rank0_only: bool = False) -> Tensor | None:
    """The whole tensor that the ranks have pieces of, cut as `param` is: itself, its gradient, its optimizer's state.

    Collective: every rank that has pieces. Memory: the whole; nothing, and None, on other ranks than 0 if `rank0_only`.
    """
    piece, slot = local_tensor(piece).detach(), slot_of(param)
    if slot is not None and slot.group.faces[slot.index].spread is None:
        return _gather(piece, slot, rank0_only)
    if not isinstance(param, DTensor):
        return piece.clone()
    mesh = param.device_mesh
    whole = as_dtensor(piece, mesh, param.placements, param.shape).full_tensor()
    if rank0_only and any(mesh.get_coordinate() or ()):
        return None
    return whole.clone() if whole.untyped_storage()._cdata == piece.untyped_storage()._cdata else whole


def _gather(piece: Tensor, slot: ShardSlot, rank0_only: bool) -> Tensor | None:
    group, index = slot.group, slot.index
    comm, cut, label = group.comm, group.layout.cuts[index], f"fsdp.whole {group.fqns[index]}"
    if rank0_only and group.replicate_comm is not None and group.replicate_comm.rank != 0:
        return None  # its line along `shard` holds copies of what rank 0's line gathers
    piece = piece.to(comm.device)
    if rank0_only and comm.rank != 0:
        comm.gather(piece, dst=0, label=label)
        return None
    whole = torch.empty(cut.shape, dtype=piece.dtype, device=piece.device)
    pieces = [whole.narrow(cut.dim, *group.layout.rows(index, rank)) for rank in range(comm.world_size)]
    if rank0_only:
        comm.gather(piece, pieces, label=label)
    else:
        comm.all_gather(pieces, piece, label=label)
    return whole


def piece_of(whole: Tensor, param: Tensor) -> Tensor:
    """This rank's piece of a tensor of `param`'s whole shape, cut as `param` is. Memory: a view."""
    return whole.detach()[part_of(param.detach()).slices]


def sharded_like(piece: Tensor, param: DTensor) -> DTensor:
    """`piece`, this rank's, as a DTensor that lies as `param` does."""
    local = piece.detach().to(local_tensor(param).device).contiguous()
    return as_dtensor(local, param.device_mesh, param.placements, param.shape)


def resharded(value: Tensor, param: DTensor, name: str, is_local: bool = False) -> Tensor:
    """`value`, saved in whatever form, as a DTensor that lies as `param` does; itself where its shape does not fit.

    is_local: a plain tensor is this rank's piece, and not the whole.
    Collective: where `value` is a DTensor that is cut otherwise.
    Raises: ConfigError for a piece that is not this rank's.
    """
    if isinstance(value, DTensor):
        if value.shape != param.shape:
            return value
        if (value.placements, value.device_mesh.shape) == (param.placements, param.device_mesh.shape):
            return sharded_like(local_tensor(value), param)
        value = value.full_tensor().detach()
    elif is_local:
        expected = tuple(local_tensor(param).shape)
        if tuple(value.shape) != expected:
            raise ConfigError(
                f"LOCAL_STATE_DICT: {name!r} is {tuple(value.shape)}, and this rank's piece is {expected}. Pieces are "
                "for the same ranks only; whole tensors are loaded as FULL_STATE_DICT"
            )
        return sharded_like(value, param)
    return sharded_like(piece_of(value, param), param) if value.shape == param.shape else value
