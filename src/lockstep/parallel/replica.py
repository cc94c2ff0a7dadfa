"""One model on all ranks: compare what every rank built with rank 0's, copy rank 0's values, and its buffers later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import all_gather_rows, broadcast_object
from lockstep.errors import ModelMismatch
from lockstep.observe.model_match import first_difference
from lockstep.parallel.grad_pieces import by_kind

BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024


def verify_same_model(comm: Communicator, rows: Sequence[Sequence[object]]) -> None:
    """Compare the ranks' descriptions with rank 0's; every rank raises with the first difference of each rank.

    Collective: every rank. Sends 32 bytes per rank where all agree.
    Raises: ModelMismatch.
    """
    text = json.dumps(rows).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8).to(comm.device)
    digests = all_gather_rows(comm, digest, "ddp.verify")
    if bool((digests == digests[0]).all()):
        return
    difference = first_difference(rows, broadcast_object(comm, rows, 0, "ddp.verify", limit=len(text)))
    found = comm.all_gather_object(difference, label="ddp.verify")
    lines = [f"rank {rank} {text}" for rank, text in enumerate(found) if text is not None]
    raise ModelMismatch(
        f"DDP expects same model across all ranks, but {'; '.join(lines)}. Build the module in the same way on every "
        "rank, and freeze parameters before wrapping it."
    )


def broadcast_coalesced(comm: Communicator, tensors: Sequence[Tensor], src: int = 0, label: str = "ddp.init") -> None:
    """Every rank's `tensors` become rank `src`'s: all of one dtype together, wherever they stand, in chunks.

    Memory: one chunk, at most 250 MiB or the largest tensor.
    """
    for members in by_kind(tensors):
        chunk, nbytes = [], 0
        for tensor in members:
            if chunk and nbytes + tensor.nbytes > BROADCAST_CHUNK_BYTES:
                _broadcast_chunk(comm, chunk, src, label)
                chunk, nbytes = [], 0
            chunk.append(tensor)
            nbytes += tensor.nbytes
        _broadcast_chunk(comm, chunk, src, label)


def _broadcast_chunk(comm: Communicator, chunk: Sequence[Tensor], src: int, label: str) -> None:
    if len(chunk) == 1:
        comm.broadcast(chunk[0], src, label=label)
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
    comm.broadcast(flat, src, label=label)
    if comm.rank != src:
        for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


# ------------------------------------------------------------------ from step to step, as in torch's DDP


class BufferSync:
    """Gives every rank the buffers of one, before or after a forward.

    Collective: `sync` on every rank. `forward_raised`: this rank's last forward raised outside training; when it is
    repeated it does not ask for a second synchronisation, for the other ranks have had theirs.
    """

    def __init__(self, module: Module, ignored: Collection[str]) -> None:
        self.hook: Callable[[dict[str, Tensor]], Any] | None = None  # in place of the broadcast
        self.location = "PRE_FORWARD"  # of the forward where it is done; a hook may ask for POST_FORWARD
        self.forward_raised = False
        self._module = module
        self._ignored = ignored
        self.refresh()

    def refresh(self) -> None:
        """Look the buffers up again: modules may replace them (pytorch issue 63916)."""
        self.named = {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}
        self.tensors = list(self.named.values())

    def is_due(self, location: str) -> bool:
        """True where a synchronisation belongs at `location` of the current forward."""
        return location == self.location and not self.forward_raised

    def sync(self, comm: Communicator, source: int) -> list[Any]:
        """Broadcast from `source`, or run the hook; returns the hook's futures, to wait for at the end of backward."""
        self.refresh()
        # A buffer saved for a backward that is still to come may be overwritten with new values: torch allows it too.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.tensors)):
            if self.hook is None:
                broadcast_coalesced(comm, self.tensors, source, label="ddp.buffers")
                return []
            futures = self.hook(self.named)
        return [] if futures is None else list(futures) if isinstance(futures, (list, tuple)) else [futures]
