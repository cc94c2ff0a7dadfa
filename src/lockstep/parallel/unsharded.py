"""Where a group's whole parameters are while modules compute with them.

resident   on one rank, in its own shard; on ranks of one host, in memory that all see and in which each has its pieces:
           what one rank's optimizer writes is where the others read it, and nothing is ever sent
gathered   everywhere else: an all-gather, and storage that is given back in between

autograd keeps references to the whole parameters and to views of them from forward to backward. So the tensors in
`views`, and the storages under them, are made once; memory is given back by emptying a storage that stays the same.
"""

from __future__ import annotations

import abc
import math
from typing import final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, Work
from lockstep.parallel.shard_layout import ShardLayout


class Unsharded(abc.ABC):
    """The whole parameters of one group, in the dtype that is computed in."""

    views: list[Tensor]  # one per parameter, in its own shape; they exist before there is anything in them
    needs_gather: bool  # whether `launch` is a collective operation

    @abc.abstractmethod
    def launch(self, flat: Tensor | None) -> None:
        """Begin to fill `views` from the ranks' flat shards [S]; None where pieces are elsewhere."""

    @abc.abstractmethod
    def contribute(self, flat: Tensor | None) -> None:
        """Take part in a gather that only other ranks need; `views` stay as they are."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Return when `views` may be read."""

    @abc.abstractmethod
    def release(self) -> None:
        """Give back what memory can be given back; `views` may have no values until the next `finish`."""


@final
class Resident(Unsharded):
    """Whole parameters that stay where they are: on one rank in its shard, on ranks of one host in memory that all see.

    A rank changes its own pieces and reads everything. It must not change them before all ranks have read what was
    there, nor read before all have changed theirs: what writes stands between two meetings of the ranks.
    Memory: the whole / W for each rank. That is all there is of the parameters, or with `is_copy` a copy of them.
    """

    needs_gather = False

    def __init__(self, layout: ShardLayout, flat: Tensor, rank: int, is_copy: bool) -> None:
        self.is_copy = is_copy
        self.views = [_part(flat, *layout.whole_span(i), cut.shape) for i, cut in enumerate(layout.cuts)]
        self.mine = [self._piece(flat, layout, i, rank) for i in range(len(layout.cuts))]

    def _piece(self, flat: Tensor, layout: ShardLayout, index: int, rank: int) -> Tensor:
        shape, dim = layout.cuts[index]
        start, stop = layout.whole_span(index)
        first, rows = layout.rows(index, rank)
        if self.is_copy:
            return flat[start:stop].view(shape).narrow(dim, first, rows)
        row = math.prod(shape[1:])  # the pieces are the truth, cut along dim 0
        return own_part(flat, start + first * row, start + (first + rows) * row, layout.piece_shape(index, rank))

    def write(self, pieces: list[Tensor]) -> None:
        """Let this rank's part of the whole have the values of its `pieces`."""
        torch._foreach_copy_(self.mine, pieces)

    def launch(self, flat: Tensor | None) -> None:
        pass

    def contribute(self, flat: Tensor | None) -> None:
        pass

    def finish(self) -> None:
        pass

    def release(self) -> None:
        pass


@final
class Gathered(Unsharded):
    """Made of all ranks' shards by an all-gather, and freed after use.

    Memory: between launch and finish [W * S] of gathered shards; from finish to release the whole parameters.
    """

    needs_gather = True

    def __init__(
        self, layout: ShardLayout, dtype: torch.dtype, device: torch.device, comm: Communicator, label: str
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._label = f"gather {label}"
        self._flat = torch.empty(layout.whole_numel, dtype=dtype, device=device)  # the one owner of the storage
        self._nbytes = self._flat.untyped_storage().nbytes()
        self.views = [_part(self._flat, *layout.whole_span(i), cut.shape) for i, cut in enumerate(layout.cuts)]
        self._gathered: Tensor | None = None
        self._work: Work = DONE
        self.release()

    def launch(self, flat: Tensor | None) -> None:
        self._gathered, self._work = self._gather(flat)

    def contribute(self, flat: Tensor | None) -> None:
        self._gather(flat)[1].wait()

    def _gather(self, flat: Tensor | None) -> tuple[Tensor, Work]:
        assert flat is not None
        mine = flat.to(self._flat.dtype)  # [S]
        if self._comm.world_size == 1:
            return mine, DONE
        gathered = torch.empty(self._comm.world_size * mine.numel(), dtype=mine.dtype, device=mine.device)
        return gathered, self._comm.all_gather_into_tensor(gathered, mine, async_op=True, label=self._label)

    def finish(self) -> None:
        if self._gathered is None:
            return
        self._work.wait()
        self._flat.untyped_storage().resize_(self._nbytes)
        by_rank = self._gathered.view(self._comm.world_size, -1)  # [W, S]
        for index in range(len(self._layout.cuts)):
            self._copy_out(index, by_rank)
        self._forget()

    def _forget(self) -> None:
        self._gathered = None
        self._work = DONE  # which refers to the gathered shards too

    def _copy_out(self, index: int, by_rank: Tensor) -> None:
        layout = self._layout
        view = self._flat[slice(*layout.whole_span(index))].view(layout.cuts[index].shape)
        if layout.is_even(index):
            start, stop = layout.local_span(index, 0)
            view.view(layout.world_size, stop - start).copy_(by_rank[:, start:stop])
            return
        for rank in range(layout.world_size):
            start, stop = layout.local_span(index, rank)
            if stop > start:
                rows = view.narrow(layout.cuts[index].dim, *layout.rows(index, rank))
                rows.copy_(by_rank[rank, start:stop].view(rows.shape))

    def release(self) -> None:
        work = self._work
        self._forget()
        self._flat.untyped_storage().resize_(0)
        work.wait()  # of a gather for the others' sake; it has to end, and its result is not used


def pieces_of(shard: Tensor, layout: ShardLayout, rank: int) -> list[Tensor]:
    """The pieces of a flat shard [S], each in its own shape. Memory: the same."""
    spans = [layout.local_span(index, rank) for index in range(len(layout.cuts))]
    return [own_part(shard, start, stop, layout.piece_shape(i, rank)) for i, (start, stop) in enumerate(spans)]


def own_part(flat: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    """Elements of `flat` as a tensor with a storage of its own over the same memory.

    What saves a storage as a whole, as torch.save does, then saves this part and nothing else.
    """
    if flat.is_meta:
        return flat[start:stop].view(shape)
    first = flat.storage_offset()
    size = flat.element_size()
    storage = flat.untyped_storage()[(first + start) * size : (first + stop) * size]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, shape)  # pyright: ignore[reportCallIssue]


def _part(flat: Tensor, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
    """Elements of `flat` as a tensor that autograd does not know as a view: writing `flat` is not a change of it.

    Without that, gathering parameters again for backward would look like changing what forward saved.
    """
    part = flat[start:stop].view(shape)
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return alias.set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
