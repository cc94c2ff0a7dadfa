"""Ranks that do not share a dataset out, by what some of its samples hold: said where it is so, and of nobody else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_training_findings import SITE, Tell, is_quiet, loads, noted
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.observe.data_facts import MARKS, unshared
from lockstep.observe.sample_marks import Marks, marks_of

N = 240
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(X, torch.arange(N) % 3)

Make = Callable[[int, int], DataLoader[Any]]  # of a rank, of so many


def walk(loader: DataLoader[Any], limit: int | None = None) -> dict[str, Any] | None:
    """What the first pass over `loader` tells, or the first batches of it."""
    marks = marks_of(loader)
    if marks is None:
        return None
    source: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for number, ids in enumerate(list(source)[:limit], 1):
        wanted = marks.draw(ids) <= number
        fetched = [loader.dataset[one] for one in ids] if isinstance(ids, list) else loader.dataset[ids]
        assert marks.see(number, loader.collate_fn(fetched) if fetched != [] else fetched) == wanted
    marks.is_done = limit is None
    told = marks.told()
    assert (marks_of(loader) is None) == marks.is_done  # in the next pass
    return json.loads(json.dumps({**told, "first": ""}))


def said(make: Make, ranks: int, limit: int | None = None) -> str:
    told = {}
    for rank in range(ranks):
        torch.manual_seed(rank)
        random.seed(rank)
        told[rank] = walk(make(rank, ranks), limit)
    values = {rank: value for rank, value in told.items() if value is not None}
    return ": ".join(unshared(values, ranks) or ()) if values else ""


class Items(Dataset[Any]):
    """Whatever `item` makes of a number."""

    def __init__(self, item: Callable[[int], Any], length: int = N) -> None:
        self.item, self.length = item, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Own(Sampler[Any]):
    """The user's: ids, or batches of them."""

    def __init__(self, ids: Sequence[Any]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ids)


def order(seed: int, length: int = N) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


def shuffled(data: Any, size: int | None = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, size, shuffle=True, **options)


TOKENS = [torch.randint(1, 50, (5 + n * 7 % 23,), generator=torch.Generator().manual_seed(n)) for n in range(N)]


def padded(items: list[Tensor]) -> dict[str, Any]:
    ids = pad_sequence(items, batch_first=True)
    return {"ids": ids, "mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def left_padded(items: list[Tensor]) -> Tensor:
    return pad_sequence([item.flip(0) for item in items], batch_first=True).flip(1)


def image(number: int) -> Tensor:
    return torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(number))


def flipped(number: int) -> tuple[Tensor, int]:
    return image(number).flip(-1) if random.random() < 0.5 else image(number), number % 3


def columns(items: Any) -> Any:
    return tuple(zip(*items, strict=True))


WHOLE: dict[str, Make] = {
    "tensors": lambda *_: shuffled(DATA),
    "last batches left out": lambda *_: shuffled(DATA, 32, drop_last=True),
    "one by one": lambda *_: shuffled(DATA, None),
    "half precision": lambda *_: shuffled(TensorDataset(X.bfloat16())),
    "dicts": lambda *_: shuffled(Items(lambda n: {"number": n, "in": {"x": X[n]}, "y": n % 3})),
    "nested": lambda *_: shuffled(Items(lambda n: (X[n].numpy(), (n % 3, [np.float32(n), "a"])))),
    "text": lambda *_: shuffled(Items(lambda n: f"story {n} of {n * n}")),
    "text in order": lambda *_: DataLoader(Items(lambda n: f"story {n} of {n * n}"), 8),
    "tokens": lambda *_: shuffled(TOKENS, collate_fn=padded),
    "tokens, padded before them": lambda *_: shuffled(TOKENS, collate_fn=left_padded),
    "targets of any size": lambda *_: shuffled(
        Items(lambda n: (image(n), {"boxes": torch.full((1 + n % 3, 4), n / 7)})), 6, collate_fn=columns
    ),
    "some are flipped": lambda *_: shuffled(Items(flipped)),
    "part for training": lambda *_: shuffled(Subset(DATA, order(1)[:200])),
    "part of a part": lambda *_: shuffled(Subset(Subset(DATA, order(1)[:200]), range(0, 200, 2))),
    "dealt to one rank": lambda rank, _: DataLoader(DATA, 8, sampler=DistributedSampler(DATA, 1, 0, seed=rank)),
    "own order": lambda rank, _: DataLoader(DATA, 8, sampler=Own(order(rank))),
    "own order, of tensors": lambda rank, _: DataLoader(DATA, 8, sampler=Own(cast(Any, torch.tensor(order(rank))))),
}


def dealt(seed: int, rank: int, ranks: int) -> list[int]:
    return order(seed)[rank::ranks]


PARTS: dict[str, Make] = {
    "own parts of own orders": lambda rank, ranks: DataLoader(DATA, 8, sampler=Own(dealt(rank, rank, ranks))),
    "batches": lambda rank, ranks: DataLoader(
        DATA, batch_sampler=[dealt(rank, rank, ranks)[at : at + 8] for at in range(0, N // ranks - 7, 8)]
    ),
    "subsets": lambda rank, ranks: shuffled(Subset(DATA, dealt(rank, rank, ranks))),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", WHOLE)
def test_ranks_that_read_all_of_one_dataset_are_named(case: str, ranks: int) -> None:
    text = said(WHOLE[case], ranks)
    assert text.startswith(f"ranks each read the whole dataset: ranks {', '.join(map(str, range(ranks)))}: each goes")
    assert f"every sample counts {ranks} times. Give the loader sampler=DistributedSampler" in text


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("case", PARTS)
def test_ranks_that_take_parts_of_orders_of_their_own_are_told_so(case: str, ranks: int) -> None:
    text = said(PARTS[case], ranks)
    assert text.startswith("ranks share out the samples by different orders: of 64 samples that were looked at ")
    assert not said(PARTS[case], ranks, limit=3)  # nobody knows yet what the rest will be


def test_it_is_said_within_the_pass() -> None:
    """Of a long one a part is enough, if it is known by its sampler that it will be all."""
    data = TensorDataset(torch.randn(8000, 4, generator=torch.Generator().manual_seed(5)))
    assert not said(lambda *_: shuffled(data, 16), 2, limit=20)
    assert "all 8000 samples" in said(lambda *_: shuffled(data, 16), 2, limit=300)


def test_what_was_found_in_a_pass_that_was_left_early_holds() -> None:
    def make(rank: int, _: int) -> DataLoader[Any]:
        loader = shuffled(DATA)
        for _ in range(8):
            walk(loader, 4)
        return loader

    assert "all 240 samples" in said(make, 2, limit=1)


def test_only_those_that_read_one_dataset_are_named() -> None:
    own = TensorDataset(torch.randn(N, 4, generator=torch.Generator().manual_seed(9)))
    assert ": ranks 0, 2: " in said(lambda rank, _: shuffled(own if rank == 1 else DATA), 3)


def noisy(rank: int) -> TensorDataset:
    return TensorDataset(torch.randn(N, 4, generator=torch.Generator().manual_seed(100 + rank)), torch.arange(N) // 80)


def half_shared(rank: int) -> TensorDataset:
    return TensorDataset(torch.cat([X[:60], noisy(rank)[60:][0]]), torch.arange(N) // 80)


def numbered(rank: int) -> Items:
    return Items(lambda n: {"number": n, "x": noisy(rank)[n][0], "y": n // 80})


def padded_parts(rank: int, ranks: int, length: int = 239) -> list[int]:
    whole = order(7, length)
    return (whole + whole[: -length % ranks])[rank::ranks]


FINE: dict[str, Make] = {
    "rows of a file of their own": lambda rank, _: shuffled(noisy(rank)),
    "a quarter is in all files": lambda rank, _: shuffled(half_shared(rank)),
    "numbers and classes as in the others": lambda rank, _: shuffled(numbered(rank)),
    "numbers alone": lambda *_: shuffled(cast(Any, range(N))),
    "equal samples": lambda *_: shuffled(TensorDataset(torch.zeros(N, 4), torch.arange(N) % 3)),
    "few different ones": lambda *_: shuffled(TensorDataset(torch.tensor([[0.0, 1], [1, 0]]).repeat(N // 2, 1))),
    "made up for each": lambda *_: shuffled(Items(lambda n: (torch.randn(4), n % 3))),
    "one batch, again and again": lambda *_: shuffled(Subset(DATA, range(16)), 16),
    "drawn by weight": lambda *_: DataLoader(DATA, 8, sampler=WeightedRandomSampler([1.0] * N, N)),
    "drawn with replacement": lambda *_: DataLoader(DATA, 8, sampler=RandomSampler(DATA, replacement=True)),
    "own drawing with replacement": lambda *_: DataLoader(DATA, 8, sampler=Own(torch.randint(N, (N,)).tolist())),
    "own drawing of few": lambda rank, _: DataLoader(DATA, 8, sampler=Own(order(rank)[:30])),
    "parts of one order": lambda rank, ranks: shuffled(Subset(DATA, dealt(7, rank, ranks)), drop_last=True),
    "parts of one order, filled up": lambda *of: DataLoader(DATA, 8, sampler=Own(padded_parts(*of))),
    "each the same part of it": lambda rank, _: DataLoader(DATA, 8, sampler=Own(order(rank % 2)[:100])),
    "pairs as ids": lambda *_: DataLoader(Items(lambda _: X[0]), 8, sampler=Own([["k", n] for n in range(N)])),
    "parts by name": lambda *_: DataLoader(Subset(Items(lambda _: X[0]), cast(Any, [["a"], ["b", "c"]] * 40)), 8),
    "ids of nothing": lambda *_: DataLoader(DATA, batch_sampler=[[], [1, 2], []]),
    "stream": lambda *_: DataLoader(cast(Any, Stream()), 8),
    "sparse": lambda *_: shuffled(Items(lambda n: X[n]), collate_fn=lambda xs: torch.stack(xs).to_sparse()),
    "statistics of the batch": lambda *_: shuffled(Items(lambda n: X[n]), collate_fn=lambda xs: torch.stack(xs).mean()),
    "no samples": lambda *_: DataLoader(TensorDataset(torch.zeros(0, 4)), 8),
}


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", FINE)
def test_nothing_is_said_of_ranks_with_data_of_their_own_and_of_what_may_be_meant(case: str, ranks: int) -> None:
    assert not said(FINE[case], ranks)


def test_equal_first_batches_are_told_of_elsewhere() -> None:
    told = {rank: walk(WHOLE["text in order"](rank, 2)) for rank in range(2)}
    values = {rank: {**(value or {}), "first": "ab"} for rank, value in told.items()}
    assert unshared(values, 2) is None


def test_workers_that_hand_out_what_comes_first_are_not_looked_at() -> None:
    loader: Any = DataLoader(DATA, 8, shuffle=True, num_workers=2, in_order=False)
    assert marks_of(loader) is None


def test_so_many_are_looked_at_and_no_more() -> None:
    for length in (1, 2, 40, 64, 65, 1000):
        marks = Marks(DataLoader(TensorDataset(torch.arange(length) / 7), 3))
        assert len(marks._samples) == min(length, MARKS)


def test_ranks_that_read_one_dataset_whole_are_named_once_all_have_told() -> None:
    marks = {str(sample): 7 * sample for sample in range(64)}
    value = {"length": 64, "scope": "64 ab", "drawn": 0, "has_all": True, "marks": marks, "first": "", "site": SITE}

    def tells(team: str = "world/3", ranks: int = 3) -> Tell:
        return lambda facts, rank: rank < ranks and facts.tell(f"samples {team}/0", 0, value)

    [note] = noted(tells())
    head = "lockstep: DATA: ranks each read the whole dataset.\n  in the loop at train.py:9 main\n  ranks 0, 1, 2: each"
    assert note.text.startswith(head)
    assert (note.kind, note.culprits) == ("data", ())
    assert is_quiet(tells(ranks=2))
    assert "ranks 0, 1: each goes over all 64 samples" in noted(tells(ranks=2), gone=[2])[0].text
    assert is_quiet(tells("hand/3"))


def test_ranks_that_left_out_other_numbers_of_batches_are_named() -> None:
    [note] = noted(loads([{}, {"begun": 4}, {}]))
    assert note.text.startswith(
        "lockstep: DATA: ranks have left out other numbers of batches.\n  in pass 2 of the loop"
    )
    assert "Its first step ended with batch 1 on ranks 0, 2; 4 on rank 1: go on from one batch on all." in note.text


def test_ranks_that_take_the_batches_of_one_loader_in_turns_are_left_alone() -> None:
    assert is_quiet(loads([{"first": "x", "begun": 1}, {"first": "x", "begun": 2}, {"first": "x", "begun": 3}]))
    assert len(noted(loads([{"first": "x", "begun": 2}] * 3))) == 1
