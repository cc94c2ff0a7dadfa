"""Which samples loaders are to hand out, and which they have: the notes of all ranks must add up to the epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from watched_loaders import Rows, Stream, Watched, stock

import lockstep
from lockstep.observe.dealt_samples import Share, deal_of
from lockstep.observe.tally import BINS, Tally, tally_from, tally_of, whole_tally
from lockstep.observe.torch_data import may_share_samples

Fields = Mapping[str, Any]

# ------------------------------------------------------------------ by which rule


def handed(loader: DataLoader[Any], batches: int | None = None) -> dict[str, Any]:
    """The note of a pass over `loader`, or of its first batches."""
    deal = deal_of(loader)
    assert deal is not None
    assert loader.batch_sampler is not None
    share, drawn = Share(deal), list(loader.batch_sampler)
    share.drawn += drawn
    share.count(len(drawn[:batches]) // 2)
    fields = share.fields(len(drawn[:batches]), 0, batches is None)
    if batches is None:
        assert fields["samples"] == sum(map(len, drawn)) == sum(fields["bins"])
    return fields


def tally_in(fields: Fields, name: str) -> Tally:
    return tally_from(bytes.fromhex(fields[name])) if name in fields else Tally()


def is_sealed(ranks: list[dict[str, Any]]) -> bool:
    """As the report has it."""
    again, left = tally_in(ranks[0], "again"), tally_in(ranks[0], "left")
    assert (again.count, left.count) == (ranks[0].get("repeated", 0), ranks[0].get("dropped", 0))
    used = sum((tally_in(fields, "digest") for fields in ranks), start=Tally())
    return used == tally_in(ranks[0], "whole") + again - left


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 203])
@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("drops", ["nothing", "in the sampler", "in the loader"])
@pytest.mark.parametrize("kind", ["stock", "torch", "keyed"])
@pytest.mark.filterwarnings("ignore")
def test_what_samplers_deal_adds_up_to_the_epoch(length: int, is_shuffled: bool, drops: str, kind: str) -> None:
    make: Any = DistributedSampler if kind == "stock" else partial(lockstep.DistributedSampler, order=cast(Any, kind))
    data: Any = range(length)
    in_sampler = drops == "in the sampler"
    for world_size in [n for n in (1, 2, 3, 7) if kind == "stock" or not in_sampler or n <= length]:
        ranks = []
        for rank in range(world_size):
            sampler = make(data, world_size, rank, is_shuffled, 5, in_sampler)
            sampler.set_epoch(3)
            loader = DataLoader(data, 4, sampler=sampler, drop_last=drops == "in the loader")
            deal = deal_of(loader)
            assert deal is not None
            assert (deal.epoch, deal.length, deal.start) == (3, length, 0)
            ranks.append(handed(loader))
            assert len(ranks[-1]["bins"]) == min(BINS, length)
            assert tally_in(ranks[-1], "whole") == whole_tally(length)
        assert is_sealed(ranks), (world_size, ranks)
        ranks[0]["digest"] = tally_of([length] * ranks[0]["samples"]).digest().hex()
        assert not is_sealed(ranks) or not ranks[0]["samples"]


def test_pass_that_goes_on_says_from_where() -> None:
    data: Any = range(50)
    ranks = []
    for rank in range(3):
        sampler = lockstep.DistributedSampler(data, 3, rank)
        sampler.load_state_dict({**sampler.state_dict(), "consumed": 16})
        loader = DataLoader(data, 4, sampler=sampler)
        deal = deal_of(loader)
        assert deal is not None
        assert list(deal.order()) == list(lockstep.DistributedSampler(data, 1, 0))
        ranks.append(handed(loader))
    assert [(fields["earlier"], fields["samples"]) for fields in ranks] == [(16, 12)] * 3
    assert ranks[0]["repeated"] == 2
    assert {fields["left_early"] for fields in ranks} == {False}


class Ours(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Buckets(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [0, 1]])


def test_nothing_is_said_of_what_may_be_meant() -> None:
    data = TensorDataset(torch.arange(20))
    weighted = WeightedRandomSampler([1.0] * 20, 20)
    for sampler in (SequentialSampler(data), RandomSampler(data), weighted, Ours(data, 2, 0)):
        assert deal_of(DataLoader(data, 4, sampler=sampler)) is None
    assert deal_of(DataLoader(data, batch_sampler=Buckets(stock(), 2, False))) is None
    assert deal_of(DataLoader(Stream(4))) is None
    uneven = lockstep.DistributedSampler(data, 3, 0, pad="none")
    assert deal_of(DataLoader(data, 4, sampler=uneven, drop_last=True)) is None  # no rank knows what the others have
    for loader in (DataLoader(data, 4, sampler=uneven), DataLoader(data, None, sampler=stock())):
        deal = deal_of(loader)
        assert deal is not None
        assert (deal.length, deal.total) == (20, 20)


# ------------------------------------------------------------------ Accelerate's


@pytest.mark.parametrize("sampling", ["seeded", "generator", "in order"])
@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_accelerate_shards_adds_up_to_the_epoch(sampling: str, options: dict[str, Any], drop_last: bool) -> None:
    accelerate: Any = pytest.importorskip("accelerate.data_loader", reason="Accelerate is not installed")

    def notes(length: int, world_size: int, seeds: Sequence[int], skipped: int = 0) -> list[dict[str, Any]]:
        data: Any = range(length)
        found = []
        for rank in range(world_size):
            seed = seeds[rank % len(seeds)]
            samplers: dict[str, Any] = {
                "seeded": partial(accelerate.SeedableRandomSampler, data_seed=seed),
                "generator": partial(RandomSampler, generator=torch.Generator().manual_seed(seed)),
                "in order": SequentialSampler,
            }
            batches = BatchSampler(samplers[sampling](data), 8, drop_last)
            shard = accelerate.BatchSamplerShard(batches, world_size, rank, **options)
            batches = accelerate.SkipBatchSampler(shard, skipped) if skipped else shard
            found.append(handed(DataLoader(data, batch_sampler=batches)))
        return found

    for length, world_size in itertools.product((1, 3, 8, 31, 32, 67), (1, 2, 4)):
        assert is_sealed(notes(length, world_size, [3])), (length, world_size)
    assert is_sealed(notes(67, 2, [3, 4])) == (sampling == "in order")  # ranks that were seeded otherwise
    together = 8 if "split_batches" in options else 16
    assert [fields["earlier"] for fields in notes(67, 2, [3], skipped=2)] == [2 * together] * 2


def test_shard_of_what_is_dealt_already_is_no_whole_epoch() -> None:
    accelerate: Any = pytest.importorskip("accelerate.data_loader", reason="Accelerate is not installed")
    data: Any = range(64)
    shards = [
        accelerate.BatchSamplerShard(BatchSampler(DistributedSampler(data, 2, rank), 4, False), 2, rank)
        for rank in range(2)
    ]
    ranks = [handed(DataLoader(data, batch_sampler=shard)) for shard in shards]
    assert [fields["samples"] for fields in ranks] == [16, 16]
    assert not is_sealed(ranks)
    weighted = BatchSampler(WeightedRandomSampler([1.0] * 64, 64), 4, False)
    assert deal_of(DataLoader(data, batch_sampler=accelerate.BatchSamplerShard(weighted, 2, 0))) is None


# ------------------------------------------------------------------ under watch


@pytest.fixture
def watched(request: pytest.FixtureRequest) -> Watched:
    return Watched(request)


def used(ids: Iterable[int]) -> str:
    return tally_of(list(ids)).digest().hex()


def test_passes_are_noted_as_far_as_they_were_handed_out(watched: Watched) -> None:
    sampler = stock()
    loader = DataLoader(Rows(), 3, sampler=sampler)
    sampler.set_epoch(4)
    watched.train(loader, limit=2)
    assert not watched.notes  # nobody knows yet that no more will come
    expected = [used(list(sampler)[:6])]
    sampler.set_epoch(5)
    watched.train(loader)
    for batch in loader:  # an evaluation
        assert len(batch["x"]) > 0
    watched.watch.finish()
    assert watched.epochs == [(4, 6, True), (5, 10, False)]
    assert [note["digest"] for note in watched.notes] == [*expected, used(sampler)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_stay_and_draw_ahead(watched: Watched) -> None:
    sampler = stock()
    loader = DataLoader(Rows(), 2, sampler=sampler, num_workers=2, prefetch_factor=4, persistent_workers=True)
    try:
        watched.train(loader, limit=3)
        watched.train(loader)
        watched.watch.finish()
    finally:
        assert loader._iterator is not None
        cast(Any, loader._iterator)._shutdown_workers()
    assert watched.epochs == [(0, 6, True), (1, 10, False)]
    assert [note["digest"] for note in watched.notes] == [used(list(sampler)[:6]), used(sampler)]
    assert [(topic[:12], key) for topic, key, _ in watched.told] == [("data team/2/", 0), ("data team/2/", 1)]


def test_loaders_made_for_each_epoch_are_one(watched: Watched) -> None:
    data = Rows()
    for _ in range(3):  # nobody but the loop has them
        watched.train(DataLoader(data, 2, sampler=stock(shuffle=True)))
    assert watched.epochs == [(0, 10, False), (1, 10, False), (2, 10, False)]
    (name,) = {topic for topic, _, _ in watched.told}
    assert [(topic, key) for topic, key, _ in watched.told] == [(name, key) for key in range(3)]
    assert ["set_epoch" in (value["order"] or "") for _, _, value in watched.told] == [False, True, True]


def test_a_loop_that_other_ranks_do_not_have_changes_no_name_of_another(watched: Watched) -> None:
    def trained(*loaders: DataLoader[Any]) -> list[tuple[str, int]]:
        before = len(watched.told)
        for loader in loaders:
            for _ in loader:
                watched.recorder.step += 1
        return [(topic, key) for topic, key, _ in watched.told[before:]]

    ((name, _),) = trained(DataLoader(Rows(), 2))
    for _ in DataLoader(Stream(8), 2):  # as the rank has it that reads for all
        watched.recorder.step += 1
    assert watched.told[-1][0].endswith(".0")
    assert watched.told[-1][0] != name
    kept = [DataLoader(Rows(), 2), DataLoader(Rows(), 3)]
    assert trained(*kept, kept[0]) == [(name, 1), (name, 2), (name, 3)]  # whatever it is given: one after the other


def test_a_loader_keeps_the_name_that_it_has_got_in_another_line(watched: Watched) -> None:
    """As where a loop asks for the next batch, and begins anew where there is none."""
    loader = DataLoader(Rows(), 5)
    batches = iter(loader)
    for _ in range(10):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        watched.step(batch)
    names, keys, values = zip(*watched.told, strict=True)
    assert (len({*names}), keys) == (1, (0, 1, 2))
    assert [value["site"] == values[0]["site"] for value in values] == [True, False, False]


def test_passes_of_one_line_that_are_open_at_once_have_names_of_their_own(watched: Watched) -> None:
    data, more = DataLoader(Rows(), 2), DataLoader(Rows(), 3)
    for limit in (None, 3, None):
        for pair in itertools.islice(zip(data, more, strict=False), limit):
            watched.step(pair)
    names = [topic for topic, _, _ in watched.told]
    assert names == names[:2] * 3
    assert [name[-2:] for name in names[:2]] == [".0", ".1"]
    assert names[0][:-2] == names[1][:-2]
    assert [key for _, key, _ in watched.told] == [0, 0, 1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("workers", "step"), [(0, 1), (1, 1), (2, 1), (2, 3)])
def test_workers_that_read_the_same_stream_are_told_of(watched: Watched, workers: int, step: int) -> None:
    """Also where the first step comes after some batches."""
    for number, batch in enumerate(DataLoader(Stream(9), 3, num_workers=workers), 1):
        if number % step == 0:
            watched.step(batch)
    cut = DataLoader(Rows(), 4, num_workers=workers)
    watched.train(cut)
    assert [value["is_twice"] for _, _, value in watched.told] == [workers > 1, False]


def test_a_pass_is_complete_with_its_last_batch_though_nobody_asks_for_another(watched: Watched) -> None:
    """As of the second of two loaders that a loop takes together, or where a loop counts the batches."""
    first, second = stock(shuffle=True), stock(shuffle=True, seed=9)
    loaders = [DataLoader(Rows(), 2, sampler=sampler) for sampler in (first, second)]
    for epoch in range(2):
        first.set_epoch(epoch)
        for pair in zip(*loaders, strict=False):
            watched.step(pair)
    counted = DataLoader(Rows(), 2, sampler=stock(shuffle=True))
    for _ in range(2):
        watched.train(counted, len(counted))
    watched.watch.finish()
    assert ["set_epoch" in (value["order"] or "") for _, _, value in watched.told] == [False] * 3 + [True, False, True]
    assert [value["before"] for _, _, value in watched.told] == [None, None, 5, 5, None, 5]
    assert watched.epochs == [(0, 10, False), (1, 10, False)]


def test_how_long_the_last_pass_was_is_told_where_this_one_should_be_as_long(watched: Watched) -> None:
    own = [[*range(first, first + 4)] for first in range(0, 20, 4)]  # a list of batches: of any length the next time
    passes = [
        (DataLoader(Rows(), 2), None, (10, None)),
        (DataLoader(Rows(), 5), None, (4, 10)),
        (DataLoader(Rows(), 2), 3, (10, 4)),
        (DataLoader(Rows(), 2), None, (10, None)),  # the last one was left early, and so may this one be
        (DataLoader(Rows(), batch_sampler=own), None, (5, None)),
        (DataLoader(Stream(4), 2), None, (2, None)),  # it says 4 and has 9
        (DataLoader(Rows(), 2), None, (10, 5)),
    ]
    for loader, limit, _ in passes:
        watched.train(loader, limit)
    told = [(value["batches"], value["before"]) for _, _, value in watched.told]
    assert told == [each for _, _, each in passes]


def test_loaders_that_nobody_keeps_within_their_pass(watched: Watched) -> None:
    data = Rows()
    for _ in range(2):
        for batch in DataLoader(data, 2, sampler=stock(shuffle=True)):
            watched.step(batch)
    assert ["set_epoch" in (value["order"] or "") for _, _, value in watched.told] == [False, True]


def test_of_two_loaders_that_take_turns_the_first_is_followed(watched: Watched) -> None:
    data = Rows()
    samplers = [stock(), stock(seed=9)]
    loaders = [DataLoader(data, 2, sampler=sampler) for sampler in samplers]
    expected = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        expected.append(used(samplers[0]))
        for pair in zip(*loaders, strict=False):
            for batch in pair:
                watched.step(batch)
    watched.train(DataLoader(Rows(), 2, sampler=stock()))  # another dataset
    assert watched.epochs == [(0, 10, False), (1, 10, False)]
    assert [note["digest"] for note in watched.notes] == expected
    assert not [value["order"] for _, _, value in watched.told if value["order"]]


def test_each_loader_over_a_dataset_has_an_order_of_its_own(watched: Watched) -> None:
    data = Rows()
    stays, moves = stock(shuffle=True), stock(shuffle=True, seed=9)
    loaders = [DataLoader(data, 2, sampler=sampler) for sampler in (stays, moves)]
    for epoch in range(2):
        moves.set_epoch(epoch)
        for loader in loaders:
            watched.train(loader)
    assert ["set_epoch" in (value["order"] or "") for _, _, value in watched.told] == [False, False, True, False]


def test_a_pass_that_was_left_early_is_not_compared(watched: Watched) -> None:
    loader = DataLoader(Rows(), 2, sampler=stock(shuffle=True))
    for limit in (None, 2, None):
        watched.train(loader, limit)
    assert ["set_epoch" in (value["order"] or "") for _, _, value in watched.told] == [False, True, False]


def test_loader_that_goes_on_from_its_state_says_how_much_it_skips(watched: Watched) -> None:
    loader = DataLoader(Rows(), 2, sampler=stock())
    iterator: Any = iter(loader)
    iterator._sampler_iter = itertools.islice(iterator._sampler_iter, 3, None)  # as torchdata's StatefulDataLoader does
    iterator._num_yielded = 3
    watched.train(iterator)
    (note,) = watched.notes
    assert (note["samples"], note["earlier"], note["left_early"]) == (4, 12, False)
    watched.train(loader)
    assert [(value["batches"], value["before"]) for _, _, value in watched.told] == [(5, None), (5, 5)]


def test_datasets_that_cannot_be_referred_to_are_not_kept(watched: Watched) -> None:
    watched.train(DataLoader(cast(Any, [torch.ones(3).cumsum(0) * n for n in range(20)]), 2, sampler=stock()))
    assert watched.epochs == [(0, 10, False)]
    assert [one.data() for one in watched.watch._whole] == [None]


def test_a_loader_that_cannot_tell_its_length_is_used_all_the_same(watched: Watched) -> None:
    class Endless(Stream):
        def __len__(self) -> int:
            raise RuntimeError("nobody knows")

    watched.train(DataLoader(Endless(9), 3))
    assert [(value["batches"], value["before"]) for _, _, value in watched.told] == [(None, None)]
    assert watched.recorder.step == 3


def test_asking_for_lengths_leaves_no_trace(watched: Watched) -> None:
    loader = DataLoader(Stream(4), 2)  # it says 4 and has 9: torch warns, if it was asked
    for _ in range(2):
        watched.train(loader)
    assert [value["batches"] for _, _, value in watched.told] == [2, 2]


def test_ranks_that_compute_a_layer_together_may_share_samples() -> None:
    def model(shape: tuple[int, ...]) -> nn.Module:
        layer = nn.Linear(2, 2)
        for param in layer.parameters():
            cast(Any, param).device_mesh = SimpleNamespace(ndim=len(shape), size=lambda: int(torch.Size(shape).numel()))
        return nn.Sequential(layer)

    assert not may_share_samples(nn.Linear(2, 2), 4)
    for shape in ((4,), (2,), (2, 2)):
        assert may_share_samples(model(shape), 4)
        sharded = model(shape)
        cast(Any, sharded).set_requires_gradient_sync = lambda _: None
        assert may_share_samples(sharded, 4) == (shape != (4,))


def test_samples_that_may_be_shared_are_not_compared(watched: Watched) -> None:
    for watched.may_share in (False, True):
        watched.train(DataLoader(Rows(), 5))
    assert [bool(value["first"]) for _, _, value in watched.told] == [True, False]
