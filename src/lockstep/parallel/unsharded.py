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
from lockstep.comm.op import DONE, AllWork, Work
from lockstep.parallel.bucket import alias
from lockstep.parallel.shard_layout import ShardLayout

_PLACED_BYTES = 256 * 1024  # a whole parameter of this size is worth an operation of its own


class Unsharded(abc.ABC):
    """The whole parameters of one group, in the dtype that is computed in."""

    views: list[Tensor]  # one per parameter, in its own shape; they exist before there is anything in them
    needs_gather: bool  # whether `launch` is a collective operation

    @abc.abstractmethod
    def launch(self, flat: Tensor | None) -> None:
        """Begin to fill `views` from the ranks' flat shards [S]; None where pieces are elsewhere."""

    @abc.abstractmethod
    def contribute(self, flat: Tensor | None) -> Work:
        """Begin to take part in a gather that only other ranks need; `views` stay as they are."""

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

    def contribute(self, flat: Tensor | None) -> Work:
        return DONE

    def finish(self) -> None:
        pass

    def release(self) -> None:
        pass


@final
class Gathered(Unsharded):
    """Made of all ranks' shards by all-gathers, and freed after use.

    On a CPU a large parameter is gathered into its place, each rank's rows going where they belong. The others, and
    all of them on a GPU, where one operation costs less than several, go together through a buffer.
    Memory: from launch to release the whole parameters; from launch to finish the buffer, W times what is in it.
    """

    needs_gather = True

    def __init__(
        self,
        layout: ShardLayout,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator,
        label: str,
        whole: Tensor | None = None,
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._label = f"gather {label}"
        # all parameters one after the other [whole_numel]: what owns the storage, empty after `release`
        self.whole = torch.empty(layout.whole_numel, dtype=dtype, device=device) if whole is None else whole
        self._nbytes = self.whole.numel() * self.whole.element_size()
        self.whole.untyped_storage().resize_(self._nbytes)
        self.views = [_part(self.whole, *layout.whole_span(i), cut.shape) for i, cut in enumerate(layout.cuts)]
        floor = _PLACED_BYTES if device.type == "cpu" else math.inf
        self._placed = [i for i, cut in enumerate(layout.cuts) if cut.dim == 0 and self.views[i].nbytes >= floor]
        self._staged = [i for i in range(len(layout.cuts)) if i not in self._placed]
        self._buffer: Tensor | None = None
        self._work: Work = DONE
        self._begun: list[Work] = []  # of a gather that has begun in part
        self.release()

    def launch(self, flat: Tensor | None) -> None:
        if not self._begun:  # else it would move from under what has begun
            self.whole.untyped_storage().resize_(self._nbytes)
        self._buffer, self._work = self._gather(flat, self.whole)

    def contribute(self, flat: Tensor | None) -> Work:
        return self._gather(flat, torch.empty_like(self.whole))[1]

    def _gather(self, flat: Tensor | None, whole: Tensor) -> tuple[Tensor, Work]:
        """Begin to fill the places in `whole` [whole_numel], and a buffer [W, what is staged] with the rest.

        The other ranks wait for all operations or for none: after an error the next call begins those that are left.
        """
        assert flat is not None
        pieces = [flat[slice(*self._room(index))] for index in self._staged]
        mine = torch.cat([piece.to(whole.dtype) for piece in pieces]) if pieces else whole.new_empty(0)
        buffer = whole.new_empty(self._layout.world_size, mine.numel())
        for index in self._placed[len(self._begun) :]:
            places = [self._rows(whole, index, rank) for rank in range(self._layout.world_size)]
            places[self._comm.rank].copy_(flat[slice(*self._layout.local_span(index, self._comm.rank))])
            self._begun.append(self._comm.all_gather(places, places[self._comm.rank], async_op=True, label=self._label))
        if mine.numel() and len(self._begun) == len(self._placed):
            self._begun.append(self._comm.all_gather_into_tensor(buffer, mine, async_op=True, label=self._label))
        works, self._begun = self._begun, []
        return buffer, AllWork(works)

    def _room(self, index: int) -> tuple[int, int]:
        """Where parameter `index` lies in a flat shard, with what pads it."""
        return self._layout.starts[index], self._layout.padding(index, 0)[1]

    def _rows(self, whole: Tensor, index: int, rank: int) -> Tensor:
        """The elements of `whole` that `rank` has, of a parameter cut along dim 0."""
        row = math.prod(self._layout.cuts[index].shape[1:])
        first, rows = self._layout.rows(index, rank)
        start = self._layout.whole_starts[index] + first * row
        return whole[start : start + rows * row]

    def finish(self) -> None:
        if self._buffer is None:
            return
        self._work.wait()
        start = 0
        for index in self._staged:
            begin, end = self._room(index)
            self._copy_out(index, self._buffer[:, start : start + end - begin])
            start += end - begin
        self._forget()

    def _forget(self) -> None:
        self._buffer = None
        self._work = DONE  # which refers to the buffer too

    def _copy_out(self, index: int, by_rank: Tensor) -> None:
        """Put the pieces [W, room] of one parameter together."""
        layout = self._layout
        view = self.whole[slice(*layout.whole_span(index))].view(layout.cuts[index].shape)
        if layout.is_even(index):
            view.view(layout.world_size, -1).copy_(by_rank)
            return
        for rank in range(layout.world_size):
            rows = view.narrow(layout.cuts[index].dim, *layout.rows(index, rank))
            rows.copy_(by_rank[rank, : rows.numel()].view(rows.shape))

    def release(self) -> None:
        work = self._work
        self._forget()
        work.wait()  # of a gather for the others' sake; it has to end, and its result is not used
        self.whole.untyped_storage().resize_(0)


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
    return alias(flat, start, shape, flat[start:stop].view(shape).stride())
