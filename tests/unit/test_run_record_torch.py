"""What is noted of a stock torch program: its loss however it is computed, its learning rate, what it holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lockstep.observe.profile.notes import Note
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.torch_notes import TorchNotes, learning_rate
from lockstep.observe.profile.writer import RunWriter
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.testing.worlds import run_threads
from whole_records import read_run


class Watched:
    """Notes of a program whose steps the test ends itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = StepClock()
        self.writer = RunWriter(folder, self.clock, rank=0, world_size=1, attempt="a/0")
        guard = SimpleNamespace(rank=0, before_look=[], facts=SimpleNamespace(sights={}))
        self.notes = TorchNotes(self.writer, cast("Any", guard))
        self.detach = self.notes.attach()
        self.clock.close_reader, self.clock.values = self.writer.close, self.notes.values

    def stepped(self, step: int) -> None:
        """It ends in the thread that calls."""
        self.clock.owner = get_ident()
        self.clock.step_done(step, 0)

    def read(self) -> list[Note]:
        self.writer.close()
        return list(read_run(self.folder).ranks[0].notes)

    def values(self) -> list[dict[str, Any]]:
        return [dict(one.fields) for one in self.read() if one.kind == "values"]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    before = torch.autograd.backward, torch.amp.GradScaler.scale
    made = Watched(tmp_path)
    yield made
    made.detach()
    made.writer.close()
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == before


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def test_loss_is_the_one_whose_gradient_is_applied(watched: Watched) -> None:
    model, optimizer = small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    losses = []
    for step in range(1, 5):
        parts = [model(torch.randn(5, 3)).square().mean() / 2 for _ in range(2)]
        losses.append(sum(part.item() for part in parts))
        for part in parts:
            (scaler.scale(part) if step % 2 else part).backward()
            part.detach().zero_()  # in place, after the fact
        optimizer.step()
        optimizer.zero_grad()
        watched.stepped(step)
    optimizer.step()  # without a backward
    watched.stepped(5)
    values = watched.values()
    assert [one["step"] for one in values] == [1, 2, 3, 4, 5]
    assert [one["loss"] for one in values[:4]] == pytest.approx(losses, rel=1e-6)
    assert values[4] == {"step": 5, "lr": 0.25}


def test_roots_that_are_no_single_number_are_left_alone(watched: Watched) -> None:
    model, optimizer = small()
    outputs = model(torch.randn(4, 3))
    outputs.backward(torch.ones_like(outputs))
    first, second = model(torch.randn(2, 3)).sum(), model(torch.randn(2, 3)).sum()
    torch.autograd.backward([first, second])
    optimizer.step()
    watched.stepped(1)
    assert watched.values() == [{"step": 1, "lr": 0.25}]


def test_what_the_program_logs_as_its_loss_is_not_mixed_with_ours(watched: Watched) -> None:
    model, optimizer = small()
    for step in range(1, 5):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        watched.stepped(step)
        watched.notes.knows_loss = step >= 2
    assert ["loss" in one for one in watched.values()] == [True, True, False, False]


def test_layout_is_noted_once_of_the_outermost_optimizer_and_hooks_end(watched: Watched) -> None:
    def train() -> None:
        model, optimizer = small()
        for step in range(1, 4):
            model(torch.randn(4, 3)).sum().backward()
            with_step = optimizer.register_step_post_hook(lambda *_, step=step: watched.stepped(step))
            optimizer.step()  # the hooks of one optimizer are called before those of all
            with_step.remove()

    optimizers = sys.modules["torch.optim.optimizer"]

    before = len(optimizers._global_optimizer_post_hooks)
    train()
    assert len(optimizers._global_optimizer_post_hooks) == before - 1
    (layout,) = [one.fields for one in watched.read() if one.kind == "layout"]
    assert layout["step"] == 1
    assert [row[0] for row in layout["units"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert layout["memory"]["optimizer"] == layout["memory"]["parameters"] == layout["memory"]["gradients"] == 4 * 36


def test_optimizer_without_parameters_has_no_rate_and_trains_on(watched: Watched) -> None:
    model, optimizer = small()
    optimizer.param_groups.clear()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    watched.stepped(1)
    assert [set(one) for one in watched.values()] == [{"step", "loss"}]


def test_optimizer_that_is_gone_hands_over(watched: Watched) -> None:
    for rate in (0.5, 0.125):
        model, _ = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            watched.stepped(watched.clock.step + 1)
        del model, optimizer
    rates = [one.get("lr") for one in watched.values()]
    assert rates[:3] == [0.5] * 3
    assert rates[-1] == 0.125


def test_sharded_optimizer_is_seen_around_those_that_it_runs(watched: Watched) -> None:
    def one(comm: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, process_group=comm, lr=0.5)
        for step in range(1, 3):
            model(torch.ones(4, 5)).sum().backward()
            optimizer.step()
            watched.stepped(step)

    run_threads(1, one)
    (layout,) = [one.fields for one in watched.read() if one.kind == "layout"]
    assert layout["strategy"] == "ShardedOptimizer"
    assert [row[0] for row in layout["units"]] == ["weight", "bias"]
    assert 8 * 18 <= layout["memory"]["optimizer"] < 8 * 18 + 16 * 2 + 1


@pytest.mark.parametrize(("rate", "told"), [(0.1, 0.1), (torch.tensor(0.5), 0.5), (torch.ones(1, device="meta"), None)])
def test_learning_rate_is_told_where_it_can_be_read_at_once(rate: Any, told: float | None) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    assert learning_rate(optimizer) == told
    del optimizer.param_groups[0]["lr"]
    assert learning_rate(optimizer) is None
    assert learning_rate(None) is None
