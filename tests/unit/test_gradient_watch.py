"""Which gradients are not finite, and when it is looked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from far_tensors import Far
from lockstep.observe.gradients import (
    SHARE,
    GradientWatch,
    faults_in_words,
    nonfinite_gradients,
    scaler_is_active,
)
from lockstep.observe.settings import FIRST_STEPS

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
def test_counts_what_is_not_finite(dtype: torch.dtype) -> None:
    bad = torch.ones(3, 5).to(dtype)
    bad[0, 0], bad[1, 2], bad[2, 4] = NAN, INF, -INF
    found = nonfinite_gradients([("good", torch.ones(4, dtype=dtype)), ("none", None), ("bad", bad)])
    assert [fault.name for fault in found] == ["bad"]
    assert str(found[0]) == "'bad' (1 NaN and 2 infinite of 15 elements)"


def test_large_finite_numbers_are_fine() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        most = torch.finfo(dtype).max
        assert nonfinite_gradients([("a", torch.full((9000,), most, dtype=dtype))]) == []


def test_opposite_infinities_and_sparse_gradients() -> None:
    assert nonfinite_gradients([("a", torch.tensor([INF, -INF]))])[0].infinite == 2
    rows, values = torch.tensor([[1, 4]]), torch.tensor([[1.0, NAN], [2.0, 3.0]])
    sparse = torch.sparse_coo_tensor(rows, values, (9, 2), check_invariants=True)
    assert nonfinite_gradients([("rows", sparse)])[0].nan == 1
    assert nonfinite_gradients([("empty", torch.empty(0))]) == []


def test_words() -> None:
    text = faults_in_words({2: ["'a' (1 NaN of 4 elements)"], 5: [f"'p{n}'" for n in range(9)]}, 812)
    assert "in backward pass 812: on rank 2, of 'a' (1 NaN of 4 elements); on rank 5, of 'p0', 'p1'" in text
    assert "and 4 more" in text


class Clock:
    now = 0.0
    cost = 0.0

    def __call__(self) -> float:
        self.now += self.cost  # of a look: what passes between its two readings
        return self.now


def looks(watch: GradientWatch, bucket: Tensor) -> bool:
    watch.begin()
    watch.look(bucket, ["a"], lambda: [bucket])
    return bool(watch.faults)


def test_looking_costs_its_share_of_the_time_and_no_more() -> None:
    clock = Clock()
    watch = GradientWatch(clock=clock)
    bad, looked, steps, step_s = torch.tensor([NAN]), 0, 2000, 0.01
    for step in range(steps):
        clock.now += step_s
        clock.cost = 1e-4  # 1 % of a step
        found = looks(watch, bad)
        clock.cost = 0.0
        looked += found
        assert found or step >= FIRST_STEPS
    assert looked * 1e-4 <= SHARE * clock.now * 1.1 + FIRST_STEPS * 1e-4
    assert looked > 0.8 * SHARE * steps * step_s / 1e-4
    cheap = GradientWatch(clock=clock)
    for _ in range(100):
        clock.now += step_s
        assert looks(cheap, bad)


def test_a_device_is_waited_for_once_all_buckets_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Far, "may_wait", False)
    watch, bad = GradientWatch(), torch.tensor([1.0, NAN]).as_subclass(Far)
    for values in (bad, torch.ones(3).as_subclass(Far)):
        watch.begin()
        watch.look(torch.ones(2).as_subclass(Far), ["a"], lambda: [bad])
        watch.look(values, iter(["b"]), lambda: [bad])
    monkeypatch.setattr(Far, "may_wait", True)
    assert watch.settle() == []  # of the last backward, in which another rank made the mean bad
    watch.begin()
    watch.look(bad, iter(["b"]), lambda: [bad])
    assert [str(fault) for fault in watch.settle()] == ["'b' (1 NaN of 2 elements)"]


def test_off() -> None:
    watch = GradientWatch("off")
    assert not looks(watch, torch.tensor([NAN]))
    assert watch.step == 1


def test_scaler_in_use() -> None:
    assert not scaler_is_active()
    idle = torch.amp.GradScaler("cpu", enabled=False)
    assert not scaler_is_active()
    scaler = torch.amp.GradScaler("cpu")
    assert scaler_is_active()
    del scaler, idle
    assert not scaler_is_active()
