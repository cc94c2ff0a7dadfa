"""Models that fully_shard has cut, and that were not the same one: what is said of them, and of which nothing is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_training_findings import SITE, Tell, is_quiet, noted

from lockstep.observe import torch_cuts
from lockstep.observe.facts import Facts
from lockstep.observe.replica_diff import Entry, fold


def cuts(held: Sequence[Sequence[tuple[str, str]]]) -> Tell:
    """held: of each rank, the parameters that are still as they were cut."""

    def tell(facts: Facts, rank: int) -> None:
        if rank < len(held):
            entries = [Entry(f"parameter {name!r}", value) for name, value in held[rank]]
            facts.tell(f"replica cut world/{len(held)}/1", 1, [fold(entries), "cut", "", []], lambda: entries)
            facts.tell(f"lines cut world/{len(held)}/1", "now", {"cut": f"cut at {SITE}"})

    return tell


NORM = ("norm", "1")


@pytest.mark.parametrize(
    ("held", "culprits", "what"),
    [
        ("ab", (0, 1), "a on rank 0, b on rank 1\n  ranks 0,1:"),
        ("aba", (1,), "a on ranks 0, 2, b on rank 1\n  ranks 0-2:"),
        ("baa", (0,), "a on ranks 1, 2, b on rank 0\n  ranks 0-2:"),
        ("abc", (0, 1, 2), "a on rank 0, b on rank 1, c on rank 2\n  ranks 0-2:"),
    ],
)
def test_models_that_were_cut_after_different_seeds_are_noted(held: str, culprits: tuple[int, ...], what: str) -> None:
    (note,) = noted(cuts([[NORM, ("weight", each)] for each in held]), size=len(held))

    assert (note.kind, note.culprits, note.is_certain) == ("replica", culprits, False)
    assert note.text.startswith("lockstep: REPLICAS differ: built from different seeds.  Culprit")
    assert f"parameter 'weight' is {what} cut at {SITE}\n" in note.text, note.text
    assert "'norm'" not in note.text
    assert all(len(line) <= 110 for line in note.text.splitlines())


@pytest.mark.parametrize(
    "held",
    [
        [[NORM, ("weight", "a")], [NORM, ("weight", "a")]],
        [[NORM, ("weight", "a")], [NORM]],  # rank 0 has given the others what it had
        [[NORM], [NORM, ("weight", "b")], [NORM]],
        [[], [NORM, ("bias", "b")], [("weight", "a")]],
    ],
)
def test_what_was_loaded_since_the_cut_is_not_compared(held: Sequence[Sequence[tuple[str, str]]]) -> None:
    assert is_quiet(cuts(held), size=len(held))


def test_cuts_are_not_compared_before_all_have_told() -> None:
    tell = cuts([[("weight", "a")], [("weight", "b")], [("weight", "b")]])
    assert is_quiet(lambda facts, rank: tell(facts, rank) if rank < 2 else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_only_what_another_seed_or_a_checkpoint_would_change_is_looked_at(dtype: torch.dtype) -> None:
    mine, other = (torch.randn(9, 40, generator=torch.Generator().manual_seed(seed)).mul(50) for seed in (1, 2))
    looked_at = [mine.to(dtype), mine.to(dtype)[:, 1:], other.to(dtype)]
    even = [torch.ones(5, 7).to(dtype), torch.zeros(3).to(dtype), mine.to(dtype)[:0], mine.to(dtype)[:1, :1]]

    digests = torch_cuts._digests(looked_at)
    assert len({0, *digests}) == 4, "each is another one, and none is left out"
    assert torch_cuts._digests([*even, looked_at[0].clone()]) == [0, 0, 0, 0, digests[0]]
