"""What this rank keeps of a group's parameters: the truth, which the optimizer changes and checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.errors import ShardingError
from lockstep.parallel.dtensors import local_tensor
from lockstep.parallel.shard_extension import cut_extended, is_extended
from lockstep.parallel.shard_layout import ShardLayout
from lockstep.parallel.torch_fsdp import CPUOffloadPolicy
from lockstep.parallel.unsharded import pieces_of


@final
class ShardPieces:
    """`tensors`: this rank's piece of every parameter, each in its own shape.

    They lie one after the other in `flat` [S], which has padding, until `move` gives them other places. A parameter
    whose class says itself what is gathered of it is the only one of its group, and its piece lies for itself.
    Memory: 1 / W of the parameters.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        layout: ShardLayout,
        comm: Communicator,
        device: torch.device,
        offload: CPUOffloadPolicy | None,
        fqn: str,
    ) -> None:
        """Cut `params`, which are whole; `fqn` is the first one's name. device: where they are computed with.

        Raises: ShardingError for a subclass that cannot be cut.
        """
        first = params[0]
        self.dtype = first.dtype
        self.offloads = offload is not None  # they stay on the CPU, also where a GPU computes
        self.home = first.device if first.is_meta else torch.device("cpu") if self.offloads else device
        self.is_extended = is_extended(first, fqn)
        self.flat: Tensor | None = None  # None where the pieces are elsewhere
        self._layout = layout
        self._rank = comm.rank
        self._pins = offload is not None and offload.pin_memory and torch.cuda.is_available()
        if self.is_extended:
            self.tensors = [cut_extended(first, fqn, layout.cuts[0].dim, comm)]
            return
        self.tensors = self._make()
        if not first.is_meta:
            for index, (piece, param) in enumerate(zip(self.tensors, params, strict=True)):
                rows = layout.rows(index, comm.rank)
                piece.copy_(local_tensor(param).detach().narrow(layout.cuts[index].dim, *rows))

    def _make(self) -> list[Tensor]:
        """Pieces in a flat tensor of their own; padding is zeros."""
        flat = torch.zeros(self._layout.shard_numel, dtype=self.dtype, device=self.home)
        self.flat = flat.pin_memory() if self._pins and flat.is_cpu else flat
        return pieces_of(self.flat, self._layout, self._rank)

    def move(self, places: list[Tensor]) -> None:
        """From now on the truth is in `places`, which have the same values."""
        self.flat = None
        self.tensors = places

    def are_at(self, index: int, local: Tensor) -> bool:
        """Whether `local` is the memory of piece `index`."""
        piece = self.tensors[index]
        if self.is_extended:
            return local is piece
        return local.dtype == piece.dtype and (local.data_ptr() == piece.data_ptr() or not local.numel())

    def take(self, given: list[Tensor], label: str) -> bool:
        """Have the values, dtype and device of `given`, pieces in the same shapes; whether they lie elsewhere now.

        Raises: ShardingError where those of one group, `label`, differ in dtype or device.
        """
        if self.is_extended:
            self.tensors = given
            return True
        moves = {(t.dtype, t.device) for t in given} != {(self.dtype, self.home)}
        if moves:
            kinds = {(t.dtype, t.device.type) for t in given}
            if len(kinds) > 1:
                raise ShardingError(
                    f"the parameters of one group have become different, {sorted(map(str, kinds))} ({label}): "
                    "convert all of them"
                )
            self.dtype = given[0].dtype
            self.home = torch.device("cpu") if self.offloads else given[0].device
            self.tensors = self._make()
        with torch.no_grad():
            for piece, local in zip(self.tensors, given, strict=True):
                if piece.data_ptr() != local.data_ptr():
                    piece.copy_(local)
        return moves
