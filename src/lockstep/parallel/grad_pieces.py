"""The gradients as this rank has them, whatever shards them, and along which ranks the other pieces lie.

What must look at all gradients at once (clipping, a gradient scaler) asks here, and so knows every layout.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import local_of
from lockstep.parallel.shard_slot import slot_of

if TYPE_CHECKING:
    from lockstep.parallel.zero.overlap import ReduceScatterMean

Lines = tuple[Communicator, ...]  # along each of them the pieces of a gradient differ; (): every rank has all of it
HeldGradients = dict[Lines, list[Tensor]]

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weakref to who has its gradient
_comms: WeakKeyDictionary[Any, Communicator] = WeakKeyDictionary()  # torch's process group -> communicator over it


def own_gradients(params: Iterable[Tensor], owner: ReduceScatterMean | None) -> None:
    """From now on `owner` has the gradients of `params`, until it dies or None takes its place: then `.grad` counts."""
    for param in params:
        _owners.pop(param, None)
        if owner is not None:
            _owners[param] = weakref.ref(owner)


def is_plain(param: Tensor) -> bool:
    """Whether every rank has the whole gradient of `param` in its `.grad`, as far as anything here knows."""
    return not hasattr(param, "placements") and _owner_of(param) is None


@torch.no_grad()
def held_gradients(params: Sequence[Tensor]) -> HeldGradients:
    """This rank's pieces of the gradients of `params`, by the lines along which the pieces of one gradient lie.

    The keys, and their order, are equal on all ranks that pass the same parameters: those of sharded ones are there
    also where this rank has no piece. A gradient whose layout is not its parameter's (tensor parallelism leaves some
    to be summed) is laid out like it first. Of a sparse gradient the piece is its values, repeated ones too.
    """
    found = _Lines()
    held: HeldGradients = {}
    owned: dict[int, tuple[ReduceScatterMean, list[Tensor]]] = {}
    for param in params:
        owner = _owner_of(param)
        if owner is not None:
            owned.setdefault(id(owner), (owner, []))[1].append(param)
            continue
        pieces = held.setdefault(found.of(param), [])
        if param.grad is not None:
            pieces.append(_piece_of_gradient(param))
    for owner, theirs in owned.values():
        held.setdefault(found.along((owner.comm,)), []).extend(owner.gradient_pieces(theirs))
    return held


@torch.no_grad()
def held_tensors(tensors: Sequence[Tensor]) -> HeldGradients:
    """`held_gradients` for the gradients themselves."""
    found = _Lines()
    held: HeldGradients = {}
    for tensor in tensors:
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            tensor = tensor.full_tensor()  # pyright: ignore[reportAttributeAccessIssue] (a DTensor)
        held.setdefault(found.of(tensor), []).append(local_of(tensor))
    return held


def in_runs(pieces: Sequence[Tensor]) -> list[Tensor]:
    """`pieces` with those that follow each other in memory as one flat tensor, and without empty ones.

    So the gradients of a sharded unit are one kernel instead of one for each parameter. Memory: views.
    """
    runs: list[tuple[Tensor, int]] = []  # (first piece, elements)
    end: tuple[Any, ...] | None = None
    for piece in pieces:
        numel = piece.numel()
        if numel == 0:
            continue
        place = (piece.untyped_storage().data_ptr(), piece.device, piece.dtype)
        is_dense = piece.is_contiguous()
        if is_dense and end == (*place, piece.storage_offset()):
            first, before = runs.pop()
            runs.append((first, before + numel))
        else:
            runs.append((piece, numel))
        end = (*place, piece.storage_offset() + numel) if is_dense else None
    return [first if first.numel() == numel else first.as_strided((numel,), (1,)) for first, numel in runs]


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """`tensors` in groups of one device and dtype, for which one operation serves many at once."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


class _Lines:
    """Communicators for layouts, as few different ones as possible: one collective serves all that use it."""

    def __init__(self) -> None:
        self._by_ranks: dict[tuple[int, ...], Communicator] = {}
        self._by_layout: dict[Any, Lines] = {}

    def of(self, tensor: Tensor) -> Lines:
        """The lines of a DTensor; none for any other tensor."""
        placements = getattr(tensor, "placements", None)  # importing DTensor to ask for it takes most of a second
        if placements is None:
            return ()
        slot = slot_of(tensor)
        if slot is not None:
            spread = slot.group.faces[slot.index].spread
            beside = () if spread is None else self._over(spread.mesh, spread.placements)
            return self.along((slot.group.comm, *beside))
        return self._over(tensor.device_mesh, placements)  # pyright: ignore[reportAttributeAccessIssue]

    def _over(self, mesh: Any, placements: Any) -> Lines:
        layout = (id(mesh), placements)
        if layout not in self._by_layout:
            cut_along = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
            self._by_layout[layout] = self.along(_comm_over(mesh.get_group(axis)) for axis in cut_along)
        return self._by_layout[layout]

    def along(self, comms: Iterable[Communicator]) -> Lines:
        """`comms` without those of one rank, each as the first communicator that was met with the same ranks."""
        several = (comm for comm in comms if comm.world_size > 1)
        return tuple(dict.fromkeys(self._by_ranks.setdefault(comm.global_ranks, comm) for comm in several))


def _comm_over(process_group: Any) -> Communicator:
    comm = _comms.get(process_group)
    if comm is None:
        comm = _comms[process_group] = torch_names.communicator_over(process_group)
    return comm


def _owner_of(param: Tensor) -> ReduceScatterMean | None:
    owner = _owners.get(param)
    return None if owner is None else owner()


def _piece_of_gradient(param: Tensor) -> Tensor:
    grad: Any = param.grad
    placements = getattr(param, "placements", None)
    if placements is not None and grad.placements != placements:
        param.grad = grad = grad.redistribute(placements=placements)
    return grad._values() if grad.layout == torch.sparse_coo else local_of(grad)
