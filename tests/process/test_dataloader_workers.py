"""The loader with worker processes: positions, random numbers and coverage are those of a loader without any."""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep import DataLoader, DistributedSampler
from lockstep.data.order import epoch_order
from lockstep.data.sample_rng import GeneratorsKept, derived_seed, epoch_key, seed_generators
from lockstep.errors import DataError
from lockstep.testing.worlds import run_threads

LENGTH = 101
Rows = list[tuple[int, float, float, float, int]]


class Noisy(Dataset[Any]):
    """Each sample draws from all three generators, and says what the worker was told."""

    told = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float, float, int]:
        return index, random.random(), float(np.random.random()), float(torch.rand(())), self.told


def tell_the_dataset(worker: int) -> None:
    """As scripts do: through the dataset that the worker has."""
    info = get_worker_info()
    assert info is not None
    info.dataset.told = 7  # pyright: ignore[reportAttributeAccessIssue]


def loader_of(rank: int, world_size: int, batch_size: int, num_workers: int = 0) -> DataLoader[Any]:
    workers: dict[str, Any] = {}
    if num_workers:
        workers = {
            "multiprocessing_context": "forkserver",
            "worker_init_fn": tell_the_dataset,
            "persistent_workers": True,
        }
    data = Noisy()
    sampler = DistributedSampler(data, world_size, rank, seed=7)
    return DataLoader(data, batch_size, sampler=sampler, num_workers=num_workers, collate_fn=list, **workers)


def in_order(epoch: int) -> list[int]:
    return epoch_order(LENGTH, "torch", 7, epoch)(np.arange(LENGTH)).tolist()


def drawn_by_rank_0_of_2(epoch: int, start: int, stop: int) -> Rows:
    """Its rows in batches of 4, each drawn from generators that were seeded for it, as a worker does."""
    data, indices, rows = Noisy(), in_order(epoch)[start:stop:2], []
    data.told = 7
    with GeneratorsKept():
        for first in range(0, len(indices), 4):
            seed_generators(derived_seed(epoch_key(7, epoch), start + 2 * first))
            rows += [data[index] for index in indices[first : first + 4]]
    return rows


def rows_of(batches: Any) -> Rows:
    return [row for batch in batches for row in batch]


def indices_of(batches: Any) -> list[int]:
    return [row[0] for row in rows_of(batches)]


def end_workers(loader: DataLoader[Any]) -> None:
    """Workers that stay would outlive a test that fails, whose trace holds the loader."""
    inner = loader._inner
    if inner is not None and inner._iterator is not None:
        inner._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.limit_s(180)
def test_workers_change_nothing_and_come_and_go(request: pytest.FixtureRequest) -> None:
    """One process without workers; then two ranks, of which rank 0 has two workers that stay; then one process."""
    alone = loader_of(0, 1, 5)
    assert indices_of(islice(alone, 2)) == in_order(0)[:10]
    rank_0, rank_1 = loader_of(0, 2, 4, num_workers=2), loader_of(1, 2, 4)
    request.addfinalizer(lambda: end_workers(rank_0))
    for loader in (rank_0, rank_1):
        loader.load_state_dict(json.loads(json.dumps(alone.state_dict())))
    main_generators = random.getstate(), torch.get_rng_state()
    assert rows_of(rank_0) == drawn_by_rank_0_of_2(epoch=0, start=10, stop=LENGTH)
    assert random.getstate() == main_generators[0]
    assert torch.equal(torch.get_rng_state(), main_generators[1])
    assert indices_of(rank_1) == [*in_order(0)[11::2], in_order(0)[0]]

    stale = iter(rank_0)
    for loader in (rank_0, rank_1):
        loader.set_epoch(1)
    batches = iter(rank_0)
    with pytest.raises(DataError, match="gone on to a later iter"):
        next(stale)
    assert rows_of(islice(batches, 3)) == drawn_by_rank_0_of_2(epoch=1, start=0, stop=24)
    drawn = rank_0.sampler.state_dict()["consumed"]  # pyright: ignore[reportAttributeAccessIssue]
    assert drawn > 24, "the workers did not draw ahead: nothing was tested"
    assert indices_of(islice(rank_1, 3)) == in_order(1)[1:24:2]
    run_threads(2, lambda comm: (rank_0, rank_1)[comm.rank].coverage.combine(comm))
    state = json.loads(json.dumps(rank_0.state_dict()))
    assert state == rank_1.state_dict()
    end_workers(rank_0)

    last = loader_of(0, 1, 16)
    last.load_state_dict(state)
    assert indices_of(last) == in_order(1)[24:]
    assert [verdict.words for verdict in last.coverage.verdicts()] == [
        "each of 101 samples exactly once, 1 once more to fill the last round",
        "each of 101 samples exactly once",
    ]
