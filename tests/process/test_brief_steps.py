"""Steps that are only counted: what goes wrong in one of them is named with its step, as in all others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded_programs import Case, guarded, small, train
from test_torch_training import (
    flipped_bit_then_tested,
    leaves_out_a_step,
    never_steps,
    no_set_epoch,
    out_of_sync,
    trained_on_by_one,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from far_tensors import Spoilt
from lockstep.observe import lookout, pace
from lockstep.observe.torch_optimizers import OPTIMIZERS
from lockstep.testing.worlds import run_processes

_BRIEF_FROM = 3
_STEPS = 40


def soon(rank: int, world_size: int, folder: str, case: Case, is_watched: bool = True) -> tuple[str, Any]:
    """As `guarded`, with steps that are only counted from the fourth on, and looks less often than at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookout, "_YOUNG", 1)
        patch.setattr(pace, "FIRST", _BRIEF_FROM)
        patch.setattr(pace, "SHORT_NS", 1 << 60)
        return guarded(rank, world_size, folder, case, is_watched, every=16)


def counts_brief(steps: list[bool]) -> Any:
    """To be called before each step."""
    return lambda step: steps.append(pace.PACE.is_brief)


def trains(rank: int, _: Path) -> tuple[list[bool], Any]:
    """Which of its steps are only counted, and what it has trained."""
    brief: list[bool] = []
    return brief, train(DistributedDataParallel(small()), _STEPS, before=counts_brief(brief))


def one_more(rank: int, _: Path) -> None:
    """Rank 1 has a collective of its own in a step that is only counted, as large as those of DDP: all go on."""
    model = DistributedDataParallel(small())
    size = sum(param.numel() for param in model.parameters())

    def ask(step: int) -> None:
        if (rank, step) == (1, 25):
            assert pace.PACE.is_brief
            dist.all_reduce(torch.ones(size))

    train(model, _STEPS, before=ask)


def spoilt(rank: int, *, behind: bool) -> None:
    """A NaN in step 26 of rank 1: in the loss, or behind a finite one."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(_STEPS):
        is_here = (rank, step) == (1, 25)
        assert not is_here or pace.PACE.is_brief
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).sum()
        factor = float("nan") if is_here else 1.0
        loss = Spoilt.apply(loss, factor) if behind else loss * factor  # type: ignore[no-untyped-call]
        loss.backward()
        optimizer.step()


def nan_in_the_loss(rank: int, _: Path) -> None:
    spoilt(rank, behind=False)


def nan_behind_the_loss(rank: int, _: Path) -> None:
    spoilt(rank, behind=True)


def two_optimizers(rank: int, _: Path) -> Any:
    """From step 10 on a second one steps after the first."""
    model = DistributedDataParallel(small())
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        if step > 10:
            other.step()
    return list(model.state_dict().values())


def accumulates_later(rank: int, _: Path) -> Any:
    """In no_sync() from step 12 on, another number of times on each rank."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for _micro in range((1 + rank) * (step > 12)):
                model(torch.randn(3, 4)).sum().backward()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return list(model.state_dict().values())


def averages_in_between(rank: int, _: Path) -> Any:
    """The ranks' losses, by a call of the program's own, every third step."""
    model = DistributedDataParallel(small())

    def ask(step: int) -> None:
        if step % 3 == 0:
            dist.all_reduce(torch.ones(4))

    return train(model, _STEPS, before=ask)


def loaded_at_the_end(rank: int, _: Path) -> None:
    """Rank 0 tests an older state, after a step that was only counted."""
    model = DistributedDataParallel(small())
    older = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    brief: list[bool] = []
    train(model, _STEPS - 1, before=counts_brief(brief))
    assert brief[-1]
    if rank == 0:
        with torch.no_grad():
            for name, param in model.module.named_parameters():
                param.copy_(older[name])


class Twice(torch.optim.SGD):
    """Its step calls that of its parent class, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def steps_twice(rank: int, _: Path) -> None:
    """A step within a step counts once, so none is only counted."""
    model, brief = DistributedDataParallel(small()), list[bool]()
    optimizer = Twice(model.parameters(), 0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        counts_brief(brief)(step)
        optimizer.step()
    assert not any(brief)
    assert OPTIMIZERS.steps is not None
    assert OPTIMIZERS.steps.guard.recorder.step == _STEPS


def steps_around_a_closure(rank: int, _: Path) -> None:
    """What makes a step one that is not only counted may come within the optimizer's own: here a second forward."""
    model, brief = DistributedDataParallel(small()), list[bool]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(_STEPS):

        def closure(often: int = 1 + (step == 25)) -> Tensor:
            optimizer.zero_grad()
            loss = sum((model(torch.randn(3, 4)).sum() for _ in range(often)), torch.zeros(()))
            loss.backward()
            return loss

        counts_brief(brief)(step)
        optimizer.step(closure)  # type: ignore[arg-type]
    assert brief[25]
    assert OPTIMIZERS.steps is not None
    assert OPTIMIZERS.steps.guard.recorder.step == _STEPS


WRONG: dict[Case, tuple[str, ...]] = {
    one_more: ("MISMATCH in step 26", "Culprit: rank 1", "all_reduce float32 [59] sum", "raised CollectiveMismatch"),
    out_of_sync: ("NO_SYNC on some ranks only, in step 5", "Culprit: rank 1", "rank 1 ran 1 backward in no_sync()"),
    never_steps: ("since step 5", "Culprit: rank 1", "optimizer.step()"),
    leaves_out_a_step: ("Culprit: rank 1", "optimizer.step()"),
    flipped_bit_then_tested: ("REPLICAS differ after step 7", "parameter '2.weight' is"),
    nan_in_the_loss: ("in step 26", "rank 1", "the loss is not finite"),
    nan_behind_the_loss: ("in step 26", "rank 1"),
    no_set_epoch: ("DATA: the samples come in the order of the last pass", "in pass 2"),
}


def said_by(results: Sequence[tuple[str, Any]]) -> str:
    """All ranks."""
    return " ".join(" ".join(text for text, _ in results).split())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_what_is_wrong_is_named(case: Case, tmp_path: Path) -> None:
    said = said_by(run_processes(2, soon, 2, str(tmp_path), case, connect=False))
    assert all(" ".join(words.split()) in said for words in WRONG[case]), said


RIGHT = [
    two_optimizers,
    accumulates_later,
    averages_in_between,
    loaded_at_the_end,
    trained_on_by_one,
    steps_twice,
    steps_around_a_closure,
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_what_is_right_is_left_alone(case: Case, tmp_path: Path) -> None:
    assert [said for said, _ in run_processes(2, soon, 2, str(tmp_path), case, connect=False)] == ["", ""]


def test_most_steps_are_only_counted_and_nothing_else_comes_out(tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    watched = run_processes(3, soon, 3, str(tmp_path / "with"), trains, connect=False)
    plainly = run_processes(3, soon, 3, str(tmp_path / "without"), trains, False, connect=False)
    assert [said for said, _ in [*watched, *plainly]] == [""] * 6
    for (_, (brief, trained)), (_, (never, alone)) in zip(watched, plainly, strict=True):
        assert not any(never)
        assert not any(brief[:_BRIEF_FROM])
        assert not brief[15]  # compared after it
        assert sum(brief) > _STEPS // 2
        assert all(torch.equal(one, other) for one, other in zip(trained, alone, strict=True))
