"""The ranks of one group: who they are, which memory they have together, and until when."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.comm.operands import check_numel
from lockstep.comm.pulse import open_pulse
from lockstep.comm.transport import Transport
from lockstep.errors import TransportClosed

if TYPE_CHECKING:
    from typing_extensions import Self

    from lockstep.comm.place import Place


class RankGroup(abc.ABC):  # noqa: B024 (it is complete, but of no use before there are operations)
    """This rank's place among the others. It lasts until `close`, or the end of a `with`."""

    def __init__(self, transport: Transport, name: str = "world") -> None:
        self.transport = transport
        self.name = name
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.global_ranks = transport.global_ranks  # rank in this group -> rank in the job
        self.device = transport.device  # where this rank's tensors are expected
        self.timeout_s = transport.timeout_s  # limit of every operation that names no other
        self.place: Place | None = None  # where init() found this process; None for groups made otherwise
        self.forget: Callable[[Any], object] = lambda _: None  # told of the end, by whoever lists this one
        self._pulse = open_pulse(os.environ)  # so that a launcher sees whether this rank gets on
        self._closed = False

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}"
        return f"<{type(self).__name__} {self.name!r}: {place}, {self.transport.name}, {self.device}>"

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor [numel] where this group's operations need the fewest copies, with whatever values were there.

        Between ranks of one host it lies in memory that all see. A tensor like any other, also for other groups.
        Not collective. Memory: given back with the last reference to its storage.
        """
        check_numel("empty", numel)
        return self.transport.empty(numel, dtype)

    def shared(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """One tensor [numel] of zeros that all ranks see: what one writes, the others read after the next collective.

        None, on every rank alike, where ranks cannot share memory or there is no room for it. Do not pass it to a
        collective as what each rank has for itself: it is the same on all. Collective.
        Memory: given back when no rank refers to its storage any more; a rank that keeps it keeps it for all.
        Raises: CollectiveMismatch, where ranks ask for different tensors.
        """
        self._begin("shared")
        check_numel("shared", numel)
        if self.world_size == 1:
            with torch.inference_mode(False):  # like what the transports make: for use in every mode
                return torch.zeros(numel, dtype=dtype, device=self.device)
        return self.transport.shared(numel, dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what this communicator holds. Not collective; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.transport.close()
            self.forget(self)

    def _begin(self, kind: str) -> None:
        """An operation begins on this rank. Raises: TransportClosed after the end."""
        if self._closed:
            raise TransportClosed(f"{kind} on a closed communicator ({self.name!r}, rank {self.rank})")
        self._pulse.beat()
