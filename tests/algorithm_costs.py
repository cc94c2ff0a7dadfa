"""What each collective of `comm/algorithms/` costs, in closed form: every rank's messages and bytes, the time of all.

The tests hold the algorithms to it, `bench_algorithms` measures them against it.

The model is alpha, beta, gamma: a step takes alpha seconds, and beta for each byte that a rank moves in it, in both
directions at once; a reduction takes gamma for each byte of its result.

Sizes are in bytes; `parts` are those of one part for each rank. All functions are pure.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from operator import add
from typing import NamedTuple

from lockstep.comm.algorithms.halving import power_below


class Traffic(NamedTuple):
    """What one rank does. Exact."""

    steps: int = 0  # times that it starts messages and waits for them
    sends: int = 0
    receives: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    reduced_bytes: int = 0


class Path(NamedTuple):
    """The longest row of things that must happen one after the other, on whichever rank.

    Exact where all parts are equally large, else an upper bound.
    """

    steps: int = 0
    nbytes: int = 0
    reduced_bytes: int = 0

    def time_s(self, alpha_s: float, beta_s: float, gamma_s: float = 0.0) -> float:
        """From the moment all ranks begin until the last one ends. beta_s, gamma_s: seconds per byte."""
        return self.steps * alpha_s + self.nbytes * beta_s + self.reduced_bytes * gamma_s


class Cost(NamedTuple):
    """Of one collective: the traffic of each rank, and the path."""

    ranks: tuple[Traffic, ...]
    path: Path

    def then(self, after: Cost) -> Cost:
        """This one, followed by another on the same ranks."""
        both = zip(self.ranks, after.ranks, strict=True)
        ranks = tuple(Traffic(*starmap(add, zip(*pair, strict=True))) for pair in both)
        return Cost(ranks, Path(*starmap(add, zip(self.path, after.path, strict=True))))


def parts_of(numel: int, itemsize: int, world_size: int) -> list[int]:
    """Bytes of the parts that a ring cuts a tensor into."""
    return [itemsize * (numel // world_size + (rank < numel % world_size)) for rank in range(world_size)]


# ------------------------------------------------------------------ ring


def ring_reduce_scatter(parts: Sequence[int]) -> Cost:
    """Each rank sends all sums but that of its own part, and receives all but the one its left neighbour begins with.

    parts: in the dtype of the result.
    """
    W, whole, hops = len(parts), sum(parts), len(parts) - 1
    sent = [whole - part for part in parts]
    received = [whole - parts[rank - 1] for rank in range(W)]
    ranks = [Traffic(hops, hops, hops, sent[rank], received[rank], received[rank]) for rank in range(W)]
    return Cost(tuple(ranks), Path(hops, hops * max(parts), hops * max(parts)))


def ring_all_gather(parts: Sequence[int]) -> Cost:
    """Each rank sends all parts but its right neighbour's, and receives all but its own."""
    W, whole, hops = len(parts), sum(parts), len(parts) - 1
    ranks = [Traffic(hops, hops, hops, whole - parts[(rank + 1) % W], whole - parts[rank], 0) for rank in range(W)]
    return Cost(tuple(ranks), Path(hops, hops * max(parts)))


def ring_all_reduce(world_size: int, numel: int, itemsize: int) -> Cost:
    """2 (W - 1) steps of n / W."""
    parts = parts_of(numel, itemsize, world_size)
    return ring_reduce_scatter(parts).then(ring_all_gather(parts))


# ------------------------------------------------------------------ halving and doubling


def halving_doubling_all_reduce(world_size: int, numel: int, itemsize: int) -> Cost:
    """2 log2 W steps and 2 n (W - 1) / W bytes; two steps and 2 n more where W is no power of two."""
    members, whole = power_below(world_size), numel * itemsize
    pairs, rounds = world_size - members, members.bit_length() - 1

    def size(low: int, high: int) -> int:
        return (high * numel // members - low * numel // members) * itemsize

    ranks = []
    for place in range(members):
        shared = reduced = low = 0
        width = members
        for level in range(rounds):  # a range of chunks is shared with a partner on the way there and on the way back
            shared += size(low, low + width)
            width //= 2
            low += width * (place >> level & 1)
            reduced += size(low, low + width)
        fold = int(place < pairs)
        steps, moved = 2 * rounds + fold, shared + fold * whole  # messages and bytes, the same in both directions
        ranks.append(Traffic(steps + fold, steps, steps, moved, moved, reduced + fold * whole))
        ranks += [Traffic(2, 1, 1, whole, whole, 0)] * fold
    chunk = -(-numel // members) * itemsize * (members - 1)
    fold = int(pairs > 0)
    return Cost(tuple(ranks), Path(2 * rounds + 2 * fold, 2 * chunk + 2 * fold * whole, chunk + fold * whole))


# ------------------------------------------------------------------ trees


def _children(world_size: int, place: int) -> int:
    """How many children the rank in this place of a binomial tree has: as many as there are powers of two below both
    its lowest bit and the number of ranks from it on."""
    below = (world_size - place - 1).bit_length()
    return min(below, (place & -place).bit_length() - 1) if place else below


def tree_reduce(world_size: int, nbytes: int, root: int = 0) -> Cost:
    """log2 W steps of n, rounded up, on the root; one on every second rank."""
    ranks = []
    for rank in range(world_size):
        place = (rank - root) % world_size
        sends, receives = int(place > 0), _children(world_size, place)
        came = receives * nbytes
        ranks.append(Traffic(sends + receives, sends, receives, sends * nbytes, came, came))
    depth = _children(world_size, 0)
    return Cost(tuple(ranks), Path(depth, depth * nbytes, depth * nbytes))


def tree_broadcast(world_size: int, nbytes: int, root: int = 0) -> Cost:
    """The same backwards."""
    return _backwards(tree_reduce(world_size, nbytes, root))


def tree_all_reduce(world_size: int, numel: int, itemsize: int) -> Cost:
    """2 log2 W steps of n, rounded up."""
    return tree_reduce(world_size, numel * itemsize).then(tree_broadcast(world_size, numel * itemsize))


def _backwards(cost: Cost) -> Cost:
    """What was received is sent, and nothing is added."""
    ranks = [Traffic(t.steps, t.receives, t.sends, t.received_bytes, t.sent_bytes, 0) for t in cost.ranks]
    return Cost(tuple(ranks), cost.path._replace(reduced_bytes=0))


# ------------------------------------------------------------------ through one rank, along a chain


def naive_reduce(world_size: int, nbytes: int, root: int = 0) -> Cost:
    """W - 1 steps of n on the root."""
    others = world_size - 1
    ranks = [Traffic(1, 1, 0, nbytes, 0, 0)] * world_size
    ranks[root] = Traffic(others, 0, others, 0, others * nbytes, others * nbytes)
    return Cost(tuple(ranks), Path(others, others * nbytes, others * nbytes))


def naive_broadcast(world_size: int, nbytes: int, root: int = 0) -> Cost:
    """The same backwards."""
    return _backwards(naive_reduce(world_size, nbytes, root))


def naive_all_reduce(world_size: int, numel: int, itemsize: int) -> Cost:
    """2 (W - 1) steps of n."""
    return naive_reduce(world_size, numel * itemsize).then(naive_broadcast(world_size, numel * itemsize))


def chain_broadcast(world_size: int, nbytes: int, root: int = 0, segment_bytes: int = 0) -> Cost:
    """W - 2 + k steps of a segment, for k segments. segment_bytes: a multiple of the element's size; 0: one segment."""
    if world_size == 1:
        return Cost((Traffic(),), Path())
    segment = min(segment_bytes or nbytes, nbytes)
    segments = -(-nbytes // segment) if nbytes else 1
    ranks = []
    for rank in range(world_size):
        place = (rank - root) % world_size
        receives, sends = segments * (place > 0), segments * (place < world_size - 1)
        steps = segments + (0 < place < world_size - 1)  # in between, the first receive and the last send are alone
        ranks.append(Traffic(steps, sends, receives, nbytes * (sends > 0), nbytes * (receives > 0), 0))
    last = nbytes - (segments - 1) * segment
    return Cost(tuple(ranks), Path(world_size - 2 + segments, (world_size + segments - 3) * segment + last))


# ------------------------------------------------------------------ all to all, barrier


def pairwise_all_to_all(sizes: Sequence[Sequence[int]]) -> Cost:
    """W - 1 steps. `sizes[a][b]`: bytes from rank a to rank b."""
    W, hops = len(sizes), len(sizes) - 1
    sent = [sum(sizes[rank]) - sizes[rank][rank] for rank in range(W)]
    received = [sum(row[rank] for row in sizes) - sizes[rank][rank] for rank in range(W)]
    ranks = [Traffic(hops, hops, hops, sent[rank], received[rank], 0) for rank in range(W)]
    largest = [max(sizes[rank][(rank + distance) % W] for rank in range(W)) for distance in range(1, W)]
    return Cost(tuple(ranks), Path(hops, sum(largest)))


def dissemination_barrier(world_size: int) -> Cost:
    """log2 W steps of a byte, rounded up."""
    steps = (world_size - 1).bit_length()
    return Cost((Traffic(steps, steps, steps, steps, steps),) * world_size, Path(steps, steps))
