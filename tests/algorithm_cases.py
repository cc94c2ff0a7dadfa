"""Every algorithm, run on one rank against what it must give, to the bit. For threads and for processes."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from comm_cases import same
from lockstep.comm.algorithms.choice import ALGORITHMS
from lockstep.comm.algorithms.halving import power_below
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Reduction
from lockstep.comm.reduction import combine, tree_reduce

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@functools.cache
def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What rank `rank` holds, only to be read: numbers whose sums are rounded, so that another order has other bits."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank} {numel} {salt}".encode()))
    numbers = torch.randn(numel, generator=generator, dtype=torch.float64)
    if dtype.is_floating_point:
        return numbers.to(dtype)
    if dtype.is_complex:
        return torch.complex(numbers, numbers.flip(0)).to(dtype)
    return (numbers * 4).to(torch.int64).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    wide = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
    wide[:, 1] = tensor
    return wide[:, 1]


# ------------------------------------------------------------------ in which order each of them adds


def in_a_row(tensors: Sequence[Tensor], reduce: Reduction) -> Tensor:
    """((first + second) + third) + ..., divided at the end for a mean."""

    def step(left: Tensor, right: Tensor) -> Tensor:
        combine(left, right, reduce, out=left)
        return left

    total = functools.reduce(step, tensors[1:], tensors[0].clone())
    return total / len(tensors) if reduce == "mean" else total


def rotated(ranks: Sequence[int], first: int) -> list[int]:
    return [*ranks[first:], *ranks[:first]]


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def by_ring(tensors: Sequence[Tensor], reduce: Reduction) -> Tensor:
    W = len(tensors)
    cut = [tensor.tensor_split(W) for tensor in tensors]
    return torch.cat([in_a_row([cut[r][p] for r in rotated(range(W), (p + 1) % W)], reduce) for p in range(W)])


def by_halving(tensors: Sequence[Tensor], reduce: Reduction) -> Tensor:
    """Pairs first, where there are more ranks than a power of two."""
    pairs = len(tensors) - power_below(len(tensors))
    plain: Reduction = "sum" if reduce == "mean" else reduce
    members = [in_a_row(tensors[2 * pair : 2 * pair + 2], plain) for pair in range(pairs)]
    total = tree_reduce([*members, *tensors[2 * pairs :]], plain)
    return total / len(tensors) if reduce == "mean" else total


REFERENCES: dict[str, Callable[[Sequence[Tensor], Reduction], Tensor]] = {
    "ring": by_ring,
    "halving_doubling": by_halving,
    "tree": tree_reduce,
    "naive": in_a_row,
}


@functools.cache
def expected(name: str, world_size: int, first: int, numel: int, dtype: torch.dtype, reduce: Reduction) -> Tensor:
    """What `name` makes of the values of all ranks, with rank `first` as its first one. Complex as real."""
    return REFERENCES[name]([real(values((first + r) % world_size, numel, dtype)) for r in range(world_size)], reduce)


@functools.cache
def expected_part(
    world_size: int, part: int, numel: int, dtype: torch.dtype, wide: torch.dtype, reduce: Reduction
) -> Tensor:
    """What the ring makes of part `part` of all ranks, summed in `wide`: rank part + 1 begins."""
    order = rotated(range(world_size), (part + 1) % world_size)
    return in_a_row([values(r, numel, dtype, part).to(wide) for r in order], reduce)


# ------------------------------------------------------------------ one rank's checks


def check_reductions(comm: Communicator, numel: int, dtype: torch.dtype, reduce: Reduction, root: int = 0) -> None:
    """all_reduce, reduce and reduce_scatter by every algorithm. Strided tensors on odd ranks."""
    W, rank = comm.world_size, comm.rank
    lay = strided if rank % 2 else torch.clone
    mine = values(rank, numel, dtype)
    for name in REFERENCES:
        tensor = lay(mine)
        comm.all_reduce(tensor, reduce, algorithm=name)
        same(real(tensor), expected(name, W, 0, numel, dtype, reduce))
    for name in ALGORITHMS["reduce"]:
        tensor = lay(mine)
        comm.reduce(tensor, root, reduce, algorithm=name)
        same(real(tensor), expected(name, W, root, numel, dtype, reduce) if rank == root else real(mine))
    if dtype.is_complex:
        return
    output = lay(torch.zeros(numel + rank, dtype=dtype))
    parts = [lay(values(rank, numel + part, dtype, part)) for part in range(W)]
    comm.reduce_scatter(output, parts, reduce, algorithm="ring")
    same(output, expected_part(W, rank, numel + rank, dtype, dtype, reduce))
    wide = WIDER.get(dtype, dtype)
    whole = torch.cat([values(rank, numel, dtype, part) for part in range(W)])
    output, given = torch.zeros(numel, dtype=wide), lay(whole)
    comm.reduce_scatter_tensor(output, given, reduce, algorithm="ring")
    same(given, whole)
    same(output, expected_part(W, rank, numel, dtype, wide, reduce))


def check_moves(comm: Communicator, numel: int, dtype: torch.dtype, root: int = 0) -> None:
    """broadcast, all_gather and all_to_all by every algorithm, and a barrier. Uneven sizes, strided on odd ranks."""
    W, rank = comm.world_size, comm.rank
    lay = strided if rank % 2 else torch.clone
    for name in ALGORITHMS["broadcast"]:
        tensor = lay(values(rank, numel, dtype))
        comm.broadcast(tensor, root, algorithm=name)
        same(tensor, values(root, numel, dtype))
    every = [values(r, numel + r, dtype) for r in range(W)]
    into = [lay(torch.zeros_like(t)) for t in every]
    comm.all_gather(into, every[rank], algorithm="ring")
    for got, wanted in zip(into, every, strict=True):
        same(got, wanted)
    whole = torch.zeros(W, numel, dtype=dtype)
    comm.all_gather_into_tensor(whole, values(rank, numel, dtype), algorithm="ring")
    same(whole, torch.stack([values(r, numel, dtype) for r in range(W)]))
    sizes = [[numel + (3 * a + b) % 4 for b in range(W)] for a in range(W)]
    into = [lay(torch.zeros(sizes[r][rank], dtype=dtype)) for r in range(W)]
    comm.all_to_all(into, [lay(values(rank, n, dtype, r)) for r, n in enumerate(sizes[rank])], algorithm="pairwise")
    for r, got in enumerate(into):
        same(got, values(r, sizes[r][rank], dtype, rank))
    comm.barrier(algorithm="dissemination")
