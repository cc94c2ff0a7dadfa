"""The sampler under a real DataLoader with worker processes, which draw samples ahead of the training loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep import DistributedSampler

LENGTH = 101


def sampler_of(rank: int, world_size: int = 2, **kwargs: Any) -> DistributedSampler:
    return DistributedSampler(range(LENGTH), world_size, rank, seed=7, **kwargs)  # pyright: ignore[reportArgumentType]


def expected(rank: int, epoch: int) -> list[int]:
    sampler = sampler_of(rank)
    sampler.set_epoch(epoch)
    return list(sampler)


@contextmanager
def loader_over(sampler: DistributedSampler, batch_size: int | None) -> Iterator[DataLoader[int]]:
    """Two persistent workers, which live as long as the iterator; forked from a server, as pytest may have threads."""
    loader: DataLoader[Any] = DataLoader(
        list(range(LENGTH)),  # pyright: ignore[reportArgumentType]
        sampler=sampler,
        batch_size=batch_size,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )
    try:
        yield loader
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.limit_s(120)
def test_epochs_advance_and_resume_is_exact_with_workers() -> None:
    done: list[int] = []
    states = []
    for rank in range(2):
        sampler = sampler_of(rank)
        with loader_over(sampler, batch_size=4) as loader:
            for epoch in range(2):
                assert [int(index) for batch in loader for index in batch] == expected(rank, epoch)
            batches = iter(loader)
            trained = [int(index) for _ in range(3) for index in next(batches)]
            states.append(json.loads(json.dumps(sampler.state_dict(consumed=len(trained)))))
            assert sampler.state_dict()["consumed"] > 24, "the workers did not draw ahead: nothing was tested"
        assert trained == expected(rank, 2)[:12]
        done += trained
    assert states[0] == states[1]
    resumed = []
    for rank in range(3):
        sampler = sampler_of(rank, world_size=3, pad="none")
        sampler.load_state_dict(states[0])
        resumed += list(sampler)
    assert sorted(done + resumed) == list(range(LENGTH))


@pytest.mark.limit_s(120)
def test_a_loader_without_batches_counts_its_first_epoch_once() -> None:
    """It makes the sampler's iterator twice before the first sample."""
    with loader_over(sampler_of(1), batch_size=None) as loader:
        for epoch in range(2):
            assert [int(index) for index in loader] == expected(1, epoch)
