"""The keyed permutation: one to one, even, and the same for ever."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.permutation import MAX_LENGTH, KeyedPermutation
from lockstep.errors import ConfigError

PINNED_10 = [2, 1, 8, 7, 6, 4, 3, 0, 9, 5]
PINNED_HUGE = [1541600531302773875, 2860969321400787622, 4494057248901122695]
SEEDS = st.integers(-(2**63), 2**64)


@given(st.integers(1, 3000), SEEDS, st.integers(0, 2**40))
def test_it_is_one_to_one(length: int, seed: int, epoch: int) -> None:
    samples = KeyedPermutation(length, seed, epoch)(np.arange(length))
    assert np.array_equal(np.sort(samples), np.arange(length))


@given(st.integers(2**20, MAX_LENGTH), SEEDS, st.data())
def test_large_positions_stay_inside_and_apart(length: int, seed: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=50, unique=True))
    samples = KeyedPermutation(length, seed, 0)(np.array([*chosen, length - 1]))
    assert samples.min() >= 0
    assert samples.max() < length
    assert len(set(samples[:-1].tolist())) == len(chosen)


def test_positions_may_come_alone_or_together() -> None:
    permutation = KeyedPermutation(1000, 3, 4)
    together = permutation(np.arange(1000))
    assert [int(permutation(np.array([position]))[0]) for position in range(0, 1000, 37)] == together[::37].tolist()


def test_seed_and_epoch_are_told_apart() -> None:
    orders = [tuple(KeyedPermutation(50, seed, epoch)(np.arange(50))) for seed in range(6) for epoch in range(6)]
    assert len(set(orders)) == 36


def test_the_order_is_a_promise() -> None:
    """A resumed run depends on it: a change here needs a new name for the order."""
    assert KeyedPermutation(10, 0, 0)(np.arange(10)).tolist() == PINNED_10
    assert KeyedPermutation(MAX_LENGTH, 1337, 2)(np.arange(3)).tolist() == PINNED_HUGE


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1])
def test_lengths_out_of_range_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=str(length)):
        KeyedPermutation(length, 0, 0)


# The limits are five standard deviations of a chi-square above its mean; seeds are fixed, so the outcome is too.


def _chi_square_limit(freedom: int) -> float:
    return freedom + 5 * (2 * freedom) ** 0.5


def test_all_orders_of_four_come_equally_often() -> None:
    orders = Counter(tuple(KeyedPermutation(4, 0, epoch)(np.arange(4)).tolist()) for epoch in range(1200))
    expected = 1200 / 24
    counts = [orders[order] for order in itertools.permutations(range(4))]
    assert sum((count - expected) ** 2 / expected for count in counts) < _chi_square_limit(23)


@pytest.mark.parametrize("length", [20, 65])
def test_every_sample_comes_to_every_position(length: int) -> None:
    epochs = 600
    orders = np.stack([KeyedPermutation(length, 0, epoch)(np.arange(length)) for epoch in range(epochs)])
    counts = np.stack([np.bincount(orders[:, position], minlength=length) for position in range(length)])
    expected = epochs / length
    assert ((counts - expected) ** 2 / expected).sum() < _chi_square_limit((length - 1) ** 2)


def test_neighbours_are_unrelated() -> None:
    """Of one order of a million samples: position and sample, and samples side by side, do not correlate."""
    length = 1_000_003
    samples = KeyedPermutation(length, 0, 0)(np.arange(length))
    limit = 5 / length**0.5
    assert abs(np.corrcoef(np.arange(length), samples)[0, 1]) < limit
    for distance in (1, 2, 64, 8192):
        assert abs(np.corrcoef(samples[:-distance], samples[distance:])[0, 1]) < limit
    steps = np.diff(samples) % length
    counts = np.bincount(steps * 1000 // length, minlength=1000)
    expected = len(steps) / 1000
    assert ((counts - expected) ** 2 / expected).sum() < _chi_square_limit(999)
