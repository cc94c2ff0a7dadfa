"""Which samples the ranks share out among them, where they do it by a rule, and which of them a rank has been handed.

By a rule deal torch's DistributedSampler, ours, and Accelerate's shard of batches, of which its loaders and those of
transformers' Trainer are made. Of others nothing is said: what they repeat or leave out may be meant.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, final

import numpy as np

from lockstep.observe.tally import Ids, Tally, bins_of, coverage_fields, tally_of


class Deal(NamedTuple):
    """Of one pass, over all ranks."""

    epoch: int
    length: int  # samples in the dataset
    total: int  # that are dealt: more than `length` where the first come once more, fewer where the last are left out
    order: Callable[[], Ids]  # of all samples; only asked for where `total` is not `length`
    together: int  # samples that the ranks have of a batch each
    start: int = 0  # samples that an earlier pass has used: this one goes on from there


@final
class Share:
    """What this rank was handed of a deal. `drawn` is for the rank's thread, the rest for any."""

    def __init__(self, deal: Deal) -> None:
        self.deal = deal
        self.drawn: list[Any] = []  # ids, of a batch each: those handed out, and those on their way
        self._counted = 0  # batches, which are not in the list any more
        self._used, self._bins = Tally(), np.zeros(1, np.int64)  # one zero: of each bin, so far
        self._lock = Lock()

    def count(self, batches: int) -> None:
        """So many have been handed out by now. Hashes 20 million samples a second."""
        with self._lock:
            new = max(0, batches - self._counted)
            drawn, self._counted = self.drawn[:new], self._counted + new
            del self.drawn[:new]
            ids = list(itertools.chain.from_iterable([ids] if isinstance(ids, int) else ids for ids in drawn))
            self._used += tally_of(ids)
            self._bins = self._bins + bins_of(ids, self.deal.length)

    def fields(self, batches: int, skipped: int, is_whole: bool) -> dict[str, Any]:
        """A note of the pass, which was left early where it is not whole. skipped: batches before the first of it.

        "again" and "left" are digests of what comes once more and what is left out, over all ranks.
        """
        self.count(batches)
        deal, more = self.deal, self.deal.total - self.deal.length
        found = coverage_fields(deal.length, self._used, self._bins)
        if more:
            order = np.asarray(deal.order(), dtype=np.int64)
            tail = np.resize(order, more) if more > 0 else order[more:]
            names = ("repeated", "again") if more > 0 else ("dropped", "left")
            found |= dict(zip(names, (len(tail), tally_of(tail).digest().hex()), strict=True))
        return found | {"earlier": deal.start + skipped * deal.together, "left_early": not is_whole}


def deal_of(loader: Any) -> Deal | None:
    """Of the pass over `loader` that begins now; None where it does not follow from a rule we know."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    accelerate: Any = sys.modules.get("accelerate.data_loader")
    skipped = 0
    if accelerate is not None:
        while isinstance(batches, accelerate.SkipBatchSampler):
            skipped, batches = skipped + batches.skip_batches, batches.batch_sampler
    if accelerate is not None and isinstance(batches, accelerate.BatchSamplerShard):
        deal = _sharded(batches) if is_plain(batches.batch_sampler) else None
    else:
        deal = _batched(batches) if is_plain(batches) else _dealt(batches)
    return deal and deal._replace(start=deal.start + skipped * deal.together)


def is_plain(batches: Any) -> bool:
    """Whether it takes as many samples for each batch, in their order."""
    home = type(batches).__module__.partition(".")[0]
    return type(batches).__name__ == "BatchSampler" and home in ("torch", "torchdata")


def _dealt(sampler: Any) -> Deal | None:
    """A sample to each rank in turn."""
    from torch.utils.data import DistributedSampler

    if hasattr(sampler, "upcoming_deal"):
        return sampler.upcoming_deal()
    if getattr(type(sampler), "__iter__", None) is not DistributedSampler.__iter__:
        return None
    length, epoch = len(sampler.dataset), sampler.epoch
    order = partial(_shuffled, length, sampler.seed + epoch) if sampler.shuffle else partial(range, length)
    return Deal(epoch, length, sampler.total_size, order, sampler.num_replicas)


def _batched(batches: Any) -> Deal | None:
    """The same, batch by batch: each rank may leave out its last one."""
    deal = _dealt(batches.sampler)
    if deal is None:
        return None
    together, dealt = deal.together * batches.batch_size, deal.total - deal.start
    if not batches.drop_last:
        return deal._replace(together=together)
    is_even = dealt % deal.together == 0
    return deal._replace(together=together, total=deal.total - dealt % together) if is_even else None


def _sharded(shard: Any) -> Deal | None:
    """A batch to each rank in turn, or a part of each batch."""
    sampler = shard.batch_sampler.sampler
    length, order, twice = len(sampler), _order_of(sampler), _dealt(sampler)
    together = shard.batch_size if shard.split_batches else shard.batch_size * shard.num_processes
    if twice is not None:  # to each rank a part of its part: the others are not used at all
        return twice._replace(total=twice.length, together=together)
    if order is None:
        return None
    more = -length % together  # to fill the last round
    total = length + (more and more - together if shard.drop_last else more if shard.even_batches else 0)
    return Deal(getattr(sampler, "epoch", 0), length, total, order, together)


def _order_of(sampler: Any) -> Callable[[], Ids] | None:
    """Of the next pass; None where that is not known, or has a sample twice."""
    from torch.utils.data import RandomSampler, SequentialSampler

    length = len(sampler)
    if type(sampler) is SequentialSampler:
        return partial(range, length)
    if not isinstance(sampler, RandomSampler) or sampler.replacement or length != len(sampler.data_source):
        return None
    seed: int | None = getattr(sampler, "initial_seed", None)  # of Accelerate's
    if seed is not None:
        return partial(_shuffled, length, seed + getattr(sampler, "epoch", 0))
    if type(sampler) is not RandomSampler or sampler.generator is None or sampler.generator.device.type != "cpu":
        return None
    return partial(_shuffled, length, sampler.generator.get_state())


def _shuffled(length: int, source: Any) -> Ids:
    """As torch shuffles from a seed, or from the state of a generator."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(source) if isinstance(source, int) else generator.set_state(source)
    return torch.randperm(length, generator=generator).numpy()
