"""Every element of every parameter belongs to one rank, wherever the borders fall; and who may be cut at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.parallel.zero.plan import ALIGNMENT, FlatLayout, Span, cut
from lockstep.parallel.zero.probe import runs_fused, why_not_elementwise

NUMELS = st.lists(st.integers(0, 200), max_size=12)


@given(NUMELS, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 50)))
def test_every_element_on_one_rank(numels: list[int], world_size: int, longest: int | None) -> None:
    layout = FlatLayout(numels, world_size)
    seen: list[tuple[int, int]] = []
    for rank in range(world_size):
        for span in layout.spans(rank, longest):
            assert longest is None or span.stop - span.start <= longest
            place = layout.starts[span.param]
            assert (
                span.start == span.stop
                or rank * layout.part <= place + span.start <= place + span.stop <= (rank + 1) * layout.part
            )
            seen += [(span.param, element) for element in range(span.start, span.stop)]
    assert seen == [(param, element) for param, numel in enumerate(numels) for element in range(numel)]


@given(NUMELS, st.integers(1, 6))
def test_parts_are_equal_and_everything_begins_aligned(numels: list[int], world_size: int) -> None:
    layout = FlatLayout(numels, world_size)
    assert layout.numel == layout.part * world_size
    assert all(start % ALIGNMENT == 0 for start in (*layout.starts, layout.part))
    assert layout.numel < sum(numels) + ALIGNMENT * (len(numels) + world_size)


def test_a_parameter_without_elements_is_counted_on_one_rank() -> None:
    layout = FlatLayout([0, 20], 2)
    assert layout.spans(0) == [Span(0, 0, 0), Span(1, 0, 16)]
    assert layout.spans(1) == [Span(1, 16, 20)]


def test_cut() -> None:
    assert cut(3, 10, 3) == [(3, 6), (6, 9), (9, 10)]
    assert cut(3, 10, None) == [(3, 10)]
    assert cut(4, 4, 3) == cut(5, 4, None) == []


# ------------------------------------------------------------------ who may be cut

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    assert why_not_elementwise(getattr(torch.optim, name), {}) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Adafactor", "depends on other elements"),
        ("LBFGS", "closure"),
        ("Muon", "2D parameters"),
        ("SparseAdam", "dense gradients"),
    ],
)
def test_not_elementwise(name: str, reason: str) -> None:
    assert reason in (why_not_elementwise(getattr(torch.optim, name), {}) or "")


class Normed(torch.optim.Optimizer):
    """A user's own: it divides by the norm of the whole gradient."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


def test_a_norm_is_found_whatever_the_learning_rate() -> None:
    assert why_not_elementwise(Normed, {"lr": 0.0}) is not None


def test_the_trial_leaves_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    why_not_elementwise(torch.optim.AdamW, {})
    assert torch.equal(before, torch.get_rng_state())


def test_fused_where_the_class_has_it_and_nothing_else_is_asked_for() -> None:
    cpu = torch.device("cpu")
    assert runs_fused(torch.optim.AdamW, {"lr": 0.1}, cpu)
    assert not runs_fused(torch.optim.AdamW, {"foreach": False}, cpu)
    assert not runs_fused(torch.optim.AdamW, {"fused": False}, cpu)
    assert not runs_fused(torch.optim.NAdam, {}, cpu)
