"""One reduction under way: from the buffer that all ranks gave to the mean of this rank's piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Work
from lockstep.parallel.shard_group import ShardGroup


@final
class BufferPool:
    """Buffers of reductions by communicator and dtype, in memory that the communicator moves best.

    They are used again and again: fresh memory costs as much as the sums themselves.
    Memory: of each size about as many as are out at once.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._uses: dict[int, int] = {}  # address of a buffer -> how often it was taken since the last `trim`

    def take(self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of at least `numel` elements, and at most twice as many, with whatever values."""
        free = self._free.get((id(comm), dtype, device), [])
        for place, buffer in enumerate(free):
            if numel <= buffer.numel() <= 2 * numel:
                return self._count(free.pop(place))
        if device == comm.device:
            return self._count(comm.empty(numel, dtype))
        return self._count(torch.empty(numel, dtype=dtype, device=device))

    def _count(self, buffer: Tensor) -> Tensor:
        self._uses[buffer.data_ptr()] = self._uses.get(buffer.data_ptr(), 0) + 1
        return buffer

    def give_back(self, comm: Communicator, buffer: Tensor) -> None:
        """Let the next `take` have it."""
        self._free.setdefault((id(comm), buffer.dtype, buffer.device), []).append(buffer)

    def trim(self) -> None:
        """Give back what was used only once since the last time: a buffer as large as the largest unit, mostly."""
        for key, free in self._free.items():
            self._free[key] = [buffer for buffer in free if self._uses.get(buffer.data_ptr(), 0) > 1]
        self._uses.clear()


class Settings(NamedTuple):
    """What the user has chosen for a unit's gradients."""

    sync: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None  # None: by the number of ranks
    all_reduce_hook: Callable[[Tensor], None] | None = None
    comm_hook: Callable[..., None] | None = None  # makes the mean in place of the communicators
    reduce_dtype: torch.dtype | None = None  # in which gradients travel; None: as they are computed
    grad_dtype: torch.dtype | None = None  # of `.grad`; None: the parameter's


@final
@dataclass(eq=False)
class Flight:
    """Gradients of one group that were launched, and belong to the communicator until `wait` has returned.

    Collective: `wait`, on every rank of the group's mesh, in the order of the launches.
    """

    group: ShardGroup
    comm: Communicator  # they travel over
    settings: Settings  # as they were at the launch
    out: Tensor  # [S]
    buffer: Tensor | None  # [W * S], the pool's
    work: Work | None = None  # None where one rank has the whole
    partial: Tensor | None = None  # [S], of earlier backwards, to be added to `out`
    replicas: Communicator | None = None  # over which it has still to be added

    def may_finish(self, in_need: bool) -> bool:
        """Whether to wait for it now: it has ended, or its buffer is needed.

        Not where waiting begins another operation: its time is for all ranks to agree on.
        """
        return self.group.replicate_comm is None and (in_need or self.work is None or self.work.is_done())

    def wait(self, pool: BufferPool) -> None:
        """Return when the sum is there, along both axes. After an interrupt it may be called again."""
        with torch.no_grad():
            if self.work is not None:
                self.work.wait()
            if self.buffer is not None:
                buffer, self.buffer = self.buffer, None
                pool.give_back(self.comm, buffer)
            if self.partial is not None:
                self.out.add_(self.partial)
                self.partial = None
            if self.replicas is not None:
                replicas, self.replicas = self.replicas, None  # if interrupted in it: for the others it has begun
                replicas.all_reduce(self.out, label=f"reduce {self.group.label}")

    def mean(self, active_ranks: int | None) -> Tensor:
        """The mean [S] over all ranks, or over `active_ranks`, or what the user has chosen in its place."""
        group, settings = self.group, self.settings
        if settings.comm_hook is not None:
            return self.out
        factor = settings.divide_factor or active_ranks or group.mesh.whole.world_size
        out = self.out.to(wide(self.out.dtype, group.pieces.dtype))
        if factor != 1.0:
            out.div_(factor)
        if settings.all_reduce_hook is not None:
            settings.all_reduce_hook(out)
        return out


def wide(travels: torch.dtype, kept: torch.dtype) -> torch.dtype:
    """In which dtype ranks' gradients are added."""
    return torch.promote_types(travels, kept) if travels.is_floating_point else travels
