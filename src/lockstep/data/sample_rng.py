"""Random numbers that belong to a batch or a sample, not to the worker that loads it.

What a dataset draws (a crop, a flip, noise) comes from Python's, numpy's and torch's CPU generator. Whoever loads seeds
them before each batch, from (seed, epoch, position of the batch's first sample): the same with any number of workers or
none, before and after a restart, on equally many ranks with batches of the same size. Or before each sample, from
(seed, epoch, sample): the same also with any number of ranks and in any batch. What a `collate_fn` draws goes on from
there. A script that loads without workers finds its own generators as it left them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

SeedPer = Literal["batch", "sample", "never"]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Request(NamedTuple):
    """What is asked of a dataset: a batch, or one sample where there are no batches."""

    number: int  # of the batch in its pass
    ids: list[int]
    seed: int | None  # of the batch, or what seeds of samples are made from; None leaves the generators alone


class Reply(NamedTuple):
    """What comes back, with the number of its request."""

    number: int
    value: Any


@final
class KeyedDataset(Dataset[Any]):
    """Answers a request with the samples of `dataset`; picklable where that is."""

    def __init__(self, dataset: Any, per_sample: bool) -> None:
        self.dataset = dataset
        self._per_sample = per_sample

    def __getitems__(self, request: Request) -> Reply:
        """A batch's samples."""
        dataset = self.dataset
        number, ids, seed = request
        fetch = getattr(dataset, "__getitems__", None)
        if self._per_sample and fetch is None:
            return Reply(number, [self._seeded(seed, index) for index in ids])
        if seed is not None:
            seed_generators(derived_seed(seed, ids[0]) if self._per_sample else seed)
        return Reply(number, [dataset[index] for index in ids] if fetch is None else fetch(ids))

    def __getitem__(self, request: Request) -> Reply:
        """One sample."""
        number, ids, seed = request
        if self._per_sample:
            return Reply(number, self._seeded(seed, ids[0]))
        if seed is not None:
            seed_generators(seed)
        return Reply(number, self.dataset[ids[0]])

    def _seeded(self, seed: int | None, index: int) -> Any:
        assert seed is not None
        seed_generators(derived_seed(seed, index))
        return self.dataset[index]


def collate(fn: Callable[[Any], Any], reply: Any) -> Reply:
    """The samples of a reply, put together by the user's `fn`."""
    return Reply(reply.number, fn(reply.value))


def start_worker(fn: Callable[[int], None] | None, worker: int) -> None:
    """First in a worker: makes `get_worker_info().dataset` the one that the user gave, then calls the user's `fn`."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it refuses plain assignment
    if fn is not None:
        fn(worker)


def epoch_key(seed: int, epoch: int) -> int:
    """64 bits for one (seed, epoch)."""
    return _mix(_mix(seed) + epoch)


def derived_seed(key: int, number: int) -> int:
    """64 bits for one sample or position of an epoch."""
    return _mix(key + number)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch's CPU. Those of devices are left alone."""
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed)


@final
class GeneratorsKept:
    """The three generators are after a `with` block as before, save for half a pair of numpy's normal numbers.

    numpy's works on other bits meanwhile: to read and set its state takes 100 microseconds, all of the rest 20.
    """

    def __init__(self) -> None:
        self._bits: Any = np.random.MT19937(0)  # of whoever is not at work

    def __enter__(self) -> None:
        self._python, self._torch = random.getstate(), torch.default_generator.get_state()
        self._exchange()

    def __exit__(self, *_: object) -> None:
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        self._exchange()

    def _exchange(self) -> None:
        numpys: Any = np.random  # whose stubs do not know these
        bits = numpys.get_bit_generator()
        numpys.set_bit_generator(self._bits)
        self._bits = bits


def _mix(word: int) -> int:
    """splitmix64."""
    word = (word + _GOLDEN) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
