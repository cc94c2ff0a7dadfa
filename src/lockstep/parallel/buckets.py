"""Which gradients travel together, in which order, and where they lie: pure functions of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, final

from torch.nn import Parameter

from lockstep.errors import ConfigError

MIB = 1024 * 1024
FIRST_BUCKET_CAP_BYTES = 1 * MIB  # small, so that communication starts soon after backward does
BUCKET_CAP_BYTES = 25 * MIB

Plan = list[tuple[int, ...]]  # for each bucket, in the order of their launch: places of its parameters
LayOut = Callable[[Sequence[int]], tuple[tuple[int, ...], int]]  # sizes -> where each begins in a flat buffer; its size


class GradSpec(NamedTuple):
    """What planning needs to know of one gradient."""

    nbytes: int
    kind: tuple[Hashable, ...]  # only gradients of the same kind (dtype, device) share a bucket
    alone: bool = False  # a sparse gradient has no fixed size and shares with nobody


def plan_buckets(specs: Sequence[GradSpec], order: Sequence[int], caps_bytes: Sequence[int]) -> Plan:
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


def first_plan(specs: Sequence[GradSpec], caps_bytes: Sequence[int]) -> Plan:
    """The plan before anything was observed: gradients become ready in reverse order of registration.

    Inside a bucket the members stand in order of registration, as in torch, so that a ring adds the ranks' values for
    an element in the same order as torch's does.
    """
    backwards = range(len(specs) - 1, -1, -1)
    return [tuple(sorted(members)) for members in plan_buckets(specs, backwards, caps_bytes)]


@final
class GradPlans:
    """The plans for one list of parameters: equal on all ranks that have equal parameters and are told equal orders."""

    def __init__(
        self, params: Sequence[Parameter], caps_bytes: Sequence[int], sparse: frozenset[int], delayed: frozenset[int]
    ) -> None:
        """sparse: each alone in its bucket. delayed: in buckets that come after all others."""
        self._caps_bytes = tuple(caps_bytes)
        self._delayed = delayed
        self._specs = [
            GradSpec(p.nbytes, (p.dtype, p.device, i in delayed), alone=i in sparse) for i, p in enumerate(params)
        ]

    def first(self) -> Plan:
        """The plan before anything is known of the backward."""
        return self._delayed_last(first_plan(self._specs, self._caps_bytes))

    def by_readiness(self, order: Sequence[int]) -> Plan:
        """The plan for gradients that become ready in this order."""
        return self._delayed_last(plan_buckets(self._specs, order, self._caps_bytes))

    def _delayed_last(self, plan: Plan) -> Plan:
        return sorted(plan, key=lambda members: members[0] in self._delayed)

    def refuse_moved(self, params: Sequence[Parameter], names: Sequence[str], rank: int) -> None:
        """Raises: ConfigError where parameters are not of the kind that was planned for."""
        if params and (params[0].dtype, params[0].device) != self._specs[0].kind[:2]:
            raise ConfigError(
                f"rank {rank}: parameter {names[0]!r} is now {params[0].dtype} on {params[0].device}; it was "
                f"{self._specs[0].kind[0]} on {self._specs[0].kind[1]} when the module was wrapped. Move or convert "
                "the module first, then wrap it."
            )


def starts_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Where parts of these sizes begin that lie one after the other, and where the last one ends."""
    *starts, total = itertools.accumulate(sizes, initial=0)
    return tuple(starts), total
