"""Which samples a DistributedSampler, torch's or ours, has dealt to this rank; left in the sampler by each pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

DEALT = "_lockstep_dealt"


class Dealt(NamedTuple):
    """What a pass over the sampler hands out."""

    epoch: int
    length: int  # samples in the dataset
    total: int  # over all ranks: more than `length` where some come once more, fewer where some are left out
    first: Callable[[int], Sequence[int]]  # so many of this rank's
    order: Callable[[], Sequence[int]]  # of all samples; only asked for where `total` is not `length`

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the sampler has not dealt them
        return type(None), ()

    def fields(self, count: int) -> dict[str, Any]:
        """A note of the first `count`; it hashes them, 20 million a second.

        "again" and "left" are digests of what comes once more and what is left out, over all ranks.
        """
        from lockstep.observe.tally import bins_of, coverage_fields, tally_of

        used, more = self.first(count), self.total - self.length
        found = coverage_fields(self.length, tally_of(used), bins_of(used, self.length))
        if not more:
            return found
        order = list(self.order())
        tail = (order * -(-more // self.length))[:more] if more > 0 else order[self.total :]
        names = ("repeated", "again") if more > 0 else ("dropped", "left")
        return found | dict(zip(names, (len(tail), tally_of(tail).digest().hex()), strict=True))


def dealing(old: Callable[[Any], Iterator[int]]) -> Callable[[Any], Iterator[int]]:
    """torch's DistributedSampler.__iter__, which leaves what it deals in the sampler."""

    @functools.wraps(old)
    def iterate(sampler: Any) -> Iterator[int]:
        ids, length = list(old(sampler)), len(sampler.dataset)
        order = functools.partial(_order, length, sampler.seed + sampler.epoch if sampler.shuffle else None)
        vars(sampler)[DEALT] = Dealt(sampler.epoch, length, sampler.total_size, lambda count: ids[:count], order)
        return iter(ids)

    return iterate


def _order(length: int, seed: int | None) -> Sequence[int]:
    """As torch's class shuffles them."""
    if seed is None:
        return range(length)
    import torch

    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
