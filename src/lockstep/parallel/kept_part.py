"""What a unit keeps between forward and backward where `reshard_after_forward` is a number n: 1 / n of the whole.

Forward gathers from the shards of all W ranks, and each rank keeps its part of n when it gives the rest back. Backward
gathers from the parts of n neighbours: less goes over the wire, and not far. Both are collective over all ranks, in the
plan's order: a rank that has no use for the parameters takes part and keeps its part too, so all have one or none has.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from torch.nn import Parameter

from lockstep.comm.op import Work
from lockstep.parallel.dtensors import Replicate, Shard, as_dtensor
from lockstep.parallel.shard_layout import ShardLayout
from lockstep.parallel.shard_mesh import ShardMesh
from lockstep.parallel.unsharded import Gathered, Unsharded, pieces_of


@final
class KeptPart(Unsharded):
    """Whole parameters that are gathered from all ranks, or from n of them that kept them in parts.

    Memory: that of `Gathered`; from forward to backward the part, 1 / n of the whole in the dtype of computation.
    """

    needs_gather = True

    def __init__(self, far: Gathered, layout: ShardLayout, grid: ShardMesh, label: str) -> None:
        """grid: of all ranks, this one's neighbours along `shard`."""
        neighbours = grid.shard
        self._far = far
        self._layout = ShardLayout(layout.cuts, neighbours.world_size)
        self._rank = neighbours.rank
        self._mesh = grid.device_mesh
        self._near = Gathered(self._layout, far.whole.dtype, far.whole.device, neighbours, label, far.whole)
        self._source = far
        self._part: Tensor | None = None  # [whole / n], with padding
        self._all_have = False  # every rank has its part, or the whole to cut it from
        self.keeps = False  # in a forward that a backward follows
        self.views = far.views

    def launch(self, flat: Tensor | None) -> None:
        self._source, given = self._next(flat)
        self._source.launch(given)
        self._has_begun()

    def contribute(self, flat: Tensor | None) -> Work:
        source, given = self._next(flat)
        work = source.contribute(given)
        self._has_begun()
        return work

    def _next(self, flat: Tensor | None) -> tuple[Gathered, Tensor | None]:
        """Whose gather comes next, and what this rank gives to it."""
        return (self._near, self._cut()) if self._all_have else (self._far, flat)

    def _has_begun(self) -> None:
        self._all_have = self.keeps
        if not self.keeps:
            self._part = None

    def _cut(self) -> Tensor:
        """This rank's part: as it was kept, or of the whole parameters that this rank has."""
        if self._part is not None:
            return self._part
        self.finish()
        part = self._far.whole.new_zeros(self._layout.shard_numel)
        for index, piece in enumerate(pieces_of(part, self._layout, self._rank)):
            cut = self._layout.cuts[index]
            piece.copy_(self.views[index].narrow(cut.dim, *self._layout.rows(index, self._rank)))
        return part

    def finish(self) -> None:
        self._source.finish()

    def release(self) -> None:
        if self._all_have:
            self._part = self._cut()
        self._source.release()

    def forget(self) -> None:
        """The shards have changed, or are going to: the next gather is from them. All ranks at the same point."""
        self._all_have = self.keeps = False
        self._part = None

    def faces(self, params: list[Parameter]) -> list[Parameter]:
        """What modules have for `params` between forward and backward: the parts, as DTensors over the neighbours."""
        if self._part is None:
            return params
        pieces = pieces_of(self._part, self._layout, self._rank)
        faces = [
            as_dtensor(piece, self._mesh, (Replicate(), Shard(cut.dim)), cut.shape)
            for piece, cut in zip(pieces, self._layout.cuts, strict=True)
        ]
        return [Parameter(face, requires_grad=p.requires_grad) for p, face in zip(params, faces, strict=True)]
