"""Joins a sharded optimizer with DistributedDataParallel: a bucket is reduced to its owners, not to everybody.

backward   a full bucket goes out as a reduce-scatter, half the bytes of an all-reduce: this rank gets the mean of its
           own part. After it no parameter has a `.grad`: what it held was a mean in one part and not in the others.
step       the optimizer steps the parts, and all-gathers the parameters of one bucket while it steps the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from torch import Tensor

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE, Work
from lockstep.errors import ConfigError
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.comm_hooks import CommHook
from lockstep.parallel.grad_pieces import own_gradients
from lockstep.parallel.zero.chunk import ReplicatedChunk


class Arrived(NamedTuple):
    """The mean gradients of this rank's part of one bucket, and which of its parameters have one."""

    part: Tensor  # a view of the bucket's buffer, which takes new memory as long as this is held
    slots: frozenset[int]


@final
class ReduceScatterMean(CommHook):
    """The mean of each bucket, on every rank for its own part.

    Several synchronised backward passes add up, until `clear`.
    """

    divides = False

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.chunks: list[ReplicatedChunk] = []  # chunks[k] is laid out as bucket k
        self.arrived: list[Arrived | None] = []

    def join(self, chunks: Sequence[ReplicatedChunk]) -> None:
        """The chunks of parameters, one for each bucket."""
        self.chunks = list(chunks)
        self.clear()
        own_gradients((param for chunk in chunks for param in chunk.params), self)

    def launch(self, comm: Communicator, bucket: Bucket) -> Work:
        if comm.world_size == 1:
            return DONE
        if bucket.sparse:
            raise ConfigError("a sharded optimizer reduces dense gradients only: build the Embedding with sparse=False")
        part = self.chunks[bucket.index()].part_of(bucket.flat)
        return comm.reduce_scatter_tensor(part, bucket.flat, async_op=True, label=f"bucket{bucket.index()}")

    def finished(self, buckets: Sequence[Bucket], lacking: set[int]) -> None:
        for k, (chunk, bucket) in enumerate(zip(self.chunks, buckets, strict=True)):
            slots = frozenset(slot for slot, member in enumerate(bucket.members) if member not in lacking)
            for slot in slots:
                bucket.params[slot].grad = None
            part, before = chunk.part_of(bucket.flat), self.arrived[k]
            if before is not None:
                part.add_(before.part)
                slots |= before.slots
            self.arrived[k] = Arrived(part, slots) if slots else None

    def abandoned(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what has arrived: it was stepped, or is not to be."""
        self.arrived = [None] * len(self.chunks)

    def gradients(self, k: int) -> dict[int, Tensor]:
        """The flat gradients of chunk `k`'s pieces, by the piece's index; none for parameters that have none.

        Raises: ConfigError where a parameter has got another gradient since, which was not reduced.
        """
        arrived, chunk = self.arrived[k], self.chunks[k]
        if arrived is None:
            return {}
        for slot in arrived.slots:
            if chunk.params[slot].grad is not None:
                raise ConfigError(
                    f"rank {self.comm.rank}: {chunk.names[slot]} has gradients that were reduced, and others since "
                    "that were not: the last backward before step() must be outside of no_sync()"
                )
        return {
            index: arrived.part[chunk.in_part(span)]
            for index, (span, _) in enumerate(chunk.pieces)
            if span.param in arrived.slots
        }

    def gradient_pieces(self, params: Sequence[Tensor]) -> list[Tensor]:
        """This rank's gradients of `params`: for clipping and gradient scalers, see `grad_pieces.own_gradients`."""
        asked = {id(param) for param in params}
        found: list[Tensor] = []
        for k, (chunk, arrived) in enumerate(zip(self.chunks, self.arrived, strict=True)):
            if arrived is not None and asked.issuperset(map(id, chunk.params)):
                found.append(arrived.part)  # what lies between is zero
            else:
                pieces = self.gradients(k).items()
                found += [piece for index, piece in pieces if id(chunk.params[chunk.pieces[index].span.param]) in asked]
        return found
