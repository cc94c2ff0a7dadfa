"""Our DistributedSampler beyond torch's: epochs that advance, resume on any number of ranks, evaluation, errors."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import DistributedSampler
from lockstep.comm.communicator import Communicator
from lockstep.errors import ConfigError, DataError, UnsizedDataset
from lockstep.testing.worlds import run_threads

ORDERS = st.sampled_from(["torch", "keyed"])


def world(length: int, world_size: int, **kwargs: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(length), world_size, rank, **kwargs) for rank in range(world_size)]  # pyright: ignore


def whole_order(length: int, epoch: int, **kwargs: Any) -> list[int]:
    """The global order of an epoch, as a single rank sees it."""
    single = world(length, 1, **kwargs)[0]
    single.set_epoch(epoch)
    return list(single)


def in_turn(per_rank: list[list[int]]) -> list[int]:
    """What ranks in step take, in global order: a sample of rank 0, of rank 1, ..."""
    return [rank[i] for i in range(max(map(len, per_rank))) for rank in per_rank if i < len(rank)]


# ---------------------------------------------------------------------- epochs


def test_epochs_advance_by_themselves() -> None:
    sampler, single = world(100, 2)[1], DistributedSampler(range(100), 2, 1)
    for epoch in range(4):
        single.set_epoch(epoch)
        assert list(sampler) == list(single)
        assert sampler.epoch == epoch


def test_set_epoch_only_seeks() -> None:
    sampler = world(100, 1)[0]
    sampler.set_epoch(5)
    assert [list(sampler) for _ in range(3)] == [whole_order(100, epoch) for epoch in (5, 6, 7)]
    sampler.set_epoch(5)
    assert list(sampler) == whole_order(100, 5)


def test_an_iterator_that_gives_nothing_does_not_count() -> None:
    """DataLoader makes one and drops it where it has workers and no batches."""
    sampler = world(100, 1)[0]
    iter(sampler)
    assert list(sampler) == whole_order(100, 0)
    iter(sampler)
    iter(sampler)
    assert list(sampler) == whole_order(100, 1)


def test_a_pass_left_early_counts_and_says_so() -> None:
    """Scripts that stop after a number of batches would otherwise see the same samples again and again."""
    sampler = world(100, 1)[0]
    assert list(islice(sampler, 30)) == whole_order(100, 0)[:30]
    with pytest.warns(UserWarning, match=r"rank 0 left epoch 0 after 30 of 100 samples and begins epoch 1"):
        assert list(islice(sampler, 30)) == whole_order(100, 1)[:30]


def test_a_pass_left_early_is_silent_where_the_order_is_always_the_same() -> None:
    sampler = world(100, 1, shuffle=False)[0]
    for _ in range(3):
        assert list(islice(sampler, 30)) == list(range(30))


def test_a_pass_drawn_to_its_last_sample_is_complete() -> None:
    sampler = world(100, 2)[0]
    assert len([index for _, index in zip(range(50), sampler, strict=False)]) == 50
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(sampler)[:5] == in_turn([whole_order(100, 1)])[0:10:2]


@pytest.mark.parametrize("order", ["torch", "keyed"])
def test_ranks_read_one_order_in_turn(order: str) -> None:
    for world_size in (1, 2, 3, 4):
        passes = [list(sampler) for sampler in world(25, world_size, order=order)]
        expected = whole_order(25, 0, order=order)
        assert in_turn(passes)[:25] == expected
        assert in_turn(passes)[25:] == expected[: -25 % world_size]


# ---------------------------------------------------------------------- resume


@given(
    length=st.integers(1, 200),
    world_sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    tail=st.sampled_from(["repeat", "drop", "none"]),
    order=ORDERS,
)
def test_any_history_of_worlds_gives_each_sample_once(
    length: int, world_sizes: list[int], stops: list[int], tail: str, order: str
) -> None:
    if tail == "drop":
        world_sizes = [min(world_size, length) for world_size in world_sizes]
    settings: dict[str, Any] = {
        "order": order,
        "drop_last": tail == "drop",
        "pad": "none" if tail == "none" else "repeat",
    }
    expected = whole_order(length, 3, order=order)
    state: dict[str, Any] | None = None
    taken: list[int] = []
    for number, world_size in enumerate(world_sizes):
        samplers = world(length, world_size, **settings)
        for sampler in samplers:
            if state is None:
                sampler.set_epoch(3)
            else:
                sampler.load_state_dict(state)
                sampler.set_epoch(3)  # as every loop over epochs does
        is_last = number == len(world_sizes) - 1
        per_rank = [list(sampler if is_last else islice(sampler, stops[number])) for sampler in samplers]
        taken += in_turn(per_rank)
        if not is_last:
            state = json.loads(json.dumps(samplers[0].state_dict()))
            assert state["consumed"] <= length
    extra = taken[length:]
    if tail == "repeat":
        assert taken[:length] == expected
        assert len(extra) < max(world_sizes)
        assert extra == [expected[i % length] for i in range(len(extra))]
    elif tail == "none":
        assert taken == expected
    else:
        assert taken == expected[: len(taken)]
        assert length - len(taken) < max(world_sizes)


def test_ranks_that_are_equally_far_have_equal_states() -> None:
    samplers = world(100, 3)
    iterators = [iter(sampler) for sampler in samplers]
    for _ in range(7):
        for iterator in iterators:
            next(iterator)
    states = [sampler.state_dict() for sampler in samplers]
    assert states[0] == states[1] == states[2]
    assert states[0]["consumed"] == 21


@given(st.integers(1, 100), st.integers(1, 5), st.integers(1, 7), st.integers(0, 100))
def test_a_state_names_what_was_trained_not_what_was_drawn(length: int, world_size: int, batch: int, done: int) -> None:
    """Workers draw ahead; the state of the batches done is that of a loader without workers that stopped there."""
    ahead, exact = world(length, world_size)[0], world(length, world_size)[0]
    list(ahead)
    drawn = list(islice(exact, done * batch))
    assert ahead.state_dict(consumed=done * batch) == exact.state_dict(consumed=done * batch)
    assert ahead.state_dict(consumed=done * batch)["consumed"] == min(length, len(drawn) * world_size)


@pytest.mark.parametrize("tail", [{}, {"drop_last": True}, {"pad": "none"}], ids=["repeat", "drop", "none"])
def test_a_finished_epoch_stays_finished(tail: dict[str, Any]) -> None:
    first = world(10, 4, **tail)
    for sampler in first:
        list(sampler)
    state = first[0].state_dict()
    assert state["consumed"] == 10
    by_itself, by_loop = world(10, 3)[0], world(10, 3)[0]
    by_itself.load_state_dict(state)
    assert list(by_itself) == whole_order(10, 1)[0:10:3]
    by_loop.load_state_dict(state)
    by_loop.set_epoch(0)
    assert list(by_loop) == []
    by_loop.set_epoch(1)
    assert list(by_loop) == whole_order(10, 1)[0:10:3]


def test_a_resumed_epoch_is_followed_by_whole_ones() -> None:
    sampler = world(10, 1)[0]
    list(islice(sampler, 4))
    other = world(10, 2)[0]
    other.load_state_dict(sampler.state_dict())
    assert len(other) == 5
    assert list(other) == whole_order(10, 0)[4::2]
    assert list(other) == whole_order(10, 1)[::2]


def test_a_look_after_resume_does_not_lose_the_place() -> None:
    sampler = world(10, 1)[0]
    list(islice(sampler, 4))
    other = world(10, 1)[0]
    other.load_state_dict(sampler.state_dict())
    other.set_epoch(0)
    next(iter(other))
    other.set_epoch(0)
    assert list(other) == whole_order(10, 0)[4:]
    other.set_epoch(0)
    assert list(other) == whole_order(10, 0)


def test_states_before_and_after_a_pass() -> None:
    sampler = world(10, 1)[0]
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (0, 0)
    sampler.set_epoch(2)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (2, 0)
    list(sampler)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (2, 10)


@pytest.mark.parametrize(
    ("changed", "length", "match"),
    [
        ({}, 11, "length=10, here it is 11"),
        ({"seed": 1}, 10, "seed=0, here it is 1"),
        ({"order": "keyed"}, 10, "order='torch', here it is 'keyed'"),
        ({"shuffle": False}, 10, "shuffle=True, here it is False"),
    ],
)
def test_a_state_of_other_data_is_refused(changed: dict[str, Any], length: int, match: str) -> None:
    state = world(10, 2)[0].state_dict()
    with pytest.raises(DataError, match=match):
        world(length, 2, **changed)[0].load_state_dict(state)


@pytest.mark.parametrize(
    "damage", [{"consumed": -1}, {"consumed": 11}, {"consumed": 1.5}, {"epoch": "0"}, {"epoch": True}, {"version": 2}]
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    sampler = world(10, 2)[0]
    with pytest.raises(DataError, match=next(iter(damage))):
        sampler.load_state_dict({**sampler.state_dict(), **damage})


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="no sampler state: version, length"):
        world(10, 2)[0].load_state_dict({"step": 3})


def test_more_consumed_than_drawn_is_refused() -> None:
    sampler = world(10, 2)[0]
    with pytest.raises(DataError, match="consumed=4 on rank 0: the sampler has handed out 0"):
        sampler.state_dict(consumed=4)
    list(islice(sampler, 3))
    with pytest.raises(DataError, match="consumed=4 on rank 0: the sampler has handed out 3"):
        sampler.state_dict(consumed=4)


# ---------------------------------------------------------------------- evaluation, large datasets


@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), ORDERS)
def test_unpadded_ranks_share_every_sample_exactly_once(
    length: int, world_size: int, shuffle: bool, order: str
) -> None:
    samplers = world(length, world_size, pad="none", shuffle=shuffle, order=order)
    per_rank = [list(sampler) for sampler in samplers]
    assert Counter(index for indices in per_rank for index in indices) == Counter(range(length))
    assert [len(sampler) for sampler in samplers] == [len(indices) for indices in per_rank]
    assert {sampler.total_size for sampler in samplers} == {length}
    assert len(per_rank[0]) - len(per_rank[-1]) <= 1


def test_a_huge_dataset_starts_at_once_anywhere() -> None:
    length = 2**62
    whole = DistributedSampler(range(length), 1, 0, order="keyed")  # pyright: ignore[reportArgumentType]
    start = list(islice(whole, 20))
    assert len(set(start)) == 20
    state = {**whole.state_dict(), "consumed": 10}
    resumed = [DistributedSampler(range(length), 3, rank, order="keyed") for rank in range(3)]  # pyright: ignore
    for sampler in resumed:
        sampler.load_state_dict(state)
    assert in_turn([list(islice(sampler, 3)) for sampler in resumed]) == start[10:19]
    assert not whole.torch_order


# ---------------------------------------------------------------------- where rank and world come from, errors


def test_a_communicator_says_rank_and_world() -> None:
    def place(comm: Communicator) -> tuple[int, int]:
        sampler = DistributedSampler(range(10), comm=comm)  # pyright: ignore[reportArgumentType]
        return sampler.rank, sampler.num_replicas

    assert run_threads(3, place) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("length", "kwargs", "error", "match"),
    [
        (0, {}, DataError, "range is empty"),
        (0, {"pad": "none"}, DataError, "range is empty"),
        (3, {"drop_last": True}, DataError, "3 samples for 4 ranks with drop_last=True: all would be dropped"),
        (10, {"drop_last": True, "pad": "none"}, ConfigError, "choose one of them"),
        (10, {"pad": "zero"}, ConfigError, "pad='zero': choose one of repeat, none"),
        (10, {"order": "random"}, ConfigError, "order='random': choose one of torch, keyed"),
        (10, {"order": "torch", "torch_order": False}, ConfigError, "contradict each other"),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    length: int, kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        world(length, 4, **kwargs)


def test_comm_and_numbers_together_are_refused() -> None:
    def both(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="not both"):
            DistributedSampler(range(10), num_replicas=1, comm=comm)  # pyright: ignore[reportArgumentType]

    run_threads(1, both)


def test_a_dataset_that_grows_is_refused() -> None:
    data = [1, 2, 3]
    sampler = DistributedSampler(data, 1, 0)  # pyright: ignore[reportArgumentType]
    data.append(4)
    with pytest.raises(DataError, match="had 3 samples and has 4 now"):
        iter(sampler)


def test_an_unsized_dataset_is_refused_as_torch_and_as_data_error() -> None:
    with pytest.raises(UnsizedDataset, match="object has no samples to count"):
        DistributedSampler(object(), 1, 0)  # pyright: ignore[reportArgumentType]
    assert issubclass(UnsizedDataset, (TypeError, ValueError, DataError))


def test_torch_order_is_the_default_and_false_means_keyed() -> None:
    assert list(DistributedSampler(range(9), 1, 0)) == list(DistributedSampler(range(9), 1, 0, torch_order=True))  # pyright: ignore
    keyed = DistributedSampler(range(9), 1, 0, torch_order=False)  # pyright: ignore
    assert keyed.order == "keyed"
    assert list(keyed) == list(DistributedSampler(range(9), 1, 0, order="keyed"))  # pyright: ignore
