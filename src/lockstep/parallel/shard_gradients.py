"""The gradients of one group: from autograd's whole tensors, over the ranks' sum, to this rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.errors import ShardingError
from lockstep.parallel.dtensors import local_tensor
from lockstep.parallel.shard_flight import BufferPool, Flight, Settings, wide
from lockstep.parallel.shard_group import ShardGroup

# Life of the tensors here:
#   wholes[i].grad     autograd's; freed as soon as it has arrived, when it is copied into `buffer`
#   held[i]            gradients kept on this rank only (no_sync), in the dtype of reduction, until the next reduction
#   buffer     [W * S] from the first arrival to finish; in memory that the communicator moves best
#   partial    [S]     summed along `shard` and not yet along `replicate` (requires_all_reduce = False)
#   _sum       [S]     of this backward's reductions, for parameters without `.grad`; their `.grad` become views of it


_WAITING_PARTS = 4  # one part in so many of a group's gradients may wait for the reduction before them


@final
class ShardGradients:
    """Reduces the gradients of one group.

    Collective: `launch`, on every rank of the group's mesh, in the same order.
    """

    def __init__(self, group: ShardGroup, reduce_dtype: torch.dtype | None) -> None:
        self.group = group
        self.settings = Settings(reduce_dtype=reduce_dtype)
        self.comm = group.comm  # or another of the same ranks, that gradients travel over
        self.active_ranks: int | None = None  # that have inputs; None: all of them
        self._forget()

    def _forget(self) -> None:
        self._arrived: set[int] = set()
        self._awaited = 0  # how many have to arrive; counted when the first does
        self._buffer: Tensor | None = None  # the pool's, while gradients arrive
        self._waiting: set[int] = set()  # parameters whose gradients have come and are not in it yet
        self._waiting_numel = 0
        self._laid: set[int] = set()  # parameters whose gradients are in it
        self._held: dict[int, Tensor] = {}
        self._partial: Tensor | None = None
        self._owed: set[int] = set()  # parameters that have something in `_partial`
        self._sum: Tensor | None = None
        self._was_reduced = False  # in this backward

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients travel."""
        return self.settings.reduce_dtype or self.group.dtype

    # ------------------------------------------------------------------ as backward goes on

    def arrive(self, index: int, counts: bool) -> bool:
        """A gradient has come; whether all of the group are here now.

        counts: False on a rank that has run out of inputs, whose gradients are zeros.
        Raises: ShardingError for a sparse gradient.
        """
        whole = self.group.wholes[index]
        if not self._arrived:
            self._awaited = sum(param.requires_grad for param in self.group.params)
        self._arrived.add(index)
        if whole.grad is not None and whole.grad.layout is not torch.strided:
            raise ShardingError(f"rank {self.group.mesh.whole.rank}: {sparse_gradient(self.group.fqns[index])}")
        if not counts:
            whole.grad = None
        if whole.grad is not None:
            whole.grad = self.group.faces[index].settled(whole.grad)  # now, which all ranks do in the same order
            if self.settings.sync:
                if index not in self._waiting:
                    self._waiting_numel += local_tensor(whole.grad).numel()
                self._waiting.add(index)
            else:
                self._hold(index)
        return len(self._arrived) == self._awaited

    def _hold(self, index: int) -> None:
        whole, before = self.group.wholes[index], self._held.get(index)
        assert whole.grad is not None
        with torch.no_grad():
            grad = local_tensor(whole.grad)
            self._held[index] = grad.to(self.dtype) if before is None else before.add_(grad)
        whole.grad = None

    def lay_waiting(self, pool: BufferPool) -> None:
        """Put the gradients that have come where they are going to be reduced from, and free them."""
        with torch.no_grad():
            for index in self._waiting:
                grad, self.group.wholes[index].grad = self.group.wholes[index].grad, None
                if grad is not None:
                    self._lay(index, local_tensor(grad), pool)
        self._waiting.clear()
        self._waiting_numel = 0

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
            self._buffer = self._target() if is_alone else pool.take(self.comm, numel, self.dtype, group.device)
        return self._buffer[:numel].view(group.layout.world_size, -1)

    # ------------------------------------------------------------------ reduction

    def launch(self, pool: BufferPool) -> Flight:
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
            settings = self.settings
            partial, self._partial = self._partial, None
            if settings.comm_hook is not None:
                out = self._by_hook(settings.comm_hook, by_rank.view(-1))
                return Flight(group, self.comm, settings, out, buffer)
            replicas = group.replicate_comm if settings.all_reduce else None
            if group.comm.world_size == 1:
                return Flight(group, self.comm, settings, by_rank.view(-1), None, None, partial, replicas)
            out = self._target()
            label = f"reduce {group.label}"
            work = self.comm.reduce_scatter_tensor(out, by_rank.view(-1), async_op=True, label=label)
            return Flight(group, self.comm, settings, out, buffer, work, partial, replicas)

    def _by_hook(self, hook: Callable[..., None], whole: Tensor) -> Tensor:
        """What the user's hook makes of [W * S]; it may put other data, of another dtype, into the tensors it gets."""
        if self.group.comm.world_size == 1:
            hook(whole)
            return whole
        out = torch.empty(self.group.layout.shard_numel, dtype=whole.dtype, device=whole.device)
        hook(whole, out)
        return out

    def _target(self) -> Tensor:
        """Where the sum goes."""
        group = self.group
        dtype = self.dtype if group.comm.world_size == 1 else wide(self.dtype, group.pieces.dtype)
        replicas = group.replicate_comm
        if replicas is not None and replicas.device == group.device:
            return replicas.empty(group.layout.shard_numel, dtype)
        return torch.empty(group.layout.shard_numel, dtype=dtype, device=group.device)

    @property
    def many_wait(self) -> bool:
        """Whether what waits for a buffer is so much that memory counts more than time, on a CPU at least."""
        is_much = self._waiting_numel * _WAITING_PARTS > self.group.layout.whole_numel
        return is_much and self.group.device.type == "cpu"

    def take(self, flight: Flight) -> None:
        """Add the result of a reduction that has ended to this rank's gradients. Nothing is said to the others."""
        if self.group.replicate_comm is not None and not flight.settings.all_reduce:  # until a later backward
            self._partial = flight.out if self._partial is None else self._partial.add_(flight.out)
            return
        with torch.no_grad():
            self._add(flight.mean(self.active_ranks))

    def _add(self, out: Tensor) -> None:
        """Add `out` [S] to the `.grad` of earlier backwards; keep it for parameters that have none yet."""
        group = self.group
        out = out.to(group.pieces.home, group.pieces.dtype)  # the optimizer's
        kept = {index: param.grad for index, param in enumerate(group.params) if param.grad is not None}
        if kept:
            pieces = [self._piece(out, index) for index in kept]
            torch._foreach_add_([local_tensor(grad) for grad in kept.values()], pieces)
        if len(kept) < len(group.params):
            self._sum = out if self._sum is None else self._sum.add_(out)
        self._was_reduced = True

    def _piece(self, flat: Tensor, index: int) -> Tensor:
        """This rank's piece of a parameter in a flat shard [S], in its own shape."""
        layout, rank = self.group.layout, self.group.comm.rank
        return flat[slice(*layout.local_span(index, rank))].view(layout.piece_shape(index, rank))

    # ------------------------------------------------------------------ the end of backward

    def hand_out(self, used: list[int]) -> list[Parameter]:
        """Let the gradients of the parameters that any rank used be their `.grad`. Returns these parameters."""
        handed: list[Parameter] = []
        dtype = self.settings.grad_dtype
        total, self._sum = None if self._sum is None else self._sum.to(dtype or self._sum.dtype), None
        was_reduced, self._was_reduced = self._was_reduced, False
        for index, (param, count) in enumerate(zip(self.group.params, used, strict=True)):
            if count and was_reduced:
                if param.grad is None and total is not None:  # None: the user took it since it was added to
                    if dtype is not None:
                        param.grad_dtype = dtype  # else torch refuses a gradient of another dtype than the parameter's
                    param.grad = self.group.faces[index].piece(self._piece(total, index))
                handed.append(param)
        return handed

    def discard(self) -> None:
        """Forget the gradients of this step: it failed on some rank."""
        for param in (*self.group.wholes, *self.group.params):
            param.grad = None
        self._forget()


def sparse_gradient(fqn: str) -> str:
    """What to say of a parameter that cannot be trained in shards."""
    return (
        f"parameter {fqn!r} gets a sparse gradient, which cannot be cut over the ranks: build the Embedding with "
        "sparse=False, or leave it out, ignored_params={layer.weight} (FullyShardedDataParallel: ignored_states), and "
        "add its gradients yourself"
    )


def _put(place: Tensor, grad: Tensor, adds: bool) -> None:
    if adds:
        place.add_(grad)
    else:
        place.copy_(grad)
