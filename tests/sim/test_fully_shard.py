"""Sharded training on ranks that are threads equals whole copies whose gradients are added in one order, bitwise."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
import shard_programs
from lockstep.comm.communicator import Communicator
from lockstep.errors import ShardingError
from lockstep.testing.worlds import run_threads
from shard_models import Tied
from shard_sides import Side, difference

EXACT = (
    *shard_programs.EVERYWHERE,
    *shard_programs.AGAINST_ONE_PROCESS,
    *shard_programs.OF_EACH_RANK,
    *shard_programs.ROUNDED_BY_TORCH,
    *shard_programs.REFUSED_BY_TORCH,
)


def both_sides(comm: Communicator, program: Callable[[Side], Any], tolerance: float | None) -> str | None:
    ours = program(Side("ours", comm, mesh=comm))
    return difference(ours, program(Side("plain", comm)), tolerance)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("program", EXACT, ids=lambda program: program.__name__)
def test_equals_whole_copies(program: Callable[[Side], Any], world_size: int) -> None:
    assert run_threads(world_size, both_sides, program, None) == [None] * world_size


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("program", shard_programs.ROUNDED, ids=lambda program: program.__name__)
def test_equals_whole_copies_but_for_roundings(program: Callable[[Side], Any], world_size: int) -> None:
    assert run_threads(world_size, both_sides, program, 1e-6) == [None] * world_size


def gradients_around_a_raising_hook(comm: Communicator) -> list[Any]:
    """A hook raises once, where the results of a backward are taken: after the last gradient has been computed."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    calls = itertools.count()

    def hook(_: torch.Tensor) -> None:
        if next(calls) == 1:
            raise ZeroDivisionError

    for layer in model:
        lockstep.fully_shard(layer, mesh=comm).set_all_reduce_hook(hook)
    lockstep.fully_shard(model, mesh=comm)
    seen: list[Any] = []
    for _ in range(3):
        model.zero_grad()
        try:
            model(torch.ones(1, 3)).sum().backward()
        except ZeroDivisionError:
            assert all(param.grad is None for param in model.parameters())
            seen.append("raised")
        else:
            grad: Any = model[1].bias.grad
            seen.append(grad.full_tensor().tolist())
    return seen


def test_a_hook_that_raises_leaves_nothing_to_the_next_step() -> None:
    assert run_threads(1, gradients_around_a_raising_hook) == [["raised", [1.0, 1.0], [1.0, 1.0]]]


def names_of_what_was_replaced_before_the_first_forward(comm: Communicator) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
    for layer in model:
        lockstep.fully_shard(layer, mesh=comm)
    lockstep.fully_shard(model, mesh=comm)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(torch.ones(1, 3))
    model[1].weight = nn.Parameter(torch.zeros(5, 3))
    try:
        model(torch.ones(1, 3))
    except ShardingError as error:
        return str(error)
    return ""


def test_a_parameter_that_was_replaced_before_the_first_forward_has_its_name() -> None:
    for rank, refusal in enumerate(run_threads(3, names_of_what_was_replaced_before_the_first_forward)):
        assert refusal.startswith(f"rank {rank}: parameter '1.weight' was sharded")


def a_tied_weight_under_another_name(comm: Communicator) -> list[Any]:
    """What is put in the place of one of two names of a parameter is not undone without a word."""
    torch.manual_seed(0)
    model = lockstep.fully_shard(Tied(), mesh=comm)
    tokens = torch.arange(3)
    model(tokens).sum().backward()
    saved = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)  # another parameter under each name
    seen: list[Any] = [model(tokens).detach().unique().numel(), model.head.weight is model.embed.weight]
    model(tokens).sum().backward()
    model.head.weight = nn.Parameter(torch.zeros(11, 8))
    try:
        model(tokens)
    except ShardingError as error:
        seen.append(str(error))
    return seen


def test_one_name_of_a_tied_weight_cannot_be_replaced_unseen() -> None:
    for rank, (values, is_tied, refusal) in enumerate(run_threads(3, a_tied_weight_under_another_name)):
        assert (values, is_tied) == (1, True)  # all weights equal, so are all outputs
        assert re.match(
            rf"rank {rank}: parameter 'embed.weight' was sharded, .* is now a Parameter with \(11, 8\)", refusal
        )
