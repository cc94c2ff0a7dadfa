"""What ranks say to each other before one of them gives all the same tensor."""

from __future__ import annotations

import torch

from lockstep.comm.op import CommOp
from lockstep.comm.shm.announcement import DTYPE_CODES
from lockstep.comm.transport import Transport
from lockstep.errors import CollectiveMismatch


def agree_on_tensor(transport: Transport, numel: int, dtype: torch.dtype, given: int) -> int:
    """Rank 0's `given`, where every rank asks for the same tensor.

    Collective.  Raises: CollectiveMismatch, on every rank alike.
    """
    said = torch.tensor([given, numel, DTYPE_CODES[dtype]], device="cpu")
    found = torch.empty(transport.world_size, len(said), dtype=torch.int64, device="cpu")
    transport.submit(CommOp(-1, "all_gather", (said,), (found,), label="shared", async_op=False)).wait()
    asked = found[:, 1:].tolist()
    for rank, request in enumerate(asked):
        if request != asked[0]:
            names = {code: str(known) for known, code in DTYPE_CODES.items()}
            lines = "".join(f"\n  rank {r}: {asked[r][0]} x {names[asked[r][1]]}" for r in (0, rank))
            raise CollectiveMismatch(
                f"shared on rank {transport.rank}: ranks asked for different tensors:{lines}\nNext: find what makes "
                f"the sizes differ; every rank must ask for the same"
            )
    return int(found[0, 0])
