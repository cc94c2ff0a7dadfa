"""Stock DataLoaders under a guard, on real processes: who is fed wrong is named, with the loop and the pass."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded_programs import Case, is_left_alone, is_named, small
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

from lockstep.comm.waiting import wait_until
from lockstep.observe.sights import FlightRecord, flight_path

EPOCHS, STEP = 3, 2  # the guards are met in that step of the second epoch


def batches_of_epoch(rank: int, epoch: int, odd: int, cut: int) -> DataLoader[Any]:
    """Each rank cuts its part itself; since the second epoch `odd` cuts off so many samples more."""
    samples = range(rank, 48 - 2 * cut * (rank == odd and epoch > 0), 2)
    return DataLoader(Subset(TensorDataset(torch.randn(48, 4)), samples), 4)


def cut(rank: int, folder: Path, odd: int = 1, off: int = 4) -> None:
    """What ends an epoch is as large as the gradients: Gloo takes the one for the other."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    size = sum(param.numel() for param in model.parameters())
    for epoch in range(EPOCHS):
        for number, (x,) in enumerate(batches_of_epoch(rank, epoch, odd, off)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if (epoch, number) == (1, STEP):
                statuses = [FlightRecord(flight_path(folder, each)).status for each in range(2)]
                assert wait_until(lambda: all(b'"before":6' in status() for status in statuses), 20)  # noqa: B023
        dist.all_reduce(torch.ones(size))


def cut_on_rank_0(rank: int, folder: Path) -> None:
    cut(rank, folder, odd=0)


def train(loader: Iterable[Any], sampler: Any, epochs: int, counts: bool) -> None:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        if counts:
            sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


def no_epoch_on_one(rank: int, _: Path) -> None:
    data = TensorDataset(torch.randn(96, 4))
    sampler = DistributedSampler(data)
    train(DataLoader(data, 8, sampler=sampler), sampler, EPOCHS, counts=rank == 0)


def other_splits(rank: int, _: Path, seed: int | None = None) -> None:
    generator = torch.Generator().manual_seed(rank if seed is None else seed)
    part = random_split(TensorDataset(torch.randn(96, 4)), [90, 6], generator)[0]
    sampler = DistributedSampler(part)
    train(DataLoader(part, 8, sampler=sampler), sampler, 1, counts=True)


LENGTHS = ("MISMATCH in step 12, group WORLD.", "batches in pass 2 of the loop at ", "give all ranks as many batches")
WRONG: dict[Case, tuple[str, ...]] = {
    cut: (*LENGTHS, "Culprit: rank 1", "6 on rank 0; 5 (6 before) on rank 1"),
    cut_on_rank_0: (*LENGTHS, "Culprit: rank 0", "5 (6 before) on rank 0; 6 on rank 1"),
    no_epoch_on_one: ("the order of the last pass. Culprit: rank 1", "rank 1 by seed 0 in epoch 0 of 96 samples"),
    other_splits: ("DATA: ranks share out the samples by different rules", "of 90 samples (digest "),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_is_wrong_is_named(case: Case, tmp_path: Path) -> None:
    is_named(case, WRONG[case], tmp_path)


def both_split_alike(rank: int, folder: Path) -> None:
    other_splits(rank, folder, seed=3)


def test_what_is_right_is_left_alone(tmp_path: Path) -> None:
    is_left_alone(both_split_alike, tmp_path)
