"""Phases of training one after the other, where one rank keeps what another has let go of: nothing is said of that.

When Python lets go of a model or an optimizer is each rank's own affair, and often that of its collector.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded_programs import Case, is_left_alone, small, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

_KEPT: list[tuple[Any, ...]] = []
_PHASES = 3


def keep(rank: int, *what: Any) -> None:
    if rank == 1:
        _KEPT.append(what)


def let_go(rank: int) -> None:
    if rank == 0:
        gc.collect()


def models(rank: int, _: Path) -> Any:
    trained = []
    for phase in range(_PHASES):
        model = DistributedDataParallel(small(norm=phase == 1))
        optimizer = torch.optim.AdamW(model.parameters())
        keep(rank, model, optimizer)
        trained += train(model, optimizer=optimizer)
        del model, optimizer
        let_go(rank)
    return trained


def optimizers(rank: int, _: Path) -> Any:
    model = DistributedDataParallel(small(norm=True))
    for _phase in range(_PHASES):
        optimizer = torch.optim.AdamW(model.parameters())
        keep(rank, optimizer)
        train(model, optimizer=optimizer)
        del optimizer
        let_go(rank)
    return [param.detach().clone() for param in model.parameters()]


def one_for_each_step(rank: int, _: Path) -> Any:
    model = DistributedDataParallel(small())
    for step in range(8):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (step + 1))
        keep(rank, optimizer)
        train(model, 1, optimizer)
        del optimizer
    return [param.detach().clone() for param in model.parameters()]


def sharded_models(rank: int, _: Path) -> Any:
    trained = []
    for _phase in range(_PHASES):
        model: Any = small()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        keep(rank, model, optimizer)
        pieces: list[Any] = train(model, optimizer=optimizer)
        trained += [piece.full_tensor() for piece in pieces]
        del model, optimizer, pieces
        let_go(rank)
    return trained


def averaged_by_hand(rank: int, _: Path) -> Any:
    trained = []
    for _phase in range(_PHASES):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keep(rank, model, optimizer)
        for _step in range(6):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
        trained += [param.detach().clone() for param in model.parameters()]
        del model, optimizer
        let_go(rank)
    return trained


def one_kind_after_the_other(rank: int, folder: Path) -> Any:
    return [*models(rank, folder), *averaged_by_hand(rank, folder), *sharded_models(rank, folder)]


def groups(rank: int, _: Path) -> Any:
    trained = []
    for _phase in range(_PHASES):
        group = dist.new_group()
        model = DistributedDataParallel(small(), process_group=group)
        keep(rank, model, group)
        trained += train(model)
        dist.all_reduce(torch.ones(3), group=group)
        del model, group
        let_go(rank)
    return trained


def loaders(rank: int, _: Path) -> Any:
    trained = []
    for _phase in range(_PHASES):
        samples = TensorDataset(torch.randn(24, 4))
        loader = DataLoader(samples, batch_size=3, sampler=DistributedSampler(samples))
        batches = iter(loader)
        model = DistributedDataParallel(small())
        keep(rank, model, loader, batches)
        trained += train(model, 4, data=lambda _, batches=batches: next(batches)[0])
        del model, samples, loader, batches
        let_go(rank)
    return trained


_CASES = (
    models,
    optimizers,
    one_for_each_step,
    sharded_models,
    averaged_by_hand,
    one_kind_after_the_other,
    groups,
    loaders,
)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.__name__)
def test_nothing_is_said_of_it(case: Case, tmp_path: Path) -> None:
    is_left_alone(case, tmp_path)
