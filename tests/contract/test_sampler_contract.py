"""The same cases on torch's DistributedSampler and on ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import DistributedSampler as TorchSampler

from lockstep import DistributedSampler as OurSampler

LENGTHS = [1, 2, 3, 5, 7, 8, 10, 64, 97, 1000]
WORLD_SIZES = [1, 2, 3, 4, 9]
BOTH = pytest.mark.parametrize("sampler_class", [TorchSampler, OurSampler], ids=["torch", "lockstep"])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "as they come"])
@pytest.mark.parametrize("drop_last", [True, False], ids=["drop", "repeat"])
def test_every_index_is_torchs(world_size: int, shuffle: bool, drop_last: bool) -> None:
    compared = 0
    for length in LENGTHS:
        if drop_last and length < world_size:
            continue  # torch gives nothing, we say so: test_sampler_errors
        for rank in range(world_size):
            for seed, epochs in ((0, [0, 1, 2]), (1337, [5, 3]), (2**40, [10**6])):
                arguments: tuple[Any, ...] = (range(length), world_size, rank, shuffle, seed, drop_last)
                theirs, ours = TorchSampler(*arguments), OurSampler(*arguments)
                assert (len(ours), ours.num_samples, ours.total_size) == (
                    len(theirs),
                    theirs.num_samples,
                    theirs.total_size,
                )
                for epoch in epochs:
                    theirs.set_epoch(epoch)
                    ours.set_epoch(epoch)
                    expected = list(theirs)
                    assert list(ours) == expected, (length, rank, seed, epoch)
                    compared += len(expected)
    assert compared > 1000


def test_more_samples_than_one_chunk_are_torchs() -> None:
    arguments: tuple[Any, ...] = (range(70_001), 2, 1)
    assert list(OurSampler(*arguments)) == list(TorchSampler(*arguments))


def test_every_attribute_of_torchs_is_there() -> None:
    arguments: tuple[Any, ...] = (range(10), 4, 3, True, 7, False)
    theirs, ours = TorchSampler(*arguments), OurSampler(*arguments)
    for name, value in vars(theirs).items():
        assert getattr(ours, name) == value, name
    assert isinstance(ours, TorchSampler)


@BOTH
def test_two_looks_at_an_epoch_are_equal(sampler_class: type[TorchSampler[int]]) -> None:
    """A look at one batch, as scripts do on rank 0, must not change what this rank trains on."""
    sampler = sampler_class(range(100), 2, 0)
    loader = DataLoader(list(range(100)), batch_size=10, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        first = next(iter(loader)).tolist()
        trained = [index for batch in loader for index in batch.tolist()]
        assert trained[:10] == first
        assert sampler.epoch == epoch


@BOTH
def test_two_iterators_at_once_are_equal(sampler_class: type[TorchSampler[int]]) -> None:
    sampler = sampler_class(range(100), 2, 0)
    assert all(left == right for left, right in zip(sampler, sampler, strict=True))


@BOTH
def test_assigning_the_epoch_is_set_epoch(sampler_class: type[TorchSampler[int]]) -> None:
    sampler, other = sampler_class(range(100), 2, 0), sampler_class(range(100), 2, 0)
    sampler.epoch = 4
    other.set_epoch(4)
    assert list(sampler) == list(other)


@BOTH
def test_an_iterator_keeps_its_epoch(sampler_class: type[TorchSampler[int]]) -> None:
    sampler = sampler_class(range(100), 2, 0)
    epoch_0 = list(sampler)
    sampler.set_epoch(0)
    before = iter(sampler)
    sampler.set_epoch(1)
    assert list(before) == epoch_0
    assert list(sampler) != epoch_0


@BOTH
def test_subclasses_may_build_on_it(sampler_class: type[TorchSampler[int]]) -> None:
    class Twice(sampler_class):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[int]:
            return iter([index for index in super().__iter__() for _ in range(2)])

    plain = list(sampler_class(range(9), 3, 1))
    assert list(Twice(range(9), 3, 1)) == [index for index in plain for _ in range(2)]


@BOTH
def test_copies_go_on_alone(sampler_class: type[TorchSampler[int]]) -> None:
    sampler = sampler_class(range(50), 2, 0)
    sampler.set_epoch(3)
    twin = copy.deepcopy(sampler)
    assert list(twin) == list(sampler)
    assert twin.epoch == 3


@BOTH
@pytest.mark.parametrize("rank", [-1, 2, 5])
def test_a_rank_outside_the_world_is_refused(sampler_class: type[TorchSampler[int]], rank: int) -> None:
    with pytest.raises(ValueError, match=rf"Invalid rank {rank}, rank should be in the interval \[0, 1\]"):
        sampler_class(range(10), 2, rank)


@BOTH
@pytest.mark.parametrize("given", [{}, {"num_replicas": 2}, {"rank": 0}])
def test_without_a_group_the_numbers_are_needed(sampler_class: type[TorchSampler[int]], given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"[Dd]efault process group has not been initialized"):
        sampler_class(range(10), **given)


@BOTH
@pytest.mark.parametrize("dataset", [Stream(), Unsized()], ids=["iterable", "no length"])
def test_a_dataset_without_length_is_refused(sampler_class: type[TorchSampler[int]], dataset: Any) -> None:
    with pytest.raises(TypeError):
        sampler_class(dataset, 2, 0)


@BOTH
def test_a_loader_refuses_a_sampler_and_shuffle(sampler_class: type[TorchSampler[int]]) -> None:
    data = list(range(10))
    with pytest.raises(ValueError, match="mutually exclusive with shuffle"):
        DataLoader(data, sampler=sampler_class(data, 2, 0), shuffle=True)  # pyright: ignore[reportArgumentType]


@BOTH
def test_rank_and_world_come_from_the_default_group(sampler_class: type[TorchSampler[int]], tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sampler = sampler_class(range(10))
        assert (sampler.rank, sampler.num_replicas) == (0, 1)
        assert sampler_class(range(10), num_replicas=3).num_replicas == 3
    finally:
        dist.destroy_process_group()
