"""The loader without workers: torch's batches, positions, random numbers, what it refuses. With them: tests/process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from lockstep import DataLoader, DistributedSampler
from lockstep.data.coverage import tally_of
from lockstep.data.sample_log import sample_ids
from lockstep.errors import ConfigError, DataError, UnsupportedArgument

LENGTH = 23


class Noisy(Dataset[tuple[int, float, float, float]]):
    """Each sample draws from all three generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


class InBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        assert type(indices) is list
        return [self[index] for index in indices]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Backwards(DistributedSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


DATA: Any = list(range(LENGTH))


def sampler(rank: int = 0, world_size: int = 1, **kwargs: Any) -> DistributedSampler:
    return DistributedSampler(DATA, world_size, rank, **kwargs)


def drawn(loader: DataLoader[Any], batches: int | None = None) -> dict[int, tuple[float, ...]]:
    """Sample -> the random numbers that it came with."""
    rows = [row for batch in islice(loader, batches) for row in batch]
    return {row[0]: row[1:] for row in rows}


def generators() -> list[Any]:
    return [random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()]  # pyright: ignore


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 23, 40, None])
def test_batches_are_torchs(batch_size: int | None, drop_last: bool) -> None:
    if batch_size is None and drop_last:
        pytest.skip("torch refuses it")
    for make in (
        lambda cls: cls(DATA, batch_size=batch_size, drop_last=drop_last, sampler=sampler(1, 3)),
        lambda cls: cls(DATA, batch_size, False, drop_last=drop_last),
        lambda cls: cls(DATA, batch_size, sampler=SequentialSampler(DATA), drop_last=drop_last),
        lambda cls: cls(DATA, batch_sampler=BatchSampler(sampler(1, 3), batch_size or 1, drop_last)),
    ):
        theirs, ours = make(TorchDataLoader), make(DataLoader)
        assert isinstance(ours, TorchDataLoader)
        for _ in range(2):
            expected, actual = list(theirs), list(ours)
            assert len(ours) == len(theirs) == len(actual)
            assert [torch.as_tensor(batch).tolist() for batch in actual] == [
                torch.as_tensor(batch).tolist() for batch in expected
            ]


def test_shuffle_needs_no_sampler() -> None:
    def epoch(loader: DataLoader[Any]) -> list[int]:
        return [int(i) for batch in loader for i in batch]

    loader = DataLoader(DATA, batch_size=4, shuffle=True, seed=3)
    epochs = [epoch(loader) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == DATA
    assert epochs[0] != epochs[1]
    generator = torch.Generator()
    generator.manual_seed(3)
    assert epoch(DataLoader(DATA, batch_size=5, shuffle=True, generator=generator)) == epochs[0]
    assert [str(verdict) for verdict in loader.coverage.verdicts()] == [
        f"epoch {e}: each of 23 samples exactly once" for e in range(2)
    ]


def test_a_loader_goes_on_in_other_batches() -> None:
    whole = [int(i) for batch in DataLoader(DATA, batch_size=4, shuffle=True) for i in batch]
    first = DataLoader(DATA, batch_size=4, shuffle=True)
    done = [int(i) for batch in islice(first, 3) for i in batch]
    state = json.loads(json.dumps(first.state_dict()))
    for size in (None, 1, 7):
        second = DataLoader(DATA, batch_size=size, shuffle=True)
        second.load_state_dict(state)
        second.set_epoch(0)
        rest = [int(i) for batch in second for i in torch.as_tensor(batch).view(-1)]
        assert done + rest == whole
        assert second.coverage.verdict().is_exact
        assert (second.epoch, len(list(second))) == (0, len(second)), "complete: the next pass is epoch 1"
        assert second.epoch == 1


def test_a_batch_counts_once_it_is_handed_out() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=sampler())
    batches = iter(loader)
    with pytest.raises(DataError, match="no batch of this pass"):
        loader.samples_of_batch()
    for count in range(1, 7):
        batch = next(batches)
        assert loader.state_dict()["sampler"]["consumed"] == min(4 * count, LENGTH)
        assert sample_ids(loader.samples_of_batch()) == batch.tolist()
        assert loader.coverage.tally().count == min(4 * count, LENGTH)
    assert next(batches, None) is None
    assert len(batches) == len(loader) == 6


def test_a_pass_whose_last_batch_is_dropped_is_complete_after_the_one_before() -> None:
    loader = DataLoader(DATA, batch_size=4, drop_last=True, sampler=sampler())
    for _ in islice(loader, 5):
        pass
    assert loader.state_dict()["sampler"]["consumed"] == LENGTH
    assert loader.coverage.verdict().words == "each of 23 samples exactly once, except 3 left out at the end"
    resumed = DataLoader(DATA, batch_size=1, sampler=sampler())
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    assert list(resumed) == []
    assert resumed.coverage.verdict() == loader.coverage.verdict()


def test_a_look_at_the_first_batch_does_not_count() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=sampler())
    loader.set_epoch(0)
    next(iter(loader))
    loader.set_epoch(0)
    assert len(list(loader)) == 6
    assert loader.coverage.verdict().is_exact


def test_a_pass_left_early_is_not_complete_and_the_next_one_is_the_next_epoch() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=sampler())
    for _ in islice(loader, 2):
        pass
    with pytest.warns(UserWarning, match="left epoch 0 after 8 of 23 samples"):
        list(loader)
    assert [verdict.is_exact for verdict in loader.coverage.verdicts()] == [False, True]
    assert loader.coverage.tally(0).count == 8


def test_two_passes_at_once_are_equal() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=sampler())
    loader.set_epoch(2)
    assert all(left.tolist() == right.tolist() for left, right in zip(loader, loader, strict=True))


# ---------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("dataset_class", [Noisy, InBatches])
def test_the_scripts_generators_are_left_alone(dataset_class: type[Noisy]) -> None:
    before = generators()
    list(DataLoader(dataset_class(), batch_size=4, shuffle=True))
    assert generators() == before


def test_random_numbers_belong_to_the_sample() -> None:
    expected = drawn(DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=list))
    assert len(set(expected.values())) == LENGTH
    found: dict[int, Any] = {}
    for rank in range(3):
        found |= drawn(DataLoader(Noisy(), batch_size=5, sampler=sampler(rank, 3), collate_fn=list))
    assert found == expected
    first = DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=list)
    found = drawn(first, batches=2)
    second = DataLoader(Noisy(), batch_size=3, shuffle=True, collate_fn=list)
    second.load_state_dict(first.state_dict())
    torch.rand(3)
    assert found | drawn(second) == expected
    assert drawn(second) != expected, "the next epoch has other ones"
    other = drawn(DataLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=list, seed=1))
    assert not set(other.values()) & set(expected.values())


def test_without_sample_rng_the_dataset_draws_from_the_scripts_generators() -> None:
    torch.manual_seed(0)
    first = drawn(DataLoader(Noisy(), batch_size=4, collate_fn=list, sample_rng=False))
    torch.manual_seed(0)
    assert [values[2] for values in first.values()] == [float(torch.rand(())) for _ in range(LENGTH)]


# ---------------------------------------------------------------------- errors


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise OSError("cannot be read")
        return index


def test_a_batch_that_cannot_be_read_is_passed_over_but_not_counted() -> None:
    loader = DataLoader(Broken(), batch_size=4, sampler=sampler(shuffle=False))
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    with pytest.raises(OSError, match="cannot be read"):
        next(batches)
    assert next(batches).tolist() == [12, 13, 14, 15]
    assert loader.state_dict()["sampler"]["consumed"] == 16
    assert sample_ids(loader.samples_of_batch()) == [12, 13, 14, 15]
    assert len(list(batches)) == 2
    assert loader.coverage.tally() == tally_of([*range(8), *range(12, LENGTH)])
    assert loader.coverage.verdict().words == "19 samples were used where 23 should be: 4 or more are missing"


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"sampler": RandomSampler(DATA)}, UnsupportedArgument, "sampler=RandomSampler is not supported"),
        ({"sampler": TorchSampler(DATA, 1, 0)}, UnsupportedArgument, "use lockstep's DistributedSampler"),
        ({"sampler": Backwards(DATA, 1, 0)}, UnsupportedArgument, "sampler=Backwards"),
        ({"batch_sampler": [[1, 2], [3]]}, UnsupportedArgument, "batch_sampler=list"),
        ({"batch_sampler": BatchSampler(RandomSampler(DATA), 2, False)}, UnsupportedArgument, "batch_sampler.sampler"),
        ({"in_order": False}, UnsupportedArgument, "in_order=False"),
        ({"seed": 1, "generator": torch.Generator()}, ConfigError, "contradict"),
        ({"sampler": DistributedSampler(DATA, 1, 0), "shuffle": True}, ValueError, "mutually exclusive"),
        ({"sampler": SequentialSampler(DATA), "shuffle": True}, ValueError, "mutually exclusive"),
        ({"batch_size": None, "drop_last": True}, ValueError, "mutually exclusive"),
        ({"prefetch": 3}, TypeError, "prefetch"),
    ],
)
def test_what_cannot_be_repeated_exactly_is_refused(kwargs: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DataLoader(DATA, **kwargs)


def test_a_dataset_that_only_streams_is_refused() -> None:
    with pytest.raises(UnsupportedArgument, match="dataset=Stream is not supported: an IterableDataset"):
        DataLoader(Stream())


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"sampler": None},
        {"sampler": {}},
        {"coverage": None},
        {"coverage": {"length": 22, "epochs": [], "unknown_through": -1}},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    first = DataLoader(DATA, batch_size=4, shuffle=True)
    list(islice(first, 3))
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    loader.load_state_dict(first.state_dict())
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()
    with pytest.raises(DataError):
        loader.load_state_dict({**before, **damage})
    with pytest.raises(DataError, match="no loader state but a list"):
        loader.load_state_dict([])  # pyright: ignore[reportArgumentType]
    assert loader.state_dict() == before
