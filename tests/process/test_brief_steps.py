"""Steps that are only counted: what goes wrong in one of them is named with its step, as in all others."""

from __future__ import annotations

import itertools
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
from lockstep.observe.profile import run_record
from lockstep.observe.profile.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER
from lockstep.observe.profile.session import open_profile
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.torch_optimizers import OPTIMIZERS
from lockstep.testing.worlds import run_processes
from whole_records import read_run

_BRIEF_FROM = 3
_WARM = 8  # steps: of the first few, which warm up, the parts are no model for others
_STEPS = 40


def soon(
    rank: int, world_size: int, folder: str, case: Case, is_watched: bool = True, first: int = _BRIEF_FROM
) -> tuple[str, Any]:
    """As `guarded`, with steps that are only counted after the `first`, and looks less often than at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookout, "_YOUNG", 1)
        patch.setattr(pace, "FIRST", first)
        patch.setattr(pace, "SHORT_NS", 1 << 60)
        patch.setattr(run_record, "_ALL_LISTED", first)
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
    torch.optim.SGD(model.parameters(), 0.1)  # torch hangs its hooks onto the step of a class with its first optimizer
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


def marks_its_own(rank: int, folder: Path, *, extra: int = -1) -> Any:
    """A loop like our own: it marks its phases, ends its steps, and averages by a call. extra: a step with another."""
    torch.manual_seed(0)
    model, brief, started = small(), list[bool](), [0]
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    guard = OPTIMIZERS.steps.guard if OPTIMIZERS.steps is not None else None
    profile = None if guard is None else open_profile(folder, guard, {}, rank=rank, world_size=2)
    clock = StepClock() if profile is None else profile.clock
    for step in range(_STEPS):
        clock.switch(DATA)
        batch = (torch.full((300, 300), 1.0 + rank + step) @ torch.ones(300, 4)).clamp(max=0.1)[:3]
        clock.switch(FORWARD)
        loss = model(batch).sum()
        clock.switch(BACKWARD)
        optimizer.zero_grad()
        loss.backward()
        averaged = torch.nn.utils.parameters_to_vector([param.grad for param in model.parameters()])
        dist.all_reduce(averaged)
        for param, grad in zip(
            model.parameters(), averaged.split([p.numel() for p in model.parameters()]), strict=True
        ):
            param.grad = grad.view_as(param)
        clock.switch(OPTIMIZER)
        optimizer.step()
        clock.switch(OTHER)
        if (rank, step) == (1, extra):
            assert pace.PACE.is_brief
            dist.all_reduce(torch.ones_like(averaged))
        brief.append(clock.is_brief)
        if profile is not None:
            profile.step_done(step + 1, tokens=12)
            started.append(profile.clock._first)
    if profile is not None:
        profile.close()
    assert not clock.is_marked  # the next loop may be of another kind
    assert not pace.PACE.is_brief
    return [param.detach().clone() for param in model.parameters()], brief, started


def one_more_by_hand(rank: int, folder: Path) -> None:
    """After the optimizer's step: the loop's own has not ended."""
    marks_its_own(rank, folder, extra=25)


WRONG: dict[Case, tuple[str, ...]] = {
    one_more: ("MISMATCH in step 26", "Culprit: rank 1", "all_reduce float32 [59] sum", "raised CollectiveMismatch"),
    one_more_by_hand: ("MISMATCH in step 26", "Culprit: rank 1", "raised CollectiveMismatch"),
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


def with_and_without(ranks: int, case: Case, folder: Path, first: int = _BRIEF_FROM) -> tuple[list[Any], list[Any]]:
    """What each rank returns under the guard, and alone; nothing is said of it."""
    found: list[list[Any]] = []
    for name, is_watched in (("with", True), ("without", False)):
        (folder / name).mkdir()
        results = run_processes(ranks, soon, ranks, str(folder / name), case, is_watched, first, connect=False)
        assert [said for said, _ in results] == [""] * ranks
        found.append([result for _, result in results])
    return found[0], found[1]


def test_most_steps_are_only_counted_and_nothing_else_comes_out(tmp_path: Path) -> None:
    for (brief, trained), (never, alone) in zip(*with_and_without(3, trains, tmp_path), strict=True):
        assert not any(never)
        assert not any(brief[:_BRIEF_FROM])
        assert not brief[15]  # compared after it
        assert sum(brief) > _STEPS // 2
        assert all(torch.equal(one, other) for one, other in zip(trained, alone, strict=True))


def test_a_loop_that_marks_its_phases_is_thinned_alike(tmp_path: Path) -> None:
    watched, plainly = with_and_without(2, marks_its_own, tmp_path, _WARM)
    for (trained, brief, _), (alone, never, _) in zip(watched, plainly, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(trained, alone, strict=True))
        assert not any(never)
        assert not any(brief[:_WARM])
        assert sum(brief) > _STEPS // 2
        assert sum(not is_brief for is_brief in brief[_WARM + 1 :]) > 1  # compared, and one of sixteen
    for rank, record in read_run(tmp_path / "with").ranks.items():
        _, brief, started = watched[rank]
        assert [line.step for line in record.lines] == [*range(1, _STEPS + 1)]
        assert [bool(line.counted) for line in record.lines] == brief
        assert [line.tokens for line in record.lines] == [12] * _STEPS
        assert [line.operations for line in record.lines] == [after - of for of, after in itertools.pairwise(started)]
        assert all(line.phase("data") > 0 for line in record.lines)
        for line in record.lines:  # of one that is only counted less than a microsecond may be a phase's share
            assert line.counted or line.phase("forward") > 0
            assert sum(line.phases_us) > line.phase("data")
        assert sum(line.phase("forward") > 0 for line in record.lines) > 0.9 * _STEPS
