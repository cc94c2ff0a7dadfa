"""The loader without workers: torch's batches, positions, random numbers, what it refuses. With them: tests/process."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from run_histories import Prefetching
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from lockstep import DataLoader, DistributedSampler, rng_state, set_rng_state
from lockstep.data import dataloader
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


def seeded(cls: Any) -> Any:
    """`cls`, with the script's generators as at its beginning."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return cls


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


@pytest.mark.filterwarnings("ignore:rank . left epoch")
@example(3, 2, 1, "none", False, [-1, 1])
@example(7, 2, 2, "none", True, [-1, 1])
@given(
    st.integers(1, 17),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["none", "repeat"]),
    st.booleans(),
    st.lists(st.integers(-2, 4), max_size=8),
)
def test_ranks_with_unequally_many_batches_agree_on_the_next_pass(
    length: int, world_size: int, batch: int, pad: Any, drop_last: bool, events: list[int]
) -> None:
    """Event -1 and -2: set_epoch(0) and (1); else all take so many batches, some fewer because they have no more."""
    data: Any = range(length)
    samplers = [DistributedSampler(data, world_size, rank, pad=pad) for rank in range(world_size)]
    loaders = [DataLoader(data, batch, sampler=one, drop_last=drop_last, collate_fn=list) for one in samplers]
    for event in events:
        for loader in loaders:
            if event < 0:
                loader.set_epoch(-1 - event)
            else:
                list(islice(loader, event))
        assert len({one.next_epoch for one in samplers}) == 1
    whole = Counter(index for one in samplers for index in one)
    assert whole.keys() == set(data)
    assert pad == "repeat" or whole.total() == length


def test_what_was_only_prefetched_does_not_complete_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of which all samples were drawn, but not handed out, is repeated from where the loaded state was."""
    monkeypatch.setattr(dataloader, "TorchDataLoader", Prefetching)
    first = DataLoader(DATA, batch_size=4, shuffle=True)
    done = [int(i) for batch in islice(first, 2) for i in batch]
    loader = DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1, prefetch_factor=9)
    loader.load_state_dict(first.state_dict())
    for _ in range(2):
        loader.set_epoch(0)
        next(iter(loader))
        assert loader.sampler.state_dict()["consumed"] == LENGTH, "all are drawn"  # pyright: ignore
    assert loader.state_dict()["sampler"] == {**first.state_dict()["sampler"], "consumed": 12}
    assert sorted(done + [int(i) for batch in loader for i in batch]) == DATA
    assert (loader.epoch, loader.coverage.verdict().is_exact) == (0, True)


def test_two_passes_at_once_are_equal() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=sampler())
    loader.set_epoch(2)
    assert all(left.tolist() == right.tolist() for left, right in zip(loader, loader, strict=True))


# ---------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("dataset_class", [Noisy, InBatches])
def test_the_scripts_generators_are_left_alone(dataset_class: type[Noisy]) -> None:
    before = generators()
    for how in ({}, {"seed_per": "sample"}, {"batch_size": None}):
        list(DataLoader(dataset_class(), **{"batch_size": 4, "shuffle": True, **how}))
    assert generators() == before


def per_sample(batch_size: int | None, seed: int = 0, **kwargs: Any) -> DataLoader[Any]:
    if "sampler" not in kwargs:
        kwargs |= {"shuffle": True, "seed": seed}
    return DataLoader(Noisy(), batch_size, collate_fn=list, seed_per="sample", **kwargs)


def test_random_numbers_can_belong_to_the_sample() -> None:
    expected = drawn(per_sample(4))
    assert len(set(expected.values())) == LENGTH
    found: dict[int, Any] = {}
    for rank in range(3):
        found |= drawn(per_sample(5, sampler=sampler(rank, 3)))
    assert found == expected
    found = {row[0]: tuple(row[1:]) for row in per_sample(None)}
    assert found == expected
    first = per_sample(4)
    found = drawn(first, batches=2)
    second = per_sample(3)
    second.load_state_dict(first.state_dict())
    torch.rand(3)
    assert found | drawn(second) == expected
    assert drawn(second) != expected, "the next epoch has other ones"
    assert not set(drawn(per_sample(4, seed=1)).values()) & set(expected.values())


def rank_rows(
    rank: int, world_size: int, batch: int, state: Any = None, stop: int | None = None, workers: int = 1
) -> tuple[Any, Any]:
    """The rows of epoch 1, or of its rest, up to batch `stop`; and the state after that."""
    with_state = DataLoader(Noisy(), batch, sampler=sampler(rank, world_size), num_workers=workers, collate_fn=list)
    if state is None:
        with_state.set_epoch(1)
    else:
        with_state.load_state_dict(state)
    rows = [row for found in islice(with_state, stop) for row in found]
    return rows, with_state.state_dict()


def test_random_numbers_belong_to_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place in the epoch, that is: for any rank, and wherever a resumed run begins."""
    monkeypatch.setattr(dataloader, "TorchDataLoader", Prefetching)
    seen: set[float] = set()
    for world_size, batch in [(1, 1), (1, 5), (2, 4), (3, 2), (5, 3)]:
        for rank in range(world_size):
            whole, _ = rank_rows(rank, world_size, batch)
            assert len({row[1:] for row in whole}) == len(whole)
            for stop in range(1, -(-len(whole) // batch)):
                first, state = rank_rows(rank, world_size, batch, stop=stop, workers=stop % 2)
                torch.rand(stop)
                rest, _ = rank_rows(rank, world_size, batch, state, workers=stop // 2 % 2)
                assert first + rest == whole
            if (world_size, batch) == (3, 2):
                assert not seen & {row[1] for row in whole}, "ranks draw the same"
                seen |= {row[1] for row in whole}


@pytest.mark.parametrize("batch_size", [4, None])
def test_without_workers_a_dataset_can_draw_from_the_scripts_generators(batch_size: int | None) -> None:
    """So with these, which a checkpoint holds too, a loader goes on exactly."""
    torchs = seeded(TorchDataLoader)(Noisy(), batch_size, generator=torch.Generator())  # else it draws a number more
    expected = str(list(torchs))
    assert str(list(seeded(DataLoader)(Noisy(), batch_size, seed_per="never"))) == expected

    whole = seeded(DataLoader)(Noisy(), batch_size, shuffle=True, seed_per="never")
    batches = iter(whole)
    for _ in range(3):
        next(batches)
    state, generator_states = whole.state_dict(), rng_state()
    expected = str(list(batches))
    resumed = seeded(DataLoader)(Noisy(), batch_size, shuffle=True, seed_per="never")
    resumed.load_state_dict(state)
    set_rng_state(generator_states)
    assert str(list(resumed)) == expected


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
        ({"seed_per": "epoch"}, ConfigError, "seed_per='epoch': choose one of batch, sample, never"),
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
