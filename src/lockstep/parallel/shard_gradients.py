"""The gradients of one group: from autograd's whole tensors, over the ranks' sum, to this rank's shard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.op import Work
from lockstep.parallel.buffer_pool import BufferPool
from lockstep.parallel.dtensors import as_dtensor, local_tensor
from lockstep.parallel.shard_group import ShardGroup

# Life of the tensors here:
#   wholes[i].grad     autograd's; freed as soon as it has arrived, when it is copied into `buffer`
#   held[i]            gradients kept on this rank only (no_sync), in the dtype of reduction, until the next reduction
#   buffer     [W * S] from the first arrival to finish; in memory that the communicator moves best
#   partial    [S]     summed along `shard` and not yet along `replicate` (requires_all_reduce = False)
#   group.grad [S]     from the reduction until the user has cleared all `.grad`, which are views of it


_WAITING_PARTS = 4  # one part in so many of a group's gradients may wait for the reduction before them


class Settings(NamedTuple):
    """What the user has chosen for a unit's gradients."""

    sync: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None  # None: by the number of ranks
    all_reduce_hook: Callable[[Tensor], None] | None = None


class _Flight(NamedTuple):
    work: Work | None  # None where one rank has the whole
    buffer: Tensor | None  # [W * S], the pool's
    out: Tensor  # [S]


@final
class ShardGradients:
    """Reduces the gradients of one group.

    Collective: `launch` and `finish`, on every rank of the group's mesh, in the same order.
    """

    def __init__(self, group: ShardGroup, reduce_dtype: torch.dtype | None) -> None:
        self.group = group
        self.settings = Settings()
        self.active_ranks: int | None = None  # that have inputs; None: all of them
        self._reduce_dtype = reduce_dtype
        self._arrived: set[int] = set()
        self._buffer: Tensor | None = None  # the pool's, while gradients arrive
        self._waiting: set[int] = set()  # parameters whose gradients have come and are not in it yet
        self._laid: set[int] = set()  # parameters whose gradients are in it
        self._held: dict[int, Tensor] = {}
        self._flights: list[_Flight] = []
        self._partial: Tensor | None = None
        self._owed: set[int] = set()  # parameters that have something in `_partial`
        self._summed = False  # group.grad has a sum of this backward
        self._views: list[Tensor] = []
        self._users = 0

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients travel."""
        return self._reduce_dtype or self.group.dtype

    def let_go(self) -> None:
        """Give back the memory of gradients that the user has cleared."""
        if self.group.grad is not None and all(param.grad is None for param in self.group.params):
            self.group.grad = None
            self._views = []

    # ------------------------------------------------------------------ as backward goes on

    def arrive(self, index: int, counts: bool) -> bool:
        """A gradient has come; whether all of the group are here now.

        counts: False on a rank that has run out of inputs, whose gradients are zeros.
        """
        whole = self.group.wholes[index]
        self._arrived.add(index)
        if not counts:
            whole.grad = None
        if whole.grad is not None:
            if self.settings.sync:
                self._waiting.add(index)
            else:
                self._hold(index)
        return len(self._arrived) == sum(param.requires_grad for param in self.group.params)

    def _hold(self, index: int) -> None:
        whole, before = self.group.wholes[index], self._held.get(index)
        assert whole.grad is not None
        with torch.no_grad():
            self._held[index] = whole.grad.to(self.dtype) if before is None else before.add_(whole.grad)
        whole.grad = None

    def lay_waiting(self, pool: BufferPool) -> None:
        """Put the gradients that have come where they are going to be reduced from, and free them."""
        with torch.no_grad():
            for index in self._waiting:
                grad, self.group.wholes[index].grad = self.group.wholes[index].grad, None
                if grad is not None:
                    self._lay(index, grad, pool)
        self._waiting.clear()

    @property
    def is_due(self) -> bool:
        """Whether there is anything that has to be reduced in this backward and was not yet."""
        return self.settings.sync and bool(self._arrived or self._held)

    @property
    def used(self) -> list[int]:
        """Per parameter, 1 where this rank has a gradient to add."""
        ours = self._waiting | self._laid | self._owed | (self._held.keys() if self.settings.sync else set())
        return [int(index in ours) for index in range(len(self.group.params))]

    def forget_arrivals(self) -> None:
        """What has arrived stays on this rank."""
        self._arrived.clear()

    def _lay(self, index: int, grad: Tensor, pool: BufferPool) -> None:
        """Put a whole gradient into the buffer, cut as the ranks' shards are; add it where there is one already."""
        layout = self.group.layout
        by_rank = self._buffer_for(pool)  # [W, S]
        adds, start, stop = index in self._laid, *layout.local_span(index, 0)
        self._laid.add(index)
        if layout.is_even(index):
            _put(by_rank[:, start:stop], grad.reshape(layout.world_size, -1), adds)
            return
        for rank in range(layout.world_size):
            start, stop = layout.local_span(index, rank)
            rows = grad.narrow(layout.cuts[index].dim, *layout.rows(index, rank))
            _put(by_rank[rank, start:stop].view(rows.shape), rows, adds)
            by_rank[rank, slice(*layout.padding(index, rank))].zero_()

    def _buffer_for(self, pool: BufferPool) -> Tensor:
        group = self.group
        numel = group.layout.world_size * group.layout.shard_numel
        if self._buffer is None:
            is_alone = group.comm.world_size == 1
            self._buffer = self._target() if is_alone else pool.take(group.comm, numel, self.dtype, group.device)
        return self._buffer[:numel].view(group.layout.world_size, -1)

    # ------------------------------------------------------------------ reduction

    def launch(self, pool: BufferPool) -> None:
        """Begin to reduce what has arrived and what was held; zeros stand for the rest."""
        group = self.group
        used = {index for index, is_used in enumerate(self.used) if is_used}
        self._owed = set() if self.settings.all_reduce or group.replicate_comm is None else used
        self.lay_waiting(pool)
        with torch.no_grad():
            held = self._held if self.settings.sync else {}  # else another rank asked for this reduction
            for index, grad in held.items():
                self._lay(index, grad, pool)
            by_rank = self._buffer_for(pool)
            for index in range(len(group.params)):
                if index not in self._laid:
                    by_rank[:, group.layout.starts[index] : group.layout.padding(index, 0)[1]].zero_()
            buffer, self._buffer = self._buffer, None
            self._arrived.clear()
            held.clear()
            self._laid.clear()
            if group.comm.world_size == 1:
                self._flights.append(_Flight(None, None, by_rank.view(-1)))
                return
            out = self._target()
            label = f"reduce {group.label}"
            work = group.comm.reduce_scatter_tensor(out, by_rank.view(-1), async_op=True, label=label)
        self._flights.append(_Flight(work, buffer, out))

    def _target(self) -> Tensor:
        """Where the sum goes."""
        group = self.group
        dtype = self.dtype if group.comm.world_size == 1 else _wide(self.dtype, group.kept_dtype)
        replicas = group.replicate_comm
        if replicas is not None and replicas.device == group.device:
            return replicas.empty(group.layout.shard_numel, dtype)
        return torch.empty(group.layout.shard_numel, dtype=dtype, device=group.device)

    @property
    def many_wait(self) -> bool:
        """Whether what waits for a buffer is so much that memory counts more than time, on a CPU at least."""
        numel = sum(self.group.wholes[index].numel() for index in self._waiting)
        return numel * _WAITING_PARTS > self.group.layout.whole_numel and self.group.device.type == "cpu"

    def may_finish(self, in_need: bool) -> bool:
        """Whether to finish the oldest reduction now: it has ended, or its buffer is needed.

        Not where finishing begins another operation: its time is for all ranks to agree on.
        """
        if not self._flights or self.group.replicate_comm is not None:
            return False
        work = self._flights[0].work
        return in_need or work is None or work.is_done()

    def finish_oldest(self, pool: BufferPool) -> None:
        """Wait for a reduction and add its result to this rank's gradients."""
        flight = self._flights.pop(0)
        with torch.no_grad():
            if flight.work is not None:
                flight.work.wait()
            if flight.buffer is not None:
                pool.give_back(self.group.comm, flight.buffer)
            out = self._over_replicas(flight.out)
            if out is not None:
                self._add(out)

    def _over_replicas(self, out: Tensor) -> Tensor | None:
        """The sum along both axes, divided; None where it is to wait for a later backward."""
        group, settings = self.group, self.settings
        if group.replicate_comm is not None:
            if self._partial is not None:
                out.add_(self._partial)
                self._partial = None
            if not settings.all_reduce:
                self._partial = out
                return None
            group.replicate_comm.all_reduce(out, label=f"reduce {group.label}")
        factor = settings.divide_factor or self.active_ranks or group.mesh.whole.world_size
        out = out.to(_wide(out.dtype, group.kept_dtype))
        if factor != 1.0:
            out.div_(factor)
        if settings.all_reduce_hook is not None:
            settings.all_reduce_hook(out)
        return out

    def _add(self, out: Tensor) -> None:
        """Take `out` [S] over as the group's gradient, or add it to what earlier backwards left there."""
        group = self.group
        out = out.to(group.home, group.kept_dtype)  # the optimizer's
        kept = [index for index, param in enumerate(group.params) if param.grad is not None]
        if not kept and not self._summed:
            self._replace(out)
        else:
            grad = group.grad
            if grad is None or (not self._summed and self._is_kept()):
                grad, self._views = torch.zeros_like(out), []
            self._make_own(grad, kept)
            grad.add_(out)
            group.grad = grad
        self._summed = True

    def _replace(self, out: Tensor) -> None:
        group = self.group
        if out is not group.grad:
            group.grad = out
            self._views = []

    def _make_own(self, grad: Tensor, kept: list[int]) -> None:
        """Let `grad` have what the parameters' `.grad` have before more is added; users may have put others there."""
        if self._summed:
            return
        for index, param in enumerate(self.group.params):
            span = slice(self.group.layout.starts[index], self.group.layout.padding(index, 0)[1])
            if index not in kept:
                grad[span].zero_()
            elif not self._views or param.grad is not self._views[index]:
                assert param.grad is not None
                start, stop = self.group.layout.local_span(index, self.group.comm.rank)
                grad[start:stop].copy_(local_tensor(param.grad).reshape(-1))

    def _is_kept(self) -> bool:
        """Whether the user holds a gradient of an earlier step, which must not change under him."""
        assert self.group.grad is not None
        if not self._views:
            return True
        users = torch._C._storage_Use_Count(self.group.grad.untyped_storage()._cdata)
        return users > self._users or any(sys.getrefcount(view) > 3 for view in self._views)  # 3: list, loop, call

    # ------------------------------------------------------------------ the end of backward

    def hand_out(self, used: list[int]) -> None:
        """Let the gradients of the parameters that any rank used be their `.grad`."""
        group = self.group
        summed, self._summed = self._summed, False
        if not summed or group.grad is None:
            return
        if not self._views:
            self._views = self._faces(group.grad)
            self._users = torch._C._storage_Use_Count(group.grad.untyped_storage()._cdata)
        for index, (param, count) in enumerate(zip(group.params, used, strict=True)):
            if count and param.grad is not self._views[index]:
                param.grad = self._views[index]
            if count:
                for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(param)

    def discard(self) -> None:
        """Forget the gradients of this step: it failed on some rank."""
        for whole in self.group.wholes:
            whole.grad = None
        self._buffer = None
        self._waiting.clear()
        self._laid.clear()
        self._arrived.clear()
        self._held.clear()
        self._flights.clear()
        self._partial = None
        self._owed.clear()
        self._summed = False
        for param in self.group.params:
            param.grad = None

    def _faces(self, grad: Tensor) -> list[Tensor]:
        group, faces = self.group, []
        for index, cut in enumerate(group.layout.cuts):
            start, stop = group.layout.local_span(index, group.comm.rank)
            piece = grad[start:stop].view(group.layout.piece_shape(index, group.comm.rank))
            faces.append(as_dtensor(piece, group.mesh.device_mesh, group.mesh.placements(cut.dim), cut.shape))
        return faces


def _put(place: Tensor, grad: Tensor, adds: bool) -> None:
    if adds:
        place.add_(grad)
    else:
        place.copy_(grad)


def _wide(travels: torch.dtype, kept: torch.dtype) -> torch.dtype:
    """In which dtype ranks' gradients are added."""
    return torch.promote_types(travels, kept) if travels.is_floating_point else travels
