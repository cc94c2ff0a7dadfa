"""The small message that goes round at the end of every synchronised backward."""

from __future__ import annotations

import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE

# One int32 vector, summed over ranks:
#   [0, W)      1 at the position of each rank that raised in the middle of this backward
#   [W, W + P)  how many ranks used parameter p since the last synchronisation


class ControlMessage:
    """Which ranks gave up, and how many ranks used each parameter.

    Collective: every rank of `comm` makes one per synchronised backward; making it does not block.
    """

    def __init__(self, comm: Communicator, used: bytearray, gave_up: bool) -> None:
        self._world_size = comm.world_size
        counts = torch.zeros(comm.world_size + len(used), dtype=torch.int32)  # [W + P]
        counts[comm.rank] = int(gave_up)
        if used:
            counts[comm.world_size :] = torch.frombuffer(used, dtype=torch.uint8)
        self._counts = counts.to(comm.device)
        self.work = DONE if comm.world_size == 1 else comm.all_reduce(self._counts, async_op=True, label="ddp.control")

    def failed_ranks(self) -> list[int]:
        """Ranks that raised; to be read after `work.wait()`."""
        flags = self._counts[: self._world_size].tolist()
        return [rank for rank, flag in enumerate(flags) if flag]

    def used_by(self) -> list[int]:
        """How many ranks used each parameter; to be read after `work.wait()`."""
        return self._counts[self._world_size :].tolist()
