"""Which gradients travel together: a pure function from sizes to lists of indices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

MIB = 1024 * 1024
FIRST_BUCKET_CAP_BYTES = 1 * MIB  # small, so that communication starts soon after backward does
BUCKET_CAP_BYTES = 25 * MIB


class GradSpec(NamedTuple):
    """What planning needs to know of one gradient."""

    nbytes: int
    kind: tuple[Hashable, ...]  # only gradients of the same kind (dtype, device) share a bucket
    alone: bool = False  # a sparse gradient has no fixed size and shares with nobody


def plan_buckets(specs: Sequence[GradSpec], order: Sequence[int], caps_bytes: Sequence[int]) -> list[tuple[int, ...]]:
    """Split `order`, the expected order of readiness, into buckets, in the order in which they are launched.

    A bucket is closed as soon as it holds its cap or more, so only a single gradient can exceed it by itself. The k-th
    bucket of a kind has the k-th cap; the last cap serves all that follow. Buckets of several kinds are launched in
    the order in which their last gradient becomes ready.

    Units: caps_bytes in bytes.
    Source: Li et al. 2020, arXiv 2006.15704, section 3.2; the closing rule is torch's
    compute_bucket_assignment_by_size.
    """
    assert sorted(order) == list(range(len(specs))), "order must be a permutation of the gradients"
    assert caps_bytes, "at least one cap"
    open_buckets: dict[tuple[Hashable, ...], list[int]] = {}
    open_nbytes: dict[tuple[Hashable, ...], int] = {}
    closed_count: dict[tuple[Hashable, ...], int] = {}
    closed: list[tuple[int, ...]] = []
    for index in order:
        spec = specs[index]
        if spec.alone:
            closed.append((index,))
            continue
        open_buckets.setdefault(spec.kind, []).append(index)
        open_nbytes[spec.kind] = open_nbytes.get(spec.kind, 0) + spec.nbytes
        count = closed_count.get(spec.kind, 0)
        if open_nbytes[spec.kind] >= caps_bytes[min(count, len(caps_bytes) - 1)]:
            closed.append(tuple(open_buckets.pop(spec.kind)))
            closed_count[spec.kind] = count + 1
            open_nbytes[spec.kind] = 0
    closed.extend(tuple(members) for members in open_buckets.values())
    place = {index: position for position, index in enumerate(order)}
    return sorted(closed, key=lambda members: place[members[-1]])


def first_plan(specs: Sequence[GradSpec], caps_bytes: Sequence[int]) -> list[tuple[int, ...]]:
    """The plan before anything was observed: gradients become ready in reverse order of registration.

    Inside a bucket the members stand in order of registration, as in torch, so that a ring adds the ranks' values for
    an element in the same order as torch's does.
    """
    backwards = range(len(specs) - 1, -1, -1)
    return [tuple(sorted(members)) for members in plan_buckets(specs, backwards, caps_bytes)]
