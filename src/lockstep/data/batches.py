"""What a loader asks of its dataset, batch by batch, and how much of it the script has been handed.

Nothing here refers to the loader or its workers, so that dropping a loader ends its workers at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import final

import numpy as np

from lockstep.data.coverage import Coverage
from lockstep.data.cursor import Pass
from lockstep.data.order import epoch_order, tail_positions
from lockstep.data.sample_log import Span
from lockstep.data.sample_rng import Request, SeedPer, derived_seed, epoch_key
from lockstep.data.sampler import DistributedSampler


@final
class BatchSource:
    """The index sampler of the loader inside, which may outlive a pass with its workers."""

    def __init__(self, dealer: DistributedSampler, batch: int, drop_last: bool, seed: int, seed_per: SeedPer) -> None:
        self.dealer = dealer
        self.batch = batch  # samples
        self.drop_last = drop_last
        self.seed = seed  # of random numbers
        self.seed_per: SeedPer = seed_per
        self.coverage = Coverage(dealer.length, dealer.num_replicas)
        self.latest: BatchPass | None = None  # whose requests come next
        self.begun: BatchPass | None = None  # that began last

    def __iter__(self) -> Iterator[Request]:
        assert self.latest is not None
        return self.latest.requests()

    def progress(self) -> BatchPass | None:
        """The pass that the sampler takes for the current one too."""
        begun = self.begun
        return None if begun is None or begun.dealt is not self.dealer.current_pass else begun


@final
class BatchPass:
    """One pass over the samples of a rank: its batches on their way, and those that have arrived."""

    def __init__(self, source: BatchSource) -> None:
        self.dealt: Pass | None = None  # by the sampler; None before the first sample is drawn
        self._source = source
        self._samples: Iterator[int] = iter(())
        self._asked: dict[int, list[int]] = {}  # batches on their way, by number
        self._next = 0  # number of the batch handed out next
        self._taken = 0  # samples handed out
        self._before = 0  # of these, before the last batch
        self._all = 0  # samples that will be handed out

    def requests(self) -> Iterator[Request]:
        """What to load next, drawn ahead of what is handed out."""
        source, number = self._source, 0
        self._samples = iter(source.dealer)
        ids = list(islice(self._samples, source.batch))
        dealt = self._begin()
        key = seed = None if source.seed_per == "never" else epoch_key(source.seed, dealt.epoch)
        while ids and not (source.drop_last and len(ids) < source.batch):
            self._asked[number] = ids
            if key is not None and source.seed_per == "batch":
                seed = derived_seed(key, dealt.positions[number * source.batch])
            yield Request(number, ids, seed)
            number, ids = number + 1, list(islice(self._samples, source.batch))

    def hand_out(self, number: int) -> None:
        """Batch `number` goes to the script: its samples are used from now on."""
        assert self.dealt is not None
        # Where the dataset raised and the script went on, that batch is lost: passed over, but not used.
        for lost in range(self._next, number):
            self._taken += len(self._asked.pop(lost))
        ids, self._before = self._asked.pop(number), self._taken
        self._next, self._taken = number + 1, self._before + len(ids)
        self.dealt.used = self._taken
        self._source.coverage.add(ids, self.dealt.epoch)
        if self._taken == self._all:
            self._end(self.dealt)

    def span(self) -> Span | None:
        """The batch handed out last, over all ranks."""
        dealt = self.dealt
        if dealt is None or self._next == 0:
            return None
        first, stop = (dealt.start + taken * dealt.world_size for taken in (self._before, self._taken))
        return Span(dealt.epoch, first, min(stop, dealt.length) if self._source.dealer.tail == "none" else stop)

    def position(self) -> int:
        """Positions of the epoch used up once every rank has been handed as many samples as this one."""
        assert self.dealt is not None
        return self.dealt.length if self._taken == self._all else self.dealt.position(self._taken)

    def _begin(self) -> Pass:
        dealt = self._source.dealer.current_pass
        assert dealt is not None
        self.dealt, self._source.begun = dealt, self
        self._all, dealt.used = len(dealt.positions), 0
        if self._source.drop_last:
            self._all -= self._all % self._source.batch
            dealt.fewest -= dealt.fewest % self._source.batch
        if dealt.start < dealt.length:  # else the epoch was complete before: all of it is in the state that was loaded
            self._source.coverage.restart(dealt.epoch, dealt.start)
            if self._all == 0:
                self._end(dealt)
        return dealt

    def _end(self, dealt: Pass) -> None:
        source, dealer = self._source, self._source.dealer
        deque(self._samples, maxlen=0)  # those that fill no batch: for the sampler too, the pass is complete
        dealt.used = len(dealt.positions)
        ends = tail_positions(dealt.length, dealt.start, dealt.world_size, dealer.tail, source.batch, source.drop_last)
        if any(ends):
            order = epoch_order(dealt.length, dealer.used_order, dealer.seed, dealt.epoch)
            repeated, dropped = (order(np.array(end, dtype=np.int64) % dealt.length) for end in ends)
            source.coverage.end(dealt.epoch, repeated, dropped)
