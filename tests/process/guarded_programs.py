"""Programs of stock torch, run by each rank under a guard that looks often: what it says, and what comes out."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_groups import default_group, same
from torch import Tensor, nn

from lockstep.observe import torch_training
from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.guard import Guard
from lockstep.observe.settings import REPLICA_EVERY, GuardSettings, Mode
from lockstep.observe.sights import flight_path
from lockstep.observe.torch_training import attach_training
from lockstep.observe.torch_watch import attach
from lockstep.testing.worlds import run_processes

Case = Callable[[int, Path], Any]


def guarded(
    rank: int,
    world_size: int,
    folder: str,
    case: Case,
    is_watched: bool = True,
    mode: Mode = "on",
    every: int = 2,
    patience_s: float = 300.0,
) -> tuple[str, Any]:
    """(what this rank's guard said and what was raised, the result) of `case`.

    every: steps between two comparisons. patience_s: for the ends of the others; longer than a test may take.
    """
    torch.manual_seed(0)
    place = Path(folder)
    said, result = io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setenv(REPLICA_EVERY, str(every))
        for limit in ("_MEET_S", "_DISPUTE_S"):
            patch.setattr(torch_training, limit, patience_s)  # nobody is left behind because the machine is busy
        recorder = FlightRecorder(flight_path(folder, rank), rank, world_size)
        guard = Guard(
            recorder, Board(folder, recorder, range(world_size)), GuardSettings(mode, evidence="", look_s=0.05)
        )
        undo = [attach(guard), attach_training(guard)] if is_watched else []
        guard.start()
        try:
            with default_group("gloo", folder, rank, world_size):
                result = case(rank, place)
        except RuntimeError as error:
            said.write(f"raised {type(error).__name__}: {error}")
        finally:
            for call in reversed(undo):
                call()
            guard.close()
    return said.getvalue(), result


def is_named(case: Case, words: Sequence[str], folder: Path, *, ranks: int = 2) -> None:
    """What is wrong is said, in these words."""
    results = run_processes(ranks, guarded, ranks, str(folder), case, connect=False)
    said = " ".join(" ".join(text for text, _ in results).split())
    for each in words:
        assert " ".join(each.split()) in said, said


def is_left_alone(case: Case, folder: Path) -> None:
    """Nobody says or raises anything, nor torch that what watches is in its way; and the bits are those without."""
    for name in ("with", "without"):
        (folder / name).mkdir()
    watched = run_processes(2, guarded, 2, str(folder / "with"), case, connect=False)
    plainly = run_processes(2, guarded, 2, str(folder / "without"), case, False, connect=False)
    said = [text for text, _ in [*watched, *plainly]]
    assert not any(said), "\n".join(said)
    same([result for _, result in plainly], [result for _, result in watched])


def small(norm: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7) if norm else nn.ReLU(), nn.Linear(7, 3))


def train(
    model: nn.Module, steps: int = 7, optimizer: Any = None, before: Any = None, data: Any = None
) -> list[Tensor]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for step in range(steps):
        if before is not None:
            before(step)
        optimizer.zero_grad()
        model(torch.randn(3, 4) if data is None else data(step)).sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]
