"""Batches of tokens: every window once per epoch, the same for every number of ranks, exact resume."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.loader import TokenBatch, TokenLoader, TokenWindows, validation_batches
from lockstep.errors import ConfigError, DataError


def tokens_of(windows: int, context: int = 4, over: int = 0) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.arange(windows * context + 1 + over, dtype=np.uint16)


def loaders(windows: int, world_size: int, batch: int, **kwargs: Any) -> list[TokenLoader]:
    tokens = tokens_of(windows)
    return [
        TokenLoader(tokens, context=4, batch=batch, rank=rank, world_size=world_size, **kwargs)
        for rank in range(world_size)
    ]


def windows_in(batch: TokenBatch) -> list[int]:
    """Numbers of the windows: token i is the number i, so a window's first token says which it is."""
    return (batch.inputs[:, 0] // 4).tolist()


def step_of(world: list[Any]) -> list[int]:
    """The next step's windows over all ranks, in order."""
    return [window for steps in world for batch in next(steps) for window in windows_in(batch)]


def test_a_window_predicts_each_token_once() -> None:
    windows = TokenWindows(tokens_of(5, over=3), 4)
    assert len(windows) == 5
    inputs, targets = windows.batch(range(5))
    assert inputs.flatten().tolist() == list(range(20))
    assert targets.flatten().tolist() == list(range(1, 21))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert windows[2].targets.tolist() == windows[-3].targets.tolist() == [9, 10, 11, 12]
    with pytest.raises(IndexError):
        windows[5]


@given(
    windows=st.integers(1, 50),
    share=st.integers(1, 12),
    order=st.sampled_from(["torch", "keyed"]),
    steps=st.integers(1, 8),
)
def test_steps_read_the_epochs_end_to_end(windows: int, share: int, order: str, steps: int) -> None:
    world = [iter(loader) for loader in loaders(windows, 2, 2 * share, order=order, seed=3)]
    stream = [window for _ in range(steps) for window in step_of(world)]
    assert len(stream) == steps * 2 * share
    for epoch in range(0, len(stream) - windows + 1, windows):
        assert sorted(stream[epoch : epoch + windows]) == list(range(windows))
    assert max(Counter(stream[len(stream) // windows * windows :]).values(), default=1) == 1


def test_epochs_have_different_orders() -> None:
    stream = [window for _ in range(2) for window in step_of([iter(loader) for loader in loaders(40, 1, 80)])]
    assert stream[:40] != stream[40:80]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_microbatch_i_is_the_same_for_every_number_of_ranks(world_size: int) -> None:
    reference = iter(loaders(50, 1, 24, microbatch=2)[0])
    world = [iter(loader) for loader in loaders(50, world_size, 24, microbatch=2)]
    for _ in range(5):
        expected = [windows_in(batch) for batch in next(reference)]
        assert [windows_in(batch) for steps in world for batch in next(steps)] == expected


@given(
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=4),
    steps=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    windows=st.integers(5, 70),
)
def test_any_history_of_worlds_gives_the_same_stream(worlds: list[int], steps: list[int], windows: int) -> None:
    expected, single = [], iter(loaders(windows, 1, 12)[0])
    stream: list[int] = []
    state: dict[str, Any] | None = None
    for world_size, count in zip(worlds, steps, strict=False):
        world = loaders(windows, world_size, 12)
        for loader in world:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in world]
        for _ in range(count):
            stream += step_of(iterators)
            expected += step_of([single])
        states = [json.loads(json.dumps(loader.state_dict())) for loader in world]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert stream == expected


def test_the_batch_may_change_on_resume() -> None:
    first = loaders(30, 2, 8)
    done = step_of([iter(loader) for loader in first])
    state = first[0].state_dict()
    second = loaders(30, 2, 22)
    for loader in second:
        loader.load_state_dict(state)
    assert sorted(done + step_of([iter(loader) for loader in second])) == list(range(30))


def test_the_epoch_is_a_share_of_the_text() -> None:
    loader = loaders(16, 1, 8)[0]
    next(iter(loader))
    assert loader.epoch == 0.5


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"windows": 31}, "windows=30, here it is 31"),
        ({"seed": 5}, "seed=0, here it is 5"),
        ({"order": "keyed"}, "order='torch', here it is 'keyed'"),
        ({"digest": "b"}, "digest='', here it is 'b'"),
    ],
)
def test_a_state_of_other_tokens_is_refused(changed: dict[str, Any], match: str) -> None:
    state = loaders(30, 1, 8)[0].state_dict()
    with pytest.raises(DataError, match=match):
        loaders(changed.pop("windows", 30), 1, 8, **changed)[0].load_state_dict(state)


@pytest.mark.parametrize(
    ("world_size", "batch", "microbatch", "match"),
    [
        (3, 8, None, "batch=8 windows cannot be divided evenly among 3 ranks: try 9"),
        (4, 2, None, "batch=2 windows cannot be divided evenly among 4 ranks: try 4"),
        (2, 8, 3, "microbatch=3 does not divide a rank's share of the batch: 8 / 2 = 4 windows"),
        (2, 8, 0, "microbatch=0 does not divide"),
        (1, 0, None, "batch=0 windows cannot be divided"),
    ],
)
def test_uneven_batches_are_refused(world_size: int, batch: int, microbatch: int | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        loaders(30, world_size, batch, microbatch=microbatch)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="4 tokens are too few: one window of context 4 needs 5"):
        TokenWindows(np.arange(4, dtype=np.uint16), 4)
    with pytest.raises(ConfigError, match="context=0"):
        TokenWindows(tokens_of(3), 0)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
def test_validation_reads_every_window_once(windows: int, world_size: int, microbatch: int) -> None:
    tokens = tokens_of(windows)
    per_rank = [
        list(validation_batches(tokens, context=4, microbatch=microbatch, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert sorted(window for batches in per_rank for batch in batches for window in windows_in(batch)) == list(
        range(windows)
    )
    assert all(len(batch.inputs) <= microbatch for batches in per_rank for batch in batches)


def test_validation_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="microbatch=0"):
        list(validation_batches(tokens_of(3), context=4, microbatch=0))
