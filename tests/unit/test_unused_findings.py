"""Parameters that had no part in the loss: on which ranks, and who could not have told."""

from __future__ import annotations

import pytest
from test_training_findings import SITE, found, is_quiet

from lockstep.observe.facts import Facts


def test_parameters_that_no_rank_uses() -> None:
    finding = found(lambda facts, _: facts.tell("unused world/3", 2, [["a", "b"], False, SITE]))

    assert finding.culprits == ()
    assert "no rank used a, b in its loss" in finding.text


def test_parameters_that_one_rank_does_not_use() -> None:
    def tell(facts: Facts, rank: int) -> None:
        if rank == 1:
            facts.tell("unused world/3", 2, [[f"layer.{n}" for n in range(8)], is_alone, SITE])

    is_alone = False
    assert is_quiet(tell)  # the others may yet say the same
    is_alone = True
    finding = found(tell)
    assert finding.culprits == (1,)
    assert "layer.5 and 2 more" in finding.text
    assert "ranks 0,2 did" in finding.text


@pytest.mark.parametrize(("looking", "culprits"), [((0,), (0,)), ((0, 2), (1,))])
def test_who_looks_for_unused_parameters_may_not_use_them_either(
    looking: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    def tell(facts: Facts, rank: int) -> None:
        facts.tell("trained world/3", 1, [[], rank not in looking, SITE])
        if rank not in looking:
            facts.tell("unused world/3", 2, [["bias"], True, SITE])

    finding = found(tell)
    assert finding.culprits == culprits
    assert "may not either: wrapped with find_unused_parameters=True" in finding.text
    assert " did\n" not in finding.text
