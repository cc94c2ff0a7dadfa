"""Several optimizers over what the ranks train: all of them are compared where they have all of a model together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded_programs import Case, is_left_alone, is_named, small
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SGD = torch.optim.SGD


def weights_and_biases(model: nn.Module, rate: float = 0.0) -> list[Any]:
    """One optimizer for each kind, as for Muon and AdamW."""
    weights = [param for param in model.parameters() if param.ndim > 1]
    biases = [param for param in model.parameters() if param.ndim == 1]
    return [SGD(weights, 0.1), SGD(biases, rate, momentum=0.9)]


def train(model: nn.Module, optimizers: list[Any], changed: Any = None, steps: int = 9) -> list[Tensor]:
    for step in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if changed is not None:
            changed(step)
    return [param.detach().clone() for param in model.parameters()]


# ------------------------------------------------------------------ what is wrong


def other_momentum(rank: int, _: Path) -> None:
    """Nothing of it is seen in the parameters."""
    model = DistributedDataParallel(small())
    optimizers = weights_and_biases(model)

    def change(step: int) -> None:
        if (step, rank) == (2, 1):
            optimizers[1].state[model.module[2].bias]["momentum_buffer"].mul_(1.5)

    train(model, optimizers, change)


def other_rate(rank: int, _: Path) -> None:
    model = DistributedDataParallel(small())
    train(model, weights_and_biases(model, 0.01 * (1 + rank)))


def later_rate(rank: int, _: Path) -> None:
    """The rate is seen to differ while the parameters are still equal."""
    model = DistributedDataParallel(small())
    optimizer = SGD(model.parameters(), 0.1)

    def change(step: int) -> None:
        if (step, rank) == (3, 1):
            optimizer.param_groups[0]["lr"] = 0.05

    train(model, [optimizer], change)


WRONG: dict[Case, tuple[str, ...]] = {
    other_momentum: (
        "REPLICAS differ after step 4, equal after step 2.",
        "momentum_buffer of '2.bias' is",
        "raised ReplicaDrift",
    ),
    other_rate: (
        "lr of parameter group 0 of the optimizer of '0.bias' is 0.01 on rank 0, 0.02 on rank 1",
        "Give the optimizer and its schedule the same options",
        "raised ReplicaDrift",
    ),
    later_rate: (
        "REPLICAS differ after step 4, equal after step 2.",
        "lr of parameter group 0 is 0.1 on rank 0, 0.05 on rank 1",
        "after step 6 parameters or optimizer state differ too",
        "raised ReplicaDrift",
    ),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_is_wrong_is_named(case: Case, tmp_path: Path) -> None:
    is_named(case, WRONG[case], tmp_path)


# ------------------------------------------------------------------ what is right


def generator_and_critic(_: int, __: Path) -> list[Tensor]:
    made, judged = DistributedDataParallel(small()), DistributedDataParallel(nn.Linear(3, 1))
    first, second = SGD(made.parameters(), 0.1, momentum=0.9), torch.optim.AdamW(judged.parameters())
    for _ in range(7):
        judged(made(torch.randn(3, 4)).detach()).sum().backward()
        second.step()
        second.zero_grad()
        judged(made(torch.randn(3, 4))).sum().backward()
        first.step()
        first.zero_grad()
    return [param.detach().clone() for model in (made, judged) for param in model.parameters()]


def one_over_two_and_one_beside(rank: int, _: Path) -> list[Tensor]:
    """Beside it a rank trains a probe of its own, at its own rate."""
    torch.manual_seed(0)
    body, head = DistributedDataParallel(small()), DistributedDataParallel(nn.Linear(3, 2))
    most = [*body.parameters(), head.module.weight]
    probe = nn.Linear(3, 1 + rank)
    optimizers = [torch.optim.AdamW(most), SGD([head.module.bias], 0.1, momentum=0.9)]
    own = SGD(probe.parameters(), 0.1 + rank, momentum=0.5)
    for _ in range(7):
        hidden = body(torch.randn(3, 4))
        head(hidden).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        probe(hidden.detach() + rank).sum().backward()
        own.step()
        own.zero_grad()
    return [param.detach().clone() for model in (body, head) for param in model.parameters()]


def each_its_part(rank: int, _: Path) -> list[Tensor]:
    """The state is cut by hand: each rank steps what is its part, and sends it to the other."""
    model = DistributedDataParallel(small())
    parts = [[*model.module[0].parameters()], [*model.module[2].parameters()]]
    optimizer = torch.optim.AdamW(parts[rank])

    def send(_: int) -> None:
        for owner, part in enumerate(parts):
            for param in part:
                dist.broadcast(param.data, owner)
        model.zero_grad()

    return train(model, [optimizer], send)


def two_that_cut_their_state(_: int, __: Path) -> list[Tensor]:
    """Within each is an optimizer over the part of this rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit

    model = DistributedDataParallel(small())
    halves = [model.module[0].parameters(), model.module[2].parameters()]
    cut = [ZeroRedundancyOptimizer(half, optimizer_class=torch.optim.AdamW, lr=0.01) for half in halves]
    return train(model, cut)


def each_its_stage(rank: int, _: Path) -> list[Tensor]:
    """A pipeline of messages: only the last stage sends something between its last backward and its first step."""
    stage = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.Adam(stage.parameters())
    for _step in range(9):
        parts: list[tuple[Tensor, Tensor]] = []
        for _part in range(2):
            given = torch.randn(3, 4)
            if rank == 1:
                dist.recv(given, 0)
            made = stage(given.requires_grad_())
            parts.append((given, made))
            if rank == 0:
                dist.send(made.detach(), 1)
        for given, made in reversed(parts):
            behind = torch.ones(3, 4)
            if rank == 0:
                dist.recv(behind, 1)
            made.backward(behind)
            if rank == 1 and given.grad is not None:
                dist.send(given.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(torch.ones(1), 1)  # of the loss
    return [param.detach().clone() for param in stage.parameters()]


RIGHT: list[Case] = [
    generator_and_critic,
    one_over_two_and_one_beside,
    each_its_part,
    two_that_cut_their_state,
    each_its_stage,
]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_what_is_right_is_left_alone(case: Case, tmp_path: Path) -> None:
    is_left_alone(case, tmp_path)
