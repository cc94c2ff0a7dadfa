"""Gradients of a stock torch program that are not finite: the rank, the step and the parameters, whenever they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_programs import Case, is_named, small, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from far_tensors import Far, HostNumber, Spoilt
from lockstep.observe import finite_later, torch_gradients
from lockstep.observe.torch_backward import BACKWARDS


def nan_loss(rank: int, _: Path) -> None:
    bad = torch.full((3, 4), float("nan"))
    train(DistributedDataParallel(small()), data=lambda step: bad if (rank, step) == (1, 3) else torch.ones(3, 4))


_held: list[torch.optim.Optimizer] = []


def nan_in_backward(rank: int, _: Path, bad_step: int = 3, steps: int = 7) -> None:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        out = model(torch.ones(3, 4))
        ((out * 0).sqrt() if (rank, step) == (1, bad_step) else out).sum().backward()
        optimizer.step()
    _held[:] = [optimizer]  # as a script does that has it in no function


def nan_in_backward_late(rank: int, folder: Path) -> None:
    """Past the steps in which all gradients are looked at: seen by the loss of the step after."""
    nan_in_backward(rank, folder, 13, 17)


def nan_in_last_backward(rank: int, folder: Path) -> None:
    nan_in_backward(rank, folder, 13, 14)


def nan_parameters(rank: int, _: Path) -> None:
    """After a step that only makes the optimizer's state, as torch's distributed checkpoints make one to load it."""
    module = small()
    torch.nn.init.constant_(module[2].weight, float("nan"))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    _held[:] = [optimizer]


def never_filled(rank: int, _: Path) -> None:
    """A model that nobody has told of before its first step."""
    with torch.device("meta"):
        model = small()
    fully_shard(model)
    model.to_empty(device="cpu")
    for param in model.parameters():
        torch.nn.init.constant_(param, float("nan"))
    model[0].reset_parameters()
    train(model, 3)


def far(rank: int, *, is_sharded: bool = False, hides: bool = False) -> None:
    """As on a device, where no loss is known in its step; past those in which all gradients are looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BACKWARDS, "_plain", Far)
        patch.setattr(finite_later, "host_number", lambda: HostNumber(is_near=True))
        patch.setattr(torch_gradients, "_is_probe_faulty", lambda: False)
        module = small()
        model: Any = fully_shard(module) or module if is_sharded else DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(40):
            is_here = (rank, step) == (1, 20)
            optimizer.zero_grad()
            out = model(torch.full((3, 4), float("nan") if is_here and not hides else 1.0))
            loss = out.sum().as_subclass(Far)
            torch.autograd.backward(Spoilt.apply(loss, float("nan")) if is_here and hides else loss)  # type: ignore[no-untyped-call]
            optimizer.step()
        _held[:] = [optimizer]


def far_loss(rank: int, _: Path) -> None:
    far(rank)


def far_sharded_loss(rank: int, _: Path) -> None:
    far(rank, is_sharded=True)


def far_gradient(rank: int, _: Path) -> None:
    far(rank, hides=True)


def far_sharded_gradient(rank: int, _: Path) -> None:
    far(rank, is_sharded=True, hides=True)


WRONG: dict[Case, tuple[str, ...]] = {
    nan_loss: ("NOT FINITE gradients in step 4.  Culprit: rank 1", "the loss is not finite at", "'0.weight' (28 NaN"),
    nan_in_backward: ("NOT FINITE gradients in step 4.  Culprit: rank 1", "not finite before averaging"),
    nan_in_backward_late: (
        "NOT FINITE gradients in step 14.  Culprit: rank 1",
        "before averaging",
        "'2.weight' (21 NaN",
    ),
    nan_in_last_backward: ("NOT FINITE gradients in step 14.  Culprit: rank 1", "before averaging", "(21 NaN"),
    far_loss: ("NOT FINITE gradients in step 21.  Culprit: rank 1", "rank 1: the loss is not finite at"),
    far_sharded_loss: ("NOT FINITE gradients in step 21.  Culprit: rank 1", "rank 1: the loss is not finite at"),
    far_gradient: ("NOT FINITE gradients in step 21.  Culprit: rank 1", "rank 1: gradients are not finite before"),
    far_sharded_gradient: ("NOT FINITE gradients in step 21.", "on which rank it began cannot be told"),
    nan_parameters: ("NOT FINITE parameters before step 2.", "before the backward at", "'2.weight' (21 NaN of 21"),
    never_filled: ("NOT FINITE parameters before step 1.", "to_empty()", "parameters: '2.weight' ("),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_is_not_finite_is_named(case: Case, tmp_path: Path) -> None:
    is_named(case, WRONG[case], tmp_path)
