"""Learning rate, decay groups, and the optimizer's state by name."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import CheckpointMismatch
from lockstep.parallel.train_state import OptimizerState
from lockstep.train.config import OptimConfig
from lockstep.train.optim import build_optimizer, learning_rate

CONFIG = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=10)


def test_learning_rate_at_its_corners() -> None:
    assert learning_rate(0, 110, CONFIG) == pytest.approx(0.1)
    assert learning_rate(9, 110, CONFIG) == pytest.approx(1.0)
    assert learning_rate(10, 110, CONFIG) == pytest.approx(1.0)
    assert learning_rate(10 + 99 // 2, 110, CONFIG) == pytest.approx(0.55, abs=0.01)
    assert learning_rate(109, 110, CONFIG) == pytest.approx(0.1)


@given(steps=st.integers(1, 300), warmup=st.integers(0, 300))
def test_learning_rate_rises_then_falls_within_bounds(steps: int, warmup: int) -> None:
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=warmup)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 < rate <= 1.0 + 1e-12 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


class Tied(nn.Module):
    """A tied matrix, a bias, a norm and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def trained(seed: int, steps: int) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = build_optimizer(model, OptimConfig())
    for _ in range(steps):
        step_once(model, optimizer)
    return model, optimizer


def step_once(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model, optimizer = trained(0, 0)
    decayed, plain = (group["params"] for group in optimizer.param_groups)
    assert [id(p) for p in decayed] == [id(model.embedding.weight)]
    assert {id(p) for p in plain} == {id(p) for p in (model.norm.weight, model.norm.bias, model.head.bias)}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_state_goes_by_name_and_the_next_step_is_the_same_bit_for_bit() -> None:
    model, optimizer = trained(0, 3)
    state = copy.deepcopy(OptimizerState(model, optimizer).state_dict())
    assert set(state["state"]) == {"embedding.weight", "norm.weight", "norm.bias", "head.bias"}
    assert [group["params"] for group in state["param_groups"]] == [
        ["embedding.weight"],
        ["norm.weight", "norm.bias", "head.bias"],
    ]
    other, other_optimizer = trained(1, 0)
    other.load_state_dict(model.state_dict())
    OptimizerState(other, other_optimizer).load_state_dict(state)
    step_once(model, optimizer)
    step_once(other, other_optimizer)
    for (fqn, expected), actual in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, actual), fqn


def test_state_of_another_model_is_refused() -> None:
    model, optimizer = trained(0, 1)
    with pytest.raises(CheckpointMismatch, match=r"'nobody\.weight'"):
        OptimizerState(model, optimizer).load_state_dict({"state": {"nobody.weight": {}}})
