"""The digest of an epoch: what it adds up to, what it finds, how ranks put it together, what a state keeps of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep import Coverage
from lockstep.comm.communicator import Communicator
from lockstep.data.sample_log import Span, sample_ids, sample_record, samples_by_epoch, stream_spans
from lockstep.errors import DataError
from lockstep.observe.tally import DIGEST_BYTES, Tally, tally_from, tally_of, whole_tally
from lockstep.testing.worlds import run_threads
from sample_differences import differences

PINNED_10 = "0a00000000000000b052481bf7bb0489fd26069c078aa46c"
IDS = st.lists(st.integers(0, 2**62), max_size=40)
WORD = 2**64


def by_hand(sample: int) -> int:
    """The hash of one sample, in Python's own numbers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        return word ^ (word >> 31)

    seeded = [(sample * 0x9E3779B97F4A7C15 + key) % WORD for key in (0x6C6F636B73746570, 0xD1B54A32D192ED03)]
    low, high = (mix(mix(word)) for word in seeded)
    return low + (high << 64)


def counted(ids: Any, length: int = 10, epoch: int = 0) -> Coverage:
    coverage = Coverage(length)
    coverage.add(ids, epoch)
    return coverage


@given(IDS)
def test_a_tally_is_a_count_and_a_sum_of_128_bits(ids: list[int]) -> None:
    assert tally_of(ids) == Tally(len(ids), sum(map(by_hand, ids)) % 2**128)
    assert tally_from(tally_of(ids).digest()) == tally_of(ids)


@given(st.permutations(range(30)), st.lists(st.integers(0, 30), max_size=4).map(sorted))
def test_any_parts_in_any_order_add_up(order: list[int], cuts: list[int]) -> None:
    parts = [tally_of(order[first:last]) for first, last in pairwise([0, *cuts, 30])]
    assert sum(parts, start=Tally()) == whole_tally(30)
    assert whole_tally(30) - tally_of(order[:7]) == tally_of(order[7:])


def test_many_samples_are_hashed_as_few_are() -> None:
    ids = np.random.default_rng(0).permutation(50_001)
    parts = (tally_of(range(first, min(first + 97, 50_001))) for first in range(0, 50_001, 97))
    assert tally_of(ids) == whole_tally(50_001) == sum(parts, start=Tally())


def test_the_digest_is_a_promise() -> None:
    """Runs compare it across versions."""
    assert whole_tally(10).digest().hex() == PINNED_10
    assert len(whole_tally(10).digest()) == DIGEST_BYTES


def test_epochs_have_one_digest() -> None:
    coverage = counted(range(10))
    coverage.add(list(range(9, -1, -1)), epoch=7)
    assert coverage.digest(0) == coverage.digest(7) == coverage.expected().digest()
    assert [str(verdict) for verdict in coverage.verdicts()] == [
        "epoch 0: each of 10 samples exactly once",
        "epoch 7: each of 10 samples exactly once",
    ]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (range(7), "7 samples were used where 10 should be: 3 or more are missing"),
        ([*range(10), 4], "11 samples were used where 10 should be: 1 or more came twice"),
        ([*range(9), 8], "10 samples were used, the right number, but not the right ones"),
        ([*range(9), 10], "10 samples were used, the right number, but not the right ones"),
        ([*range(8), 3, 3], "10 samples were used, the right number, but not the right ones"),
        ([], "0 samples were used where 10 should be: 10 or more are missing"),
    ],
)
def test_what_is_wrong_is_said(ids: Any, words: str) -> None:
    verdict = counted(ids).verdict()
    assert not verdict.is_exact
    assert verdict.words == words


@given(st.lists(st.integers(0, 9), max_size=14))
def test_nothing_but_each_sample_once_passes(ids: list[int]) -> None:
    """Two that are twice do not cancel, as they would with an exclusive-or."""
    assert counted(ids).verdict().is_exact == (sorted(ids) == list(range(10)))


def test_a_tail_is_part_of_what_is_expected() -> None:
    coverage = counted([*range(10), 3, 4])
    coverage.end(0, repeated=[3, 4])
    assert coverage.verdict().words == "each of 10 samples exactly once, 2 once more to fill the last round"
    coverage = counted(range(8))
    coverage.end(0, dropped=[8, 9])
    assert coverage.verdict().words == "each of 10 samples exactly once, except 2 left out at the end"
    coverage.end(0, dropped=[7, 9])
    assert not coverage.verdict().is_exact


def test_a_log_names_the_samples() -> None:
    assert str(differences(range(10), 10)) == "every sample exactly once"
    found = differences([0, 1, 1, 1, 3, 12, -1], 6)
    assert (found.missing, found.extra) == ((2, 4, 5), (1, 1, 12, -1))
    assert str(found) == "3 missing (2, 4, 5), 4 too often (1, 1, 12, -1)"
    assert str(differences([], 20)) == "20 missing (0, 1, 2, 3, 4, 5, 6, 7, ...), 0 too often"
    assert str(differences([0, 1, 2, 0], 4, repeated=[0], dropped=[3])) == "every sample exactly once"


# ---------------------------------------------------------------------- ranks


def test_ranks_that_met_know_everything() -> None:
    def work(comm: Communicator) -> tuple[list[str], dict[str, Any]]:
        coverage, said = Coverage(10, comm.world_size), []
        for epoch in range(2):  # rank 2 has nothing to add to the first epoch
            coverage.add(range(comm.rank * 5, comm.rank * 5 + 5) if comm.rank < 2 else range(0), epoch)
            said.append(coverage.verdict(epoch).words)
            coverage.combine(comm)
            said.append(coverage.verdict(epoch).words)
        return said, coverage.state_dict(1)

    results = run_threads(3, work)
    once, unknown = "each of 10 samples exactly once", "not known yet: call combine(comm) on every rank"
    assert results[0][0] == results[1][0] == [unknown, once, unknown, once]
    assert results[0][1] == results[1][1] == results[2][1]
    assert [row[:2] for row in results[0][1]["epochs"]] == [[0, 1]]


def test_a_pass_that_begins_again_replaces_the_first_attempt_on_all_ranks() -> None:
    def work(comm: Communicator) -> bool:
        mine = range(comm.rank, 10, comm.world_size)
        coverage = Coverage(10, comm.world_size)
        coverage.load_state_dict(counted(range(4)).state_dict(0))
        coverage.add(mine[2:4])
        coverage.combine(comm)
        coverage.add(mine[4:])
        coverage.restart(0, start=4)
        coverage.add(mine[2:])
        coverage.combine(comm)
        return coverage.verdict().is_exact

    assert run_threads(2, work) == [True, True]


def test_the_default_group_is_used_where_no_communicator_is_given(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        coverage = Coverage(10, world_size=2)
        for epoch in range(2):  # the group is still there after it
            coverage.add(range(10), epoch)
            coverage.combine()
            assert coverage.verdict(epoch).is_exact
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- states


def test_a_state_is_small_and_comes_back() -> None:
    coverage = Coverage(10)
    for epoch in range(1000):
        coverage.add(range(10), epoch)
    coverage.add([3], 1000)
    coverage.end(999, repeated=[1])
    state = json.loads(json.dumps(coverage.state_dict(1000)))
    assert [row[:2] for row in state["epochs"]] == [[0, 998], [999, 999], [1000, 1000]]
    assert len(json.dumps(state)) < 500
    other = Coverage(10)
    other.load_state_dict(state)
    assert other.state_dict(1000) == state
    assert other.tally(1000) == tally_of([3])
    assert not other.verdict(999).is_exact, "its tail says that one sample came again"


def test_a_state_of_ranks_that_have_not_met_says_so() -> None:
    coverage = Coverage(10, world_size=2)
    coverage.add(range(3), epoch=4)
    after = Coverage(10)
    after.load_state_dict(coverage.state_dict(4))
    after.add(range(10), epoch=4)
    after.add(range(10), epoch=5)
    assert [v.is_exact for v in after.verdicts()] == [False, True]
    assert after.verdict(4).words.startswith("not known: a state was saved before the ranks had combined")


@pytest.mark.parametrize(
    "damage",
    [
        {"length": 11},
        {"epochs": None},
        {"epochs": [[0]]},
        {"epochs": [[0, 0, "00", "", ""]]},
        {"epochs": [[0, 0, "zz" * 24, "", ""]]},
        {"epochs": [[3, 2, "00" * 24, "", ""]]},
        {"epochs": [[0, 2**60, "00" * 24, "", ""]]},
        {"epochs": [["0", "1", "00" * 24, "", ""]]},
        {"unknown_through": "x"},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    coverage = counted(range(3))
    state = coverage.state_dict(0)
    with pytest.raises(DataError):
        coverage.load_state_dict({**state, **damage})
    with pytest.raises(DataError, match="no state of a coverage but a list"):
        coverage.load_state_dict([])  # pyright: ignore[reportArgumentType]
    assert coverage.state_dict(0) == state


# ---------------------------------------------------------------------- the log


def test_a_line_of_the_log_gives_its_samples() -> None:
    record = {"step": 3, "loss": 1.0, **sample_record(stream_spans(18, 31, 10), 10, None, 0)}
    assert record["samples"] == [[1, 8, 10], [2, 0, 10], [3, 0, 1]]
    assert sample_ids(json.loads(json.dumps(record))) == [8, 9, *range(10), 0]
    assert samples_by_epoch(record)[0] == (1, [8, 9])
    assert sample_ids(sample_record([Span(0, 9, 12)], 10, None, 0)) == [9, 0, 1], "padding begins the epoch again"
    keyed = [sample_ids(sample_record([Span(e, 0, 10)], 10, "keyed", 0)) for e in range(2)]
    assert sorted(keyed[0]) == sorted(keyed[1]) == list(range(10))
    assert keyed[0] != keyed[1]


@pytest.mark.parametrize("line", [{"step": 3}, {"samples": [[0, 1]], "length": 10, "order": None, "seed": 0}])
def test_a_line_without_samples_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="does not say which samples"):
        sample_ids(line)
    with pytest.raises(DataError, match="order='random' is none of"):
        sample_ids(sample_record([Span(0, 0, 1)], 10, "random", 0))  # pyright: ignore[reportArgumentType]
