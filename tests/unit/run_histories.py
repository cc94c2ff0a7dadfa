"""Runs that are killed and resumed in any order, with all ranks in this process, and what must be true of them.

A model of a run does what a training script does: it takes steps, saves, is killed, and goes on with other ranks,
batches and prefetching. What a kill loses is forgotten; the rest is the committed history, which has to be the one of a
run that was never interrupted.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from lockstep.data.coverage import Coverage, tally_of
from lockstep.data.dataloader import DataLoader
from lockstep.data.loader import TokenLoader
from lockstep.data.order import epoch_order
from lockstep.data.permutation import KeyedPermutation
from lockstep.data.sample_log import sample_ids, samples_by_epoch
from lockstep.data.sampler import DistributedSampler

History = dict[int, list[int]]  # epoch -> samples in global order


class Prefetching:
    """Stands for torch's DataLoader with workers: draws `prefetch_factor` batches ahead, from the first moment on."""

    def __init__(self, dataset: Any, batch_sampler: Any, collate_fn: Any, prefetch_factor: int, **_: Any) -> None:
        self.dataset, self.source, self.collate, self.depth = dataset, batch_sampler, collate_fn, prefetch_factor

    def __iter__(self) -> Iterator[Any]:
        requests = iter(self.source)
        ahead = [request for _, request in zip(range(self.depth), requests, strict=False)]
        return self._batches(ahead, requests)

    def _batches(self, ahead: list[Any], requests: Iterator[Any]) -> Iterator[Any]:
        while ahead:
            reply = self.collate(self.dataset.__getitems__(ahead.pop(0)))
            ahead += [request for _, request in zip(range(1), requests, strict=False)]
            yield reply


@cache
def tabled_permutation(length: int, seed: int, epoch: int) -> Callable[[Any], Any]:
    """`KeyedPermutation`, computed once: it is made for many samples, and for few of them slow."""
    return KeyedPermutation(length, seed, epoch)(np.arange(length)).__getitem__


class _Asked(Exception):
    pass


class _Meeting:
    """A communicator for ranks that are objects of one thread: what each says is known before they meet."""

    def __init__(self, rank: int, said: list[Any] | None = None) -> None:
        self.rank, self.said = rank, said

    def all_gather_object(self, value: Any, label: str = "") -> list[Any]:
        if self.said is None:
            raise _Asked(value)
        return json.loads(json.dumps(self.said))


def combine(coverages: list[Coverage]) -> None:
    """Let the ranks' coverages meet."""
    said: list[Any] = []
    for rank, coverage in enumerate(coverages):
        try:
            coverage.combine(_Meeting(rank))  # pyright: ignore[reportArgumentType]
        except _Asked as asked:
            said.append(asked.args[0])
    for rank, coverage in enumerate(coverages):
        coverage.combine(_Meeting(rank, said))  # pyright: ignore[reportArgumentType]


def in_turn(per_rank: list[list[int]]) -> list[int]:
    """What ranks in step take, in global order: a sample of rank 0, of rank 1, ..."""
    return [rank[i] for i in range(max(map(len, per_rank))) for rank in per_rank if i < len(rank)]


def _copy(history: History) -> History:
    return defaultdict(list, {epoch: list(ids) for epoch, ids in history.items()})


class EpochRun:
    """A script with `DataLoader` and `DistributedSampler` on every rank.

    tail: "repeat", "drop" or "none", the sampler's. drop_last: the loader's.
    names_epochs: the script calls set_epoch before every pass.
    """

    def __init__(self, length: int, order: str, tail: str, drop_last: bool, names_epochs: bool) -> None:
        self.length, self.order, self.tail, self.drop_last = length, order, tail, drop_last
        self.names_epochs = names_epochs
        self.history: History = defaultdict(list)
        self.saved: tuple[dict[str, Any] | None, History] = (None, {})
        self.resume(1, 1, 1)

    def resume(self, world_size: int, batch: int, depth: int) -> None:
        """Start `world_size` processes: the ones before are gone, with all they did since they last saved."""
        world_size = min(world_size, self.length) if self.tail == "drop" else world_size
        state, history = self.saved
        self.history = _copy(history)
        self.world_size, self.batch = world_size, batch
        padding: Any = {"drop_last": self.tail == "drop", "pad": "none" if self.tail == "none" else "repeat"}
        self.loaders = [
            DataLoader(
                range(self.length),  # pyright: ignore[reportArgumentType]
                batch_size=batch,
                sampler=DistributedSampler(
                    range(self.length),  # pyright: ignore[reportArgumentType]
                    world_size,
                    rank,
                    seed=5,
                    order=self.order,  # pyright: ignore[reportArgumentType]
                    **padding,
                ),
                drop_last=self.drop_last,
                collate_fn=list,
                num_workers=1,
                prefetch_factor=depth,
                seed_per="never",
            )
            for rank in range(world_size)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        self.epoch = 0 if state is None else state["sampler"]["epoch"]
        self.base = len(self.history.get(self.epoch, ()))  # of this epoch, in the state
        self.is_over = state is not None and state["sampler"]["consumed"] == self.length
        self.passes: Sequence[Iterator[Any]] = []
        self.ended_here = self.repeats = False

    def _begin(self) -> None:
        if self.repeats:
            self.history[self.epoch], self.base, self.is_over, self.repeats = [], 0, False, False
        elif self.is_over:
            self.epoch, self.base, self.is_over = self.epoch + 1, 0, False
        if self.names_epochs:
            for loader in self.loaders:
                loader.set_epoch(self.epoch)
        self.passes, self.ended_here = [iter(loader) for loader in self.loaders], False

    def step(self) -> bool:
        """One batch on every rank; False where the epoch had none left."""
        if not self.passes:
            self._begin()
        per_rank = [next(batches, []) for batches in self.passes]
        assert {loader.epoch for loader in self.loaders} == {self.epoch}
        ids = in_turn(per_rank)
        if not ids:
            self._end()
            return False
        self.history[self.epoch] += ids
        assert sample_ids(self.loaders[0].samples_of_batch()) == ids or (self.tail == "none" and self.drop_last)
        return True

    def steps(self, count: int) -> None:
        """Up to `count` batches of the epoch."""
        for _ in range(count):
            if not self.step():
                return

    def finish_epoch(self) -> None:
        """The rest of the epoch, or all of the next one."""
        while self.step():
            pass

    def look_again(self) -> None:
        """Leave the pass and begin it again, as scripts do after a look at the first batch."""
        through = {loader.state_dict()["sampler"]["consumed"] == self.length for loader in self.loaders}
        if self.passes and self.names_epochs and len(through) == 1:
            self.base = 0 if True in through else self.base  # nothing was left: a complete epoch is repeated as a whole
            self.history[self.epoch] = self.history[self.epoch][: self.base]
            self.passes = []
            self._begin()

    def repeat_epoch(self) -> None:
        """Train once more on an epoch that is complete."""
        self.repeats = self.names_epochs and self.ended_here

    def save(self) -> None:
        """A checkpoint, equal on all ranks."""
        combine([loader.coverage for loader in self.loaders])
        states = [loader.state_dict() for loader in self.loaders]
        if self.tail != "none":  # with it, a rank that has one sample less is through while others are not
            assert all(state == states[0] for state in states)
        self.saved = states[0], _copy(self.history)
        self.check_counted()

    def check_counted(self) -> None:
        """The combined coverage is that of the history."""
        for loader in self.loaders:
            for epoch, ids in self.history.items():
                assert loader.coverage.tally(epoch) == tally_of(ids), (epoch, ids)

    def _end(self) -> None:
        order = self.whole_order(self.epoch)
        taken, n = self.history[self.epoch], self.length
        if not self.drop_last and self.tail != "drop":
            assert taken[:n] == order
            assert len(taken) - n < (self.world_size if self.tail == "repeat" else 1)
            assert taken[n:] == [order[i % n] for i in range(len(taken) - n)]
        else:
            left_out = Counter(order) - Counter(taken)
            allowed = self.world_size * (self.batch if self.drop_last else 1)
            assert sum(left_out.values()) < max(allowed, 1)
            again = taken[n:]
            assert Counter(taken) - Counter(again) == Counter(order) - left_out
            assert len(again) < self.world_size
        combine([loader.coverage for loader in self.loaders])
        self.check_counted()
        for loader in self.loaders:
            verdict = loader.coverage.verdict(self.epoch)
            assert verdict.is_exact, verdict
            assert loader.coverage.digest(self.epoch) == tally_of(taken).digest()
        self.passes, self.is_over, self.ended_here = [], True, True

    def whole_order(self, epoch: int) -> list[int]:
        """All samples, in the order of `epoch`."""
        return epoch_order(self.length, self.order, 5, epoch)(np.arange(self.length)).tolist()  # pyright: ignore


class StreamRun:
    """The training loop with a `TokenLoader` on every rank."""

    def __init__(self, length: int, order: str) -> None:
        self.length, self.order = length, order
        self.tokens = np.zeros(length + 1, dtype=np.uint16)  # a context of 1: as many windows as tokens to predict
        self.history: list[int] = []
        self.saved: tuple[dict[str, Any] | None, int] = (None, 0)
        self.resume(1, 1, 1)

    def resume(self, world_size: int, share: int, microbatches: int) -> None:
        """Start `world_size` processes from what was saved."""
        share, microbatches = share % 3 + 1, microbatches % 2 + 1  # a step may be longer than a few epochs, not than 50
        state, kept = self.saved
        self.history = self.history[:kept]
        self.loaders = [
            TokenLoader(
                self.tokens,
                context=1,
                batch=world_size * share * microbatches,
                microbatch=share,
                rank=rank,
                world_size=world_size,
                seed=5,
                order=self.order,  # pyright: ignore[reportArgumentType]
            )
            for rank in range(world_size)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))

    def step(self) -> bool:
        """One optimizer step on every rank."""
        consumed = self.loaders[0].consumed
        ids = [
            int(sample)
            for loader in self.loaders
            for index in range(loader.rank * loader.accumulation, (loader.rank + 1) * loader.accumulation)
            for sample in loader.samples_at(consumed, index)
        ]
        record = json.loads(json.dumps(self.loaders[0].samples_of_step(consumed)))
        assert sample_ids(record) == ids
        assert [epoch for epoch, _ in samples_by_epoch(record)] == sorted({c // self.length for c in self._range(ids)})
        for loader in self.loaders:
            loader.advance()
        self.history += ids
        return True

    def _range(self, ids: list[int]) -> range:
        return range(len(self.history), len(self.history) + len(ids))

    def steps(self, count: int) -> None:
        """Some steps."""
        for _ in range(count):
            self.step()

    def finish_epoch(self) -> None:
        """Steps until an epoch has ended, which is in the middle of a step as a rule."""
        epoch = len(self.history) // self.length
        while len(self.history) // self.length == epoch:
            self.step()

    def save(self) -> None:
        """A checkpoint, equal on all ranks, whose coverage is exact."""
        combine([loader.coverage for loader in self.loaders])
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        new = range(self.saved[1] // self.length, -(-len(self.history) // self.length))  # epochs since the last one
        self.saved = states[0], len(self.history)
        verdicts = self.loaders[-1].verdicts()
        assert len(verdicts) == -(-len(self.history) // self.length)
        assert all(verdict.is_exact for verdict in verdicts), verdicts
        for epoch in new:
            ids = self.history[epoch * self.length : (epoch + 1) * self.length]
            assert self.loaders[-1].coverage.digest(epoch) == tally_of(ids).digest()
            assert ids == epoch_order(self.length, self.order, 5, epoch)(np.arange(len(ids))).tolist()  # pyright: ignore
