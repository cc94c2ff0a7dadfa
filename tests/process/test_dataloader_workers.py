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
from lockstep.errors import DataError

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


def loader_of(rank: int, world_size: int, batch_size: int, num_workers: int = 0, **kwargs: Any) -> DataLoader[Any]:
    if num_workers:
        kwargs |= {"multiprocessing_context": "forkserver", "worker_init_fn": tell_the_dataset}
    data = Noisy()
    sampler = DistributedSampler(data, world_size, rank, seed=7)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=num_workers, collate_fn=list, **kwargs)


def rows_of(batches: Any) -> Rows:
    return [row for batch in batches for row in batch]


def without_told(rows: Rows) -> list[Any]:
    return [row[:-1] for row in rows]


def end_workers(loader: DataLoader[Any]) -> None:
    """Workers that stay would outlive a test that fails, whose trace holds the loader."""
    inner = loader._inner
    if inner is not None and inner._iterator is not None:
        inner._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.limit_s(180)
def test_workers_change_nothing_and_come_and_go(request: pytest.FixtureRequest) -> None:
    """Rank 0 of 2 with two workers that stay; then one process alone without workers; then alone with one worker."""
    alone = loader_of(0, 1, 8)
    uninterrupted = [without_told(rows_of(alone)) for _ in range(2)]
    rank_1 = loader_of(1, 2, 4)
    main_generators = random.getstate(), torch.get_rng_state()

    rank_0 = loader_of(0, 2, 4, num_workers=2, persistent_workers=True)
    request.addfinalizer(lambda: end_workers(rank_0))
    first = rows_of(rank_0)
    assert {row[-1] for row in first} == {7}
    assert without_told(first)[:50] == uninterrupted[0][0:100:2]
    rows_of(rank_1)
    for loader in (rank_0, rank_1):
        loader.set_epoch(1)
    stale = iter(rank_0)
    rank_0.set_epoch(1)
    batches = iter(rank_0)
    with pytest.raises(DataError, match="gone on to a later iter"):
        next(stale)
    trained = [rows_of(islice(each, 3)) for each in (batches, iter(rank_1))]
    drawn = rank_0.sampler.state_dict()["consumed"]  # pyright: ignore[reportAttributeAccessIssue]
    assert drawn > 24, "the workers did not draw ahead: nothing was tested"
    mixed = [row for pair in zip(*map(without_told, trained), strict=True) for row in pair]
    assert mixed == uninterrupted[1][:24]
    rank_0.coverage.merge(rank_1.coverage)  # what combine does, without a group
    rank_0.coverage.world_size = 1
    state = json.loads(json.dumps(rank_0.state_dict()))
    end_workers(rank_0)

    second = loader_of(0, 1, 5)
    second.load_state_dict(state)
    more = without_told(rows_of(islice(second, 4)))
    assert more == uninterrupted[1][24:44]

    third = loader_of(0, 1, 16, num_workers=1, prefetch_factor=3)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    rest = rows_of(third)
    assert {row[-1] for row in rest} == {7}
    assert without_told(rest) == uninterrupted[1][44:]
    assert [verdict.words for verdict in third.coverage.verdicts()] == [
        "each of 101 samples exactly once, 1 once more to fill the last round",
        "each of 101 samples exactly once",
    ]
    assert random.getstate() == main_generators[0]
    assert torch.equal(torch.get_rng_state(), main_generators[1])
