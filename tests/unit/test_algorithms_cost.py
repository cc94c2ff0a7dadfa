"""The closed forms, against each other and against the bounds that the papers give. Against real traffic: tests/sim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import algorithm_costs as cost
from algorithm_costs import Cost, Path, Traffic

ALL_REDUCE = {
    "ring": cost.ring_all_reduce,
    "halving_doubling": cost.halving_doubling_all_reduce,
    "tree": cost.tree_all_reduce,
    "naive": cost.naive_all_reduce,
}
worlds = st.integers(1, 70)
numels = st.integers(0, 5000)


@given(worlds, numels, st.integers(0, 69), st.data())
def test_what_is_sent_is_received(world_size: int, numel: int, root: int, data: st.DataObject) -> None:
    root %= world_size
    parts = data.draw(st.lists(st.integers(0, 99), min_size=world_size, max_size=world_size))
    found = [all_reduce(world_size, numel, 2) for all_reduce in ALL_REDUCE.values()]
    for one_root in (cost.tree_reduce, cost.tree_broadcast, cost.naive_reduce, cost.naive_broadcast):
        found.append(one_root(world_size, numel, root))
    found.append(cost.chain_broadcast(world_size, numel, root, 1 + numel // 7))
    found += [cost.ring_reduce_scatter(parts), cost.ring_all_gather(parts), cost.dissemination_barrier(world_size)]
    found.append(cost.pairwise_all_to_all([[a * b % 11 for b in range(world_size)] for a in range(world_size)]))
    for each in found:
        assert len(each.ranks) == world_size
        assert sum(rank.sends for rank in each.ranks) == sum(rank.receives for rank in each.ranks)
        assert sum(rank.sent_bytes for rank in each.ranks) == sum(rank.received_bytes for rank in each.ranks)
        assert max(rank.steps for rank in each.ranks) <= each.path.steps + 1  # the middle of a chain has one more
        assert max(rank.reduced_bytes for rank in each.ranks) <= each.path.reduced_bytes


@given(worlds, numels)
def test_all_move_the_same_in_all_and_the_ring_spreads_it(world_size: int, numel: int) -> None:
    """2 n (W - 1) is what any all-reduce must move at least. What differs is who moves it, and so how long it takes."""
    least = 2 * numel * (world_size - 1)
    for name, all_reduce in ALL_REDUCE.items():
        ranks = all_reduce(world_size, numel, 1).ranks
        assert sum(rank.sent_bytes for rank in ranks) == least
        busiest = max(max(rank.sent_bytes, rank.received_bytes) for rank in ranks)
        assert busiest * world_size >= least
        if name == "ring":
            assert busiest <= 2 * -(-numel // world_size) * (world_size - 1)
        elif name == "naive":
            assert busiest == least / 2


@pytest.mark.parametrize("world_size", [2, 4, 8, 64, 1024])
def test_the_textbook_s_table(world_size: int) -> None:
    """n bytes on W = 2**k ranks."""
    n, k, W = 4096 * 1024, world_size.bit_length() - 1, world_size
    paths = {name: all_reduce(W, n // 4, 4).path for name, all_reduce in ALL_REDUCE.items()}
    assert paths == {
        "ring": Path(2 * (W - 1), 2 * n * (W - 1) // W, n * (W - 1) // W),
        "halving_doubling": Path(2 * k, 2 * n * (W - 1) // W, n * (W - 1) // W),
        "tree": Path(2 * k, 2 * k * n, k * n),
        "naive": Path(2 * (W - 1), 2 * (W - 1) * n, (W - 1) * n),
    }


def test_where_a_chain_overtakes_a_tree() -> None:
    """A tree sends a large tensor log2 W times, a chain of segments hardly more than once."""
    alpha_s, beta_s, segment = 10e-6, 1e-9, 1 << 18
    tree, chain = (
        [call(nbytes).path.time_s(alpha_s, beta_s) for nbytes in (1 << 10, 1 << 26)]
        for call in (lambda n: cost.tree_broadcast(16, n), lambda n: cost.chain_broadcast(16, n, 0, segment))
    )
    assert tree[0] < chain[0]
    assert chain[1] < tree[1] / 3


def test_the_time_of_a_path() -> None:
    assert Path(3, 1000, 500).time_s(2.0, 0.25, 0.5) == 6.0 + 250.0 + 250.0
    assert Path(3, 1000, 500).time_s(2.0, 0.25) == 256.0


def test_one_after_the_other() -> None:
    first = Cost((Traffic(1, 2, 3, 4, 5, 6), Traffic()), Path(1, 2, 3))
    second = Cost((Traffic(1, 1, 1, 1, 1, 1), Traffic(1, 0, 0, 0, 0, 0)), Path(10, 20, 30))
    assert first.then(second) == Cost((Traffic(2, 3, 4, 5, 6, 7), Traffic(1, 0, 0, 0, 0, 0)), Path(11, 22, 33))


@given(st.integers(0, 10**6), st.integers(1, 8), worlds)
def test_the_parts_of_a_tensor(numel: int, itemsize: int, world_size: int) -> None:
    parts = cost.parts_of(numel, itemsize, world_size)
    assert sum(parts) == numel * itemsize
    assert sorted(parts, reverse=True) == parts
    assert parts[0] - parts[-1] in (0, itemsize)


def test_one_rank_says_nothing() -> None:
    for all_reduce in ALL_REDUCE.values():
        assert all_reduce(1, 99, 4) == Cost((Traffic(),), Path())
    assert cost.chain_broadcast(1, 99) == cost.dissemination_barrier(1) == Cost((Traffic(),), Path())
