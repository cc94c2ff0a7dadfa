"""Trained by torch's fully_shard, by ours, and whole on every rank, a model has the same weights, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp2_sides import Cases

import shard_programs
from shard_sides import Side

CASES = Cases(__name__)

for program in shard_programs.EVERYWHERE:
    CASES.add(1, 2, against=("torch", "plain", "one"))(program)
for program in (*shard_programs.AGAINST_ONE_PROCESS, *shard_programs.OF_EACH_RANK):
    CASES.add(2)(program)
for program in shard_programs.ROUNDED:
    CASES.add(2, tolerance={"plain": 1e-6})(program)
for program in shard_programs.ROUNDED_BY_TORCH:
    CASES.add(2, tolerance={"torch": 1e-6})(program)
for program in shard_programs.REFUSED_BY_TORCH:
    CASES.add(2, 3, against="plain")(program)
for program in (
    shard_programs.one_unit,
    shard_programs.large_parameters,
    shard_programs.parameters_of_one_element,
    shard_programs.a_model_is_freed,
):
    CASES.add(2, 3, 4)(program)


@CASES.add(3, 4, against=("plain", "one"))
def twenty_steps_on_more_ranks(side: Side) -> Any:
    return [program(side) for program in shard_programs.EVERYWHERE]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_and_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
