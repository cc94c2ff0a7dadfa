"""torch's DataLoader with a position that can be saved: mid-epoch, with workers, on any number of ranks.

It is a subclass of torch's class to have its arguments, checks and length. Workers belong to a plain torch DataLoader
inside, whose dataset numbers the batches and seeds the generators. So nothing private of torch is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, final, get_args

import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader

from lockstep.data.batches import BatchPass, BatchSource
from lockstep.data.coverage import Coverage
from lockstep.data.cursor import STATE_VERSION, check_state
from lockstep.data.sample_log import sample_record
from lockstep.data.sample_rng import GeneratorsKept, KeyedDataset, Reply, SeedPer, collate, epoch_key, start_worker
from lockstep.data.sampler import DistributedSampler
from lockstep.errors import ConfigError, DataError, UnsupportedArgument

T = TypeVar("T", covariant=True)


class DataLoader(TorchDataLoader[T]):
    """`torch.utils.data.DataLoader`, same arguments, same batches, with `state_dict()` and `load_state_dict()`.

    sampler: lockstep's `DistributedSampler`; without one, every sample, in `shuffle`d order if asked for.
    seed: of that order and of random numbers. None takes the sampler's, else the `generator`'s initial seed, else 0.
        From a generator no number is drawn.
    seed_per: what makes the random numbers of a dataset (crops, noise) the same after a restart. "batch": Python's,
        numpy's and torch's generators are seeded before each batch, from its place in the epoch: exact for the same
        number of ranks and batch size, with any number of workers. "sample": before each sample: exact for any ranks
        and batches, for some 10 microseconds a sample. "never": as in torch; without workers the dataset then draws
        from the script's own generators, whose state a checkpoint holds only as `lockstep.rng_state()`. Otherwise the
        script's own are as before after each batch, for some 30 microseconds.

    A batch counts as trained on once `next()` has handed it out; what workers have prefetched does not. So save after
    the optimizer's step on it. The state is a few numbers that hold for any number of ranks, workers and any batch
    size; save rank 0's when all ranks have taken equally many batches, and load it on every rank, before `set_epoch`,
    which keeps a position loaded for that very epoch. Epochs advance by the rules of `DistributedSampler`; `len()`
    stays that of a whole epoch.

    `coverage` counts the samples handed out: with several ranks, each calls `loader.coverage.combine(comm)` before
    `state_dict()`, and at the end `loader.coverage.verdict(epoch)` says whether each was used exactly once. A pass that
    is begun again from the same place replaces what the first attempt counted.

    Raises: UnsupportedArgument for what could not be repeated exactly: an IterableDataset, other samplers and batch
        samplers, in_order=False. Else as torch.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        *args: Any,
        seed: int | None = None,
        seed_per: SeedPer = "batch",
        **kwargs: Any,
    ) -> None:
        if seed_per not in get_args(SeedPer):
            raise ConfigError(f"seed_per={seed_per!r}: choose one of {', '.join(get_args(SeedPer))}")
        if isinstance(dataset, IterableDataset):
            why = "an IterableDataset cannot be asked for sample i after a restart"
            raise UnsupportedArgument(f"dataset={type(dataset).__name__}", why)
        if batch_sampler is not None:
            dealer = _dealer_of(batch_sampler)
        elif sampler is not None and type(sampler) is not SequentialSampler:
            dealer = _checked("sampler", sampler)
        else:
            order_seed = _seed_of(seed, kwargs.get("generator"))
            dealer = DistributedSampler(dataset, 1, 0, shuffle=bool(shuffle) and sampler is None, seed=order_seed)
            shuffle, sampler = shuffle if sampler is not None else None, dealer
        super().__init__(dataset, batch_size, shuffle, sampler, batch_sampler, *args, **kwargs)
        if not self.in_order:
            raise UnsupportedArgument("in_order=False", "which batch comes next would depend on which worker is faster")
        batches = self.batch_sampler
        size, drops = (batches.batch_size, batches.drop_last) if isinstance(batches, BatchSampler) else (1, False)
        self.seed = dealer.seed if seed is None and self.generator is None else _seed_of(seed, self.generator)
        self._source = BatchSource(dealer, size, drops, self.seed, seed_per)
        self.coverage = self._source.coverage  # which samples have been handed out
        self._inner: TorchDataLoader[Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the pass begun last, or of the next one where none has begun since `set_epoch`."""
        return self._source.dealer.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass epoch `epoch`: as the sampler's."""
        self._source.dealer.set_epoch(epoch)

    def __iter__(self) -> BatchIterator:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's is a private class
        self._source.latest = BatchPass(self._source)
        fetch = KeyedDataset(self.dataset, self._source.seed_per == "sample")
        if self.num_workers == 0 and not self.pin_memory:
            in_batches = self.batch_sampler is not None
            load = fetch.__getitems__ if in_batches else fetch.__getitem__
            replies = map(partial(collate, self.collate_fn), map(load, self._source))
        else:
            if self._inner is None or not self.persistent_workers:
                self._inner = self._make_inner(fetch)
            replies = iter(self._inner)
        return BatchIterator(self._source, replies, len(self), self.num_workers, self.persistent_workers)

    def state_dict(self) -> dict[str, Any]:
        """Where the script is, in JSON values; the same on all ranks that have been handed equally many batches."""
        dealer, progress = self._source.dealer, self._source.progress()
        position = dealer.state_dict() if progress is None else dealer.state_at(progress.position())
        coverage = self.coverage.state_dict(position["epoch"])
        return {"version": STATE_VERSION, "sampler": position, "coverage": coverage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass the rest of the epoch that `state` was taken in, for the ranks and batches there are now.

        Raises: DataError where the data, seed or order is another one, or the state damaged; nothing has changed then.
        """
        check_state("loader", state, {}, parts=("sampler", "coverage"))
        dealer = self._source.dealer
        Coverage(dealer.length).load_state_dict(state["coverage"])  # tried before anything changes
        dealer.load_state_dict(state["sampler"])
        self.coverage.load_state_dict(state["coverage"])

    def samples_of_batch(self) -> dict[str, Any]:
        """For the log: which samples, over all ranks, were in the batch handed out last. See `sample_ids`.

        Raises: DataError where none has been since the beginning of the pass.
        """
        progress = self._source.progress()
        span = None if progress is None else progress.span()
        if span is None:
            raise DataError("no batch of this pass has been handed out yet: ask after next()")
        dealer = self._source.dealer
        return sample_record([span], dealer.length, dealer.used_order, dealer.seed)

    def _make_inner(self, dataset: KeyedDataset) -> TorchDataLoader[Any]:
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers = {
                "worker_init_fn": partial(start_worker, self.worker_init_fn),
                "multiprocessing_context": self.multiprocessing_context,
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
            }
        generator = torch.Generator()  # of the workers' own seeds: not the script's, which would go on from there
        generator.manual_seed(epoch_key(self.seed, self._source.dealer.next_epoch))
        in_batches = self.batch_sampler is not None
        indices = {"batch_sampler": self._source} if in_batches else {"sampler": self._source, "batch_size": None}
        return TorchDataLoader(
            dataset,
            num_workers=self.num_workers,
            collate_fn=partial(collate, self.collate_fn),
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            generator=generator,
            **indices,
            **workers,
        )


@final
class BatchIterator(Iterator[Any]):
    """Hands out the batches of one pass."""

    def __init__(
        self, source: BatchSource, replies: Iterator[Reply], length: int, num_workers: int, workers_stay: bool
    ) -> None:
        assert source.latest is not None
        self._source = source
        self._progress = source.latest
        self._replies = replies
        self._length = length
        keeps = num_workers == 0 and source.seed_per != "never"
        self._generators = GeneratorsKept() if keeps else contextlib.nullcontext()
        self._workers_stay = workers_stay

    def __next__(self) -> Any:
        if self._workers_stay and self._source.latest is not self._progress:
            raise DataError("the workers have gone on to a later iter() of this loader: use that one")
        with self._generators:
            reply = next(self._replies)
        self._progress.hand_out(reply.number)
        return reply.value

    def __len__(self) -> int:
        return self._length


def _seed_of(seed: int | None, generator: torch.Generator | None) -> int:
    if seed is not None and generator is not None:
        raise ConfigError("seed and generator contradict each other: give one of them")
    if generator is not None:
        return generator.initial_seed()
    return 0 if seed is None else seed


def _dealer_of(batch_sampler: Any) -> DistributedSampler:
    if type(batch_sampler) is not BatchSampler:
        why = "where it was cannot be told from a number of samples: use sampler, batch_size and drop_last"
        raise UnsupportedArgument(f"batch_sampler={type(batch_sampler).__name__}", why)
    return _checked("batch_sampler.sampler", batch_sampler.sampler)


def _checked(argument: str, sampler: Any) -> DistributedSampler:
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        return sampler
    why = "its order cannot be made again after a restart: use lockstep's DistributedSampler, or shuffle=True alone"
    raise UnsupportedArgument(f"{argument}={type(sampler).__name__}", why)
