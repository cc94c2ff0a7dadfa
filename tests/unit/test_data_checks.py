"""Samples, order and lengths as the ranks say they are: what is wrong is named, what is usual is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data import DistributedSampler as TorchDistributedSampler

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.errors import DataError
from lockstep.observe.data_checks import DataCheck, DataWarning, batch_digest, batches_of, order_of, rule_of
from lockstep.observe.data_facts import (
    PassFacts,
    different_lengths,
    different_rules,
    equal_data,
    same_order,
)
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

DATA = TensorDataset(torch.arange(41.0), torch.arange(41) % 3)

# ------------------------------------------------------------------ pure


def test_equal_first_batches_name_their_ranks() -> None:
    assert equal_data({0: "a", 1: "b", 2: "c"}) is None
    assert equal_data({0: "", 1: "", 2: "a"}) is None
    text = equal_data({0: "a", 1: "b", 2: "a", 3: "b", 4: "c"})
    assert text is not None
    assert text.startswith("ranks 0, 2 and ranks 1, 3 got the very same first batch")
    assert "DistributedSampler" in text


def test_lengths() -> None:
    assert different_lengths({0: 5, 1: 5, 2: None}, {0: 4}) is None
    assert different_lengths({0: None, 1: None}, {}) is None
    text = different_lengths({0: 5, 1: 4, 2: 5}, {})
    assert text is not None
    assert ": 5 on ranks 0, 2; 4 on rank 1." in text


def test_rules() -> None:
    assert different_rules({0: "seed 0", 1: "seed 0", 2: ""}) is None
    assert different_rules({0: "", 1: ""}) is None
    text = different_rules({0: "seed 0", 1: "seed 4", 2: "seed 0"})
    assert text is not None
    assert "ranks 0, 2 by seed 0, rank 1 by seed 4" in text


class _Drawing(TorchDistributedSampler[int]):
    """Deals as it likes."""

    def __iter__(self) -> Iterator[int]:
        return iter([self.seed] * len(self))


def test_rule_of_a_sampler_that_deals_to_all_ranks() -> None:
    def rule(sampler: Any, ranks: int = 2) -> str:
        return rule_of(DataLoader(DATA, 2, sampler=sampler), ranks)

    torchs = TorchDistributedSampler(DATA, 2, 0, seed=3)
    torchs.set_epoch(4)
    assert rule(torchs) == "seed 3 in epoch 4 of 41 samples"
    assert rule(torchs, ranks=4) == ""  # it deals to a half of them: the others may have another seed
    assert rule(TorchDistributedSampler(DATA, 2, 0, shuffle=False)) == "no shuffle of 41 samples"
    assert rule(lockstep.DistributedSampler(DATA, num_replicas=2, rank=0, seed=5)) == "seed 5 of 41 samples"
    assert rule(_Drawing(DATA, 2, 0, seed=3)) == ""
    assert rule(WeightedRandomSampler([1.0] * 10, 10)) == ""
    assert rule(None) == ""


def test_rule_names_the_samples_that_are_dealt() -> None:
    """Ranks that have split a dataset with seeds of their own deal other samples by the same rule."""

    def rule(data: Any) -> str:
        return rule_of(DataLoader(data, 2, sampler=TorchDistributedSampler(data, 2, 0)), 2)

    splits = [random_split(DATA, [30, 11], torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)]
    same, again, other = map(rule, splits)
    assert same == again
    assert same.startswith("seed 0 in epoch 0 of 30 samples (digest ")
    assert rule(Subset(DATA, range(30))) not in (same, other)
    text = different_rules({0: same, 1: other})
    assert text is not None
    assert f"rank 0 by {same}, rank 1 by {other}" in text
    fewer = different_rules({0: rule(DATA), 1: rule(TensorDataset(torch.arange(40.0)))})
    assert fewer is not None
    assert "rank 0 by seed 0 in epoch 0 of 41 samples, rank 1 by seed 0 in epoch 0 of 40 samples" in fewer


class _Own(Sampler[Any]):
    """Of samples, or of batches."""

    def __init__(self, batch: int = 0, **about: Any) -> None:
        self.batch, self.epoch = batch, 2
        vars(self).update(about)

    def __len__(self) -> int:
        return 20 // max(1, self.batch)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_order_of_samplers_of_ones_own() -> None:
    """Who has an epoch and does not say whether it shuffles may not: that is in the first batch."""
    assert order_of(DataLoader(DATA, 4, sampler=_Own(shuffle=True)), "x") == "epoch 2, seed None"
    assert order_of(DataLoader(DATA, 4, sampler=_Own(shuffle=False)), "x") == ""
    assert order_of(DataLoader(DATA, 4, sampler=_Own(seed=3)), "x") == "epoch 2, seed 3, x"
    assert order_of(DataLoader(DATA, 4, sampler=_Own())) == ""
    assert order_of(DataLoader(DATA, batch_sampler=_Own(2)), "x") == "epoch 2, seed None, x"
    assert (
        order_of(DataLoader(DATA, batch_sampler=_Own(4)), "x") == ""
    )  # of five batches the first one is soon the same
    assert order_of(DataLoader(DATA, batch_sampler=_Own(2, next_epoch=3)), "x") == ""
    inner = BatchSampler(_Own(shuffle=True), 4, False)
    assert order_of(DataLoader(DATA, batch_sampler=inner), "x") == "epoch 2, seed None"


def test_order() -> None:
    a, b = PassFacts(5, "x", "epoch 0"), PassFacts(5, "x", "epoch 1")
    assert same_order(None, a) is None
    assert same_order(a, b) is None
    assert same_order(PassFacts(5, "x", ""), PassFacts(5, "x", "")) is None
    assert "set_epoch" in (same_order(a, a) or "")


def test_digest_of_any_batch() -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    mine = batch_digest({"x": x, "rest": [y, ("words", None)]})
    assert mine == batch_digest({"x": x.clone(), "rest": [y.clone(), ("others", None)]})
    assert mine != batch_digest({"x": x, "rest": [y.flip(0)]})
    assert batch_digest(["a", 3]) == ""
    assert batch_digest(torch.zeros(4, 3)) == ""
    assert batch_digest((torch.ones(2, 2).cumsum(1), torch.zeros(2))) == ""  # equal samples
    assert batch_digest(torch.empty(0, 3)) == ""
    assert batch_digest(torch.randn(1, 3)) != ""


def test_what_the_order_follows_from() -> None:
    def torchs(**options: Any) -> DataLoader[Any]:
        return DataLoader(DATA, 4, sampler=TorchDistributedSampler(DATA, 2, 0, **options))

    assert order_of(torchs()) == "epoch 0, seed 0"
    assert order_of(torchs(shuffle=False)) == ""
    assert order_of(DataLoader(DATA, 4, sampler=lockstep.DistributedSampler(DATA, 2, 0))) == ""
    assert order_of(DataLoader(DATA, 4), "first") == ""
    assert order_of(DataLoader(DATA, 8, shuffle=True), "first") == "first"
    assert order_of(DataLoader(DATA, 4, shuffle=True), "first") == ""  # few enough to come alike by chance
    assert order_of([1, 2, 3], "first") == ""
    assert order_of(DataLoader(TensorDataset(torch.arange(7)), 8, shuffle=True), "first") == ""

    class Shard(BatchSampler):  # as Accelerate's, to two ranks
        def __init__(self, batch_size: int, split_batches: bool) -> None:
            self.batch_sampler = BatchSampler(RandomSampler(DATA), batch_size, False)
            self.batch_size, self.split_batches = batch_size, split_batches
            vars(self)["num_processes"] = 2  # in Accelerate's words

    sharded = {(size, split): Shard(size, split) for size in (8, 16) for split in (False, True)}
    found = {what: order_of(DataLoader(DATA, batch_sampler=shard), "first") for what, shard in sharded.items()}
    assert found == {(8, False): "first", (8, True): "", (16, False): "first", (16, True): "first"}
    few = TensorDataset(torch.arange(6))
    assert order_of(DataLoader(few, sampler=TorchDistributedSampler(few, 2, 0))) == ""


class Stream(IterableDataset[Tensor]):
    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.length) + 100.0 * self.rank)


def test_lengths_that_are_not_known() -> None:
    assert batches_of(DataLoader(Stream(0, 3))) is None
    assert batches_of([1, 2]) == 2
    assert batches_of(iter([1])) is None

    class Unsized(Dataset[int]):
        def __len__(self) -> int:
            raise NotImplementedError

    assert batches_of(DataLoader(Unsized(), sampler=cast(Any, Unsized()))) is None


# ------------------------------------------------------------------ watching


def loader_of(comm: Communicator, kind: str) -> Iterable[Any]:
    sized: Dataset[Any] = DATA
    if kind == "no sampler":
        return DataLoader(sized, 5)
    if kind == "lengths":
        return DataLoader(TensorDataset(torch.arange(20.0) + 50 * comm.rank), 4 + comm.rank)
    if kind == "stream":
        return DataLoader(Stream(comm.rank, 5 + comm.rank), 2)
    if kind == "made up":
        return [(torch.zeros(4, 3), torch.zeros(4))] * 3
    if kind == "lockstep":
        return lockstep.DataLoader(sized, 5, sampler=lockstep.DistributedSampler(sized, comm=comm))  # type: ignore[attr-defined]
    sampler = TorchDistributedSampler(sized, comm.world_size, comm.rank, shuffle=kind != "in order")
    return DataLoader(sized, 5, sampler=sampler)


def epochs(comm: Communicator, kind: str, seek: bool = False, leave: bool = False, **options: Any) -> list[list[Any]]:
    watched = DataCheck(comm, **options).watch(loader_of(comm, kind))
    seen = []
    for epoch in range(3):
        if seek:
            watched.sampler.set_epoch(epoch)
        seen.append([])
        for batch in watched:
            seen[-1].append(batch[0].tolist())
            if leave:
                break
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no sampler", "got the very same first batch"),
        ("lengths", "different numbers of batches in this epoch: "),
        ("torch", "the order of the last one: call sampler.set_epoch"),
    ],
)
def test_faults_are_errors_where_strict(kind: str, words: str, world_size: int) -> None:
    with pytest.raises(RankFailed) as caught:
        run_threads(world_size, epochs, kind, strict=True)
    errors = caught.value.errors
    assert {rank: error.kind for rank, error in errors.items()} == dict.fromkeys(range(world_size), "DataError")
    assert all(words in error.message for error in errors.values())


def test_faults_are_warnings_said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, epochs, "no sampler")
        run_threads(2, epochs, "torch")
    assert [warning.category for warning in caught] == [DataWarning] * 4  # one of each on each rank
    assert caught[0].filename == __file__


SOUND: list[tuple[str, dict[str, Any]]] = [
    ("torch", {"seek": True}),
    ("torch", {"leave": True}),  # a look at the first batch, again and again
    ("in order", {}),
    ("lockstep", {}),
    ("stream", {}),
    ("made up", {}),
    ("lengths", {"may_differ": True}),
]


@pytest.mark.parametrize(("kind", "options"), SOUND)
def test_no_alarm(kind: str, options: dict[str, Any]) -> None:
    for seen in run_threads(3, epochs, kind, strict=True, **options):
        assert len(seen) == 3
        assert all(seen)


def test_a_watched_loader_is_the_loader() -> None:
    def one(comm: Communicator) -> list[Any]:
        loader: Any = loader_of(comm, "in order")
        watched = DataCheck(comm).watch(loader)
        assert len(watched) == len(loader)
        assert watched.batch_size == 5
        with pytest.raises(AttributeError):
            _ = watched.nonsense
        assert [batch[0].tolist() for batch in watched] == [batch[0].tolist() for batch in loader]
        return list(DataCheck(comm).watch([]))

    assert run_threads(2, one) == [[], []]


def test_the_position_of_a_watched_loader_is_what_was_handed_out() -> None:
    """Nothing is drawn ahead: a state saved after a batch goes on with the next one."""

    def one(comm: Communicator) -> None:
        loader: Any = loader_of(comm, "lockstep")
        batches = iter(DataCheck(comm).watch(loader))
        next(batches)
        state = loader.state_dict()
        rest = [batch[0].tolist() for batch in batches]
        again: Any = loader_of(comm, "lockstep")
        again.load_state_dict(state)
        assert [batch[0].tolist() for batch in again] == rest

    run_threads(2, one)


def test_strict_says_which_rank() -> None:
    def one(comm: Communicator) -> None:
        with pytest.raises(DataError, match=f"rank {comm.rank}: ranks 0, 1, 2 got the very same first batch"):
            next(iter(DataCheck(comm, strict=True).watch(loader_of(comm, "no sampler"))))

    run_threads(3, one)
