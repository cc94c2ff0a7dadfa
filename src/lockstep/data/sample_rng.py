"""Random numbers that belong to a sample, not to whoever loads it.

What a dataset draws while it makes sample i (a crop, a flip, noise) is keyed by (seed, epoch, i): the same in every
worker, with any number of workers and ranks, in any batch, before and after a restart. For that, Python's, numpy's and
torch's CPU generator are seeded before each sample. What a `collate_fn` draws goes on from the batch's last sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Request(NamedTuple):
    """What is asked of a dataset: a batch, or one sample where there are no batches."""

    number: int  # of the batch in its pass
    ids: list[int]
    key: int | None  # None leaves the generators alone


class Reply(NamedTuple):
    """What comes back, with the number of its request."""

    number: int
    value: Any


@final
class KeyedDataset(Dataset[Any]):
    """Answers a request with the samples of `dataset`; picklable where that is."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, request: Request) -> Reply:
        """A batch's samples."""
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return Reply(request.number, [self._one(request.key, index) for index in request.ids])
        if request.key is not None:
            seed_generators(sample_seed(request.key, request.ids[0]))
        return Reply(request.number, fetch(request.ids))

    def __getitem__(self, request: Request) -> Reply:
        """One sample."""
        return Reply(request.number, self._one(request.key, request.ids[0]))

    def _one(self, key: int | None, index: int) -> Any:
        if key is not None:
            seed_generators(sample_seed(key, index))
        return self.dataset[index]


@final
class Collate:
    """Calls `fn` on the samples of a reply; picklable where that is."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, reply: Any) -> Reply:
        return Reply(reply.number, self.fn(reply.value))


@final
class StartWorker:
    """First in a worker: makes `get_worker_info().dataset` the one that the user gave, then calls the user's `fn`."""

    def __init__(self, fn: Callable[[int], None] | None) -> None:
        self.fn = fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses plain assignment
        if self.fn is not None:
            self.fn(worker)


def epoch_key(seed: int, epoch: int) -> int:
    """64 bits for one (seed, epoch)."""
    return _mix(_mix(seed) + epoch)


def sample_seed(key: int, index: int) -> int:
    """64 bits for one sample."""
    return _mix(key + index)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch's CPU. Those of devices are left alone."""
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """The three generators are afterwards as they were before."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def _mix(word: int) -> int:
    """splitmix64."""
    word = (word + _GOLDEN) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
